// Saved prompts: texts with names, for the system prompt or a message.

const LIBRARY = "polarlm.prompts";

/** The prompts in an untrusted value, by name. */
function readPrompts(value) {
  const read = (Array.isArray(value) ? value : []).filter((prompt) => typeof prompt?.name === "string" && typeof prompt.text === "string");
  return read.map(({ name, text }) => ({ name: name.trim().slice(0, 80), text })).filter(({ name, text }) => name && text);
}

/** What this browser keeps now: another tab may have changed it. */
const savedPrompts = () => readStoredValue("localStorage", LIBRARY, readPrompts);

/** Keeps prompts; each takes the place of the one that has its name. */
function savePrompts(prompts) {
  const all = new Map([...savedPrompts(), ...prompts].map((prompt) => [prompt.name, prompt]));
  keepPrompts([...all.values()]);
}

function keepPrompts(prompts) {
  prompts.sort((one, other) => one.name.localeCompare(other.name));
  writeStorage("localStorage", LIBRARY, JSON.stringify(prompts));
  drawPrompts();
}

function drawPrompts() {
  $("prompts").replaceChildren(...savedPrompts().map(({ name, text }) => {
    const title = visible(name), act = (label, does, what) => button(label, does, "quiet", what);
    const label = dir(make("span", "name", title));
    label.title = visible(text.slice(0, 500));
    return put(
      make("li"), label,
      act("System", () => {
        $("system").value = text;
        remember();
        announce(`The system prompt is ${title}.`);
      }, `Use ${title} as the system prompt`),
      act("Message", () => insert(text), `Write ${title} into the message`),
      act("Delete", () => {
        keepPrompts(savedPrompts().filter((prompt) => prompt.name !== name));
        $("prompt-name").focus();
      }, `Delete ${title}`),
    );
  }));
}

/** Writes a text into the message, in place of what is selected there. */
function insert(text) {
  if ($("settings").classList.contains("open")) sheet("settings", false);
  const { selectionStart, selectionEnd } = $("message");
  $("message").setRangeText(text, selectionStart, selectionEnd, "end");
  keepDraft();
  $("message").focus();
}

onSubmit($("naming"), () => {
  const name = $("prompt-name").value.trim(), text = $("system").value.trim() || $("message").value.trim();
  $("prompt-says").textContent = !text ? "Write the prompt first, as the system prompt or as a message." : name ? "" : "A prompt needs a name.";
  if (!text || !name) return;
  savePrompts([{ name, text }]);
  $("prompt-name").value = "";
  $("prompt-says").textContent = `Saved as “${visible(name)}”.`;
});
$("library").addEventListener("toggle", drawPrompts);
window.addEventListener("storage", ({ key }) => { if (key === LIBRARY) drawPrompts(); });

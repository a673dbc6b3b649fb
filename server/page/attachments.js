// Files that go with a message, as text in its prompt.

const LARGEST = 64 * 2 ** 20; // bytes of a file that the page reads; the server has its own limits

let attached = []; // the files of the next message: { name, text, tokens }; text is null until it has been read

const attachedTokens = () => attached.reduce((sum, file) => sum + file.tokens, 0);

/** The text of a user's message as the model gets it: each file between fences, then what the user wrote. */
const contentOf = ({ text, files = [] }) => [...files.map(fenced), text].filter(Boolean).join("\n\n");

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)), fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** Reads files, counts their tokens, and shows them above the message. */
async function attach(files) {
  const troubles = [];
  sayAttached("");
  await Promise.all([...files].map(async (file) => {
    const entry = { name: file.name.slice(0, 200), text: null, tokens: null };
    attached.push(entry);
    drawAttached();
    try {
      const text = await readFile(file);
      const [whole, empty] = await Promise.all([fenced({ name: entry.name, text }), "…"].map(countTokens));
      Object.assign(entry, { text, tokens: Math.max(0, whole - empty) });
    } catch (error) {
      attached = attached.filter((other) => other !== entry);
      troubles.push(`${visible(entry.name)}: ${error instanceof Failure ? error.message : "This file cannot be read."}`);
      sayAttached(troubles.join(" "));
    }
    drawAttached();
  }));
}

/** The text of a file. Throws a Failure. */
async function readFile(file) {
  if (file.size > LARGEST) throw new Failure(`This file has ${size(file.size)}, and at most ${size(LARGEST)} are read.`);
  if (/\.pdf$/i.test(file.name) || file.type === "application/pdf") {
    return (await (await ask("documents/text", { method: "POST", body: file, type: "application/pdf" })).json()).text;
  }
  let text = "\0";
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()); } catch { /* it is no text */ }
  if (text.includes("\0")) throw new Failure("This file is neither text (UTF-8) nor a PDF.");
  if (!text.trim()) throw new Failure("This file is empty.");
  return text.replaceAll("\r\n", "\n");
}

/** The tokens of a request's prompt, or of a prompt of one message. */
const tokensOf = async (request, signal) => (await askJson("v1/chat/completions/input_tokens", request, signal)).input_tokens;
const countTokens = (content) => tokensOf({ messages: [{ role: "user", content }], ...(askedModel() && { model: askedModel() }) });

const sayAttached = (sentence) => { $("attached-says").textContent = sentence; };

function drawAttached() {
  $("attached").replaceChildren(...chips(attached, (file) => {
    attached = attached.filter((other) => other !== file);
    sayAttached("");
    drawAttached();
    $("attach").focus();
  }));
  const tokens = attachedTokens();
  const over = stats?.context && used.tokens + tokens > stats.context;
  $("attached").classList.toggle("over", Boolean(over));
  if (over) sayAttached(`With these files the conversation has about ${count(used.tokens + tokens, "token")}, and the context has ${number(stats.context)}.`);
}

/** An item for each file, with a button that removes it. */
function chips(files, drop) {
  return files.map((file) => {
    const name = visible(file.name);
    const remove = button("Remove", () => drop(file), "quiet", `Remove ${name}`);
    const tokens = file.tokens === null ? "reading …" : count(file.tokens, "token");
    return put(make("li"), dir(make("span", "name", name)), make("span", "tokens", tokens), sign(remove, "failed"));
  });
}

/** A file of a message that was sent: its name, and its text when it is opened. */
function shownFile({ name, text, tokens }) {
  const body = region("pre", "", "", visible(name)), element = fold("file", `${visible(name)} · ${count(tokens, "token")}`, body);
  element.addEventListener("toggle", () => { if (!body.firstChild) addText(body, visibleCode(text)); });
  return element;
}

$("attach").addEventListener("click", () => $("attachments").click());
$("attachments").addEventListener("change", () => {
  attach($("attachments").files);
  $("attachments").value = "";
  $("message").focus();
});
$("message").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // otherwise the browser leaves the page for the file
    if (name === "drop") attach(event.dataTransfer.files);
  });
}

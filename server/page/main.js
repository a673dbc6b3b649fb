// The composer, sheets, the key, and the keyboard.

function busy(yes) {
  const hasFocus = document.activeElement === $("send") || document.activeElement === $("stop");
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  $("turns").classList.toggle("busy", yes);
  if (hasFocus) $("message").focus();
}

/** Shows what is happening. Screen readers read the sentence, but not the figure, which changes all the time. */
function tell(sentence, figure = "") {
  setText($("status"), sentence);
  $("progress").textContent = figure;
}

const SAID_MS = 7000; // how long a text for screen readers exists: later, reading or searching the page must not find it twice
let silenceTimer = 0;

/** Has screen readers read a text that is not shown. */
function announce(text) {
  $("said").textContent = text;
  clearTimeout(silenceTimer);
  silenceTimer = setTimeout(() => { $("said").textContent = ""; }, SAID_MS);
}

// -- the view follows the answer --------------------------------------------------------------------------------------

let followsEnd = true; // whether the end of the conversation stays in view
let scrolledTo = 0;

function follow() {
  if (!followsEnd) return;
  $("log").scrollTop = $("log").scrollHeight;
  scrolledTo = $("log").scrollTop; // so that the event of this tells nothing of what somebody does
}

$("log").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("log"), below = scrollHeight - scrollTop - clientHeight;
  if (scrollTop === scrolledTo) return;
  followsEnd = below < (scrolledTo > scrollTop ? 1 : 48); // the smallest step upwards ends it, unless the end itself moved up
  scrolledTo = scrollTop;
}, { passive: true });

/** The view stays where it is when somebody begins to scroll up: a piece that comes before the first step would undo it. */
const leaveEnd = () => { if ($("log").scrollTop > 0) followsEnd = false; };

$("log").addEventListener("wheel", ({ deltaY }) => { if (deltaY < 0) leaveEnd(); }, { passive: true });
$("log").addEventListener("keydown", ({ key, target }) => {
  if (["ArrowUp", "PageUp", "Home"].includes(key) && !target.closest("textarea, input, select")) leaveEnd();
});

new ResizeObserver(follow).observe($("log"));

// -- the composer -----------------------------------------------------------------------------------------------------

$("message").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "ArrowUp" && !$("message").value) {
    const row = rows.findLast(({ message }) => message.role === "user");
    if (!row || live) return;
    event.preventDefault();
    edit(build(row));
  }
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  $("say").requestSubmit();
});

let chatToSend = null; // the conversation whose message goes once its files are read
let waitingText = ""; // what is said of that

const areRead = () => attachedFiles.every(({ text }) => text !== null);

/** Says what the files of the next message wait for. */
function tellWaiting() {
  if (live) return;
  const loads = stats?.state && (askedModel() ?? stats.model), said = waitingText;
  waitingText = areRead() ? "" : loads ? `Loading ${visible(loads)} …` : chatToSend === current ? "The message goes once its files are read …" : "";
  if (waitingText || (said && $("status").textContent === said)) tell(waitingText);
}

/** Sends the message that has waited for its files, now that they are read. */
function sendRead() {
  tellWaiting();
  if (chatToSend === current && areRead()) $("say").requestSubmit();
}

/** Keeps what is not sent yet in this tab, also over a reload. */
const keepDraft = () => writeStorage("sessionStorage", DRAFT, $("message").value);

$("message").addEventListener("input", () => {
  chatToSend = null; // it is still being written
  tellWaiting();
  keepDraft();
});

onSubmit($("say"), async () => {
  const conversation = current;
  const empty = () => !$("message").value.trim() && !attachedFiles.length;
  if (empty() || live || !settingsHold()) return;
  if (!areRead()) {
    chatToSend = conversation;
    return tellWaiting();
  }
  chatToSend = null;
  if (isNearlyFull($("message").value, attachedTokens()) && (!(await compact()) || current !== conversation)) return; // the field keeps the message
  if (empty()) return;
  const text = $("message").value.trim(), files = attachedFiles;
  const withoutFiles = leftOut.length && { leftOut: `${leftOut.join(", ")} ${leftOut.length === 1 ? "was" : "were"} left out.` };
  $("message").value = "";
  keepDraft();
  attachedFiles = [];
  leftOut = [];
  drawAttached();
  sayAttached("");
  say({ role: "user", text, ...(files.length && { files }), ...withoutFiles });
  $("message").focus();
});

$("stop").addEventListener("click", () => live?.stop.abort());

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  const open = document.querySelector(".chats.open, .settings.open");
  if (open) sheet(open.id, false);
  else live?.stop.abort();
});

$("new").addEventListener("click", newChat);

function openSearch() {
  if (isShut("chats")) sheet("chats", true);
  else $("search").focus();
  $("search").select();
}

const KEYS = { k: openSearch, "shift+o": newChat }; // with Ctrl or Cmd

document.addEventListener("keydown", (event) => {
  const does = (event.ctrlKey || event.metaKey) && !event.altKey && KEYS[`${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`];
  if (!does) return;
  event.preventDefault();
  if ($("settings").classList.contains("open")) sheet("settings", false);
  does();
});

// -- sheets: on a narrow screen, conversations and settings cover the page --------------------------------------------

/** Whether a part of the page is a sheet on this screen and not open. */
const isShut = (name) => getComputedStyle($(`open-${name}`)).display !== "none" && !$(name).classList.contains("open");

function sheet(name, open) {
  $(name).classList.toggle("open", open);
  $(`open-${name}`).setAttribute("aria-expanded", String(open));
  for (const part of ["head", "log", "meters", "composer", "chats", "settings"]) $(part).inert = open && part !== name;
  if (open) $({ chats: "search", settings: "system" }[name]).focus();
  else $(`open-${name}`).focus();
}

for (const name of ["chats", "settings"]) {
  $(`open-${name}`).addEventListener("click", () => sheet(name, true));
  $(name).querySelector("[data-close]").addEventListener("click", () => sheet(name, false));
  new ResizeObserver(() => {
    if ($(name).classList.contains("open") && getComputedStyle($(`open-${name}`)).display === "none") sheet(name, false);
  }).observe(document.body);
}

$("open-meters").addEventListener("click", () => {
  const open = $("meters").classList.toggle("open");
  if (open) $("engine").open = true;
  $("open-meters").setAttribute("aria-expanded", String(open));
});

// -- the key ----------------------------------------------------------------------------------------------------------

let lockedAnswer = null; // the answer that was refused because the key was missing or wrong

function lock(message = null) {
  const again = readStorage("localStorage", KEY);
  lockedAnswer = message ?? lockedAnswer;
  $("door-why").textContent = again ? "The server does not know this key." : "This server asks for one. This browser keeps it until the settings forget it.";
  if ($("door").hidden) {
    $("door").hidden = false;
    $("key").focus();
  }
}

onSubmit($("door"), async () => {
  writeStorage("localStorage", KEY, $("key").value);
  $("keyed").hidden = false;
  $("door").hidden = true;
  $("key").value = "";
  $("message").focus();
  await look();
  const message = lockedAnswer;
  if (!$("door").hidden || !message) return;
  lockedAnswer = null;
  if (message === rows.at(-1)?.message && !live) answer(message);
});

$("forget").addEventListener("click", () => {
  writeStorage("localStorage", KEY, "");
  $("keyed").hidden = true;
  look();
});
$("keyed").hidden = !readStorage("localStorage", KEY);

// -- start ------------------------------------------------------------------------------------------------------------

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});

$("message").value = readStorage("sessionStorage", DRAFT) ?? "";
$("engine").open = readStorage("localStorage", ENGINE) === "open";
$("engine").addEventListener("toggle", () => writeStorage("localStorage", ENGINE, $("engine").open ? "open" : ""));
showSettings(current.settings);
drawList();
inTurn(openShelved); // first: the server may name conversations that were deleted, and the browser has to delete them, too
look();

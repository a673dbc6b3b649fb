"use strict";

// The conversations of this browser: the list at the side, files of them, and switching between them.

const chats = new Map(); // id → conversation; one without messages is not in it
let deleted = null; // the conversation that can be restored
let renaming = false; // whether the current conversation is being renamed
let listed = []; // what the list shows

/** Shows how much of the context the current conversation takes, by its last answer. */
function settle() {
  const path = pathOf(current), last = path.findLast((message) => message.usage);
  used = last
    ? { tokens: last.usage.prompt + last.usage.completion, cached: last.usage.cached ?? 0, exact: last === path.at(-1) }
    : { tokens: 0, cached: 0, exact: path.length === 0 };
  meter();
}

/** Keeps the current conversation after something was said in it. */
function changed() {
  current.changed = Date.now();
  chats.set(current.id, current);
  if (location.hash !== `#${current.id}`) history.replaceState(null, "", `#${current.id}`);
  keepConversation(current, true);
  drawList();
}

/** Ends the answer that is being generated, without a notice; what was received of it is kept. */
function leave() {
  const left = live;
  live = null;
  left?.stop.abort();
  busy(false);
}

function openChat(conversation, fresh = true) {
  leave();
  if ($("unkept").textContent === GONE) warn("");
  current = conversation;
  renaming = false;
  for (const row of rows.splice(0)) drop(row);
  showSettings(current.settings);
  draw();
  settle();
  drawList();
  tell("");
  speed(0, 0);
  if (fresh) history.pushState(null, "", current.children.length ? `#${current.id}` : location.pathname + location.search);
  following = true;
  follow();
  look();
}

function newChat() {
  openChat(newConversation(lastSettings()), current.children.length > 0);
  if (!isShut("chats") && $("chats").classList.contains("open")) sheet("chats", false);
  $("message").focus();
}

// -- the list ---------------------------------------------------------------------------------------------------------

function found(conversation, words) {
  if (!words) return true;
  const texts = Object.values(conversation.messages).flatMap(({ text, results }) => text ?? results.map((result) => result.text));
  return [titleOf(conversation), ...texts].some((text) => text.toLowerCase().includes(words));
}

function nameTab() {
  document.title = current.children.length ? `${visible(titleOf(current))} – PolarLM` : "PolarLM";
}

function drawList() {
  if (renaming) return; // a new list would lose what is typed there
  nameTab();
  const words = $("search").value.trim().toLowerCase();
  const sorted = [...chats.values()].filter((chat) => found(chat, words)).sort((a, b) => b.changed - a.changed);
  const none = sorted.length ? "" : words ? "No conversation has these words in it." : "No conversation is kept yet.";
  if ($("none").textContent !== none) $("none").textContent = none;
  $("export-all").disabled = !chats.size;
  const items = sorted.flatMap((chat) => [chat, titleOf(chat), chat === current]), list = $("list");
  if (items.length === listed.length && items.every((item, place) => item === listed[place])) return; // new items would lose a click
  listed = items;
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.does : null;
  list.replaceChildren(...sorted.map(listItem));
  if (focused) (list.querySelector(`[data-does="${focused}"]`) ?? list.querySelector("[aria-current]"))?.focus({ preventScroll: true });
}

function listItem(chat) {
  const item = make("li"), name = visible(titleOf(chat));
  const opener = button(name, () => {
    if (chat !== current) openChat(chat);
    if ($("chats").classList.contains("open")) sheet("chats", false);
    $("message").focus();
  }, "chat");
  opener.dir = "auto";
  opener.title = name;
  opener.dataset.does = chat.id;
  item.append(opener);
  if (chat !== current) return item;
  opener.setAttribute("aria-current", "true");
  const does = { rename: ["Rename", () => rename(chat, opener)], save: ["Export", () => exportChats([chat])], remove: ["Delete", () => remove(chat)] };
  const row = make("div", "row");
  for (const [key, [label, act]] of Object.entries(does)) {
    const made = button(label, act, "quiet");
    made.dataset.does = key;
    row.append(made);
  }
  item.append(row);
  return item;
}

/** Replaces a conversation's button with a field for its name. Nothing else moves: it may be clicked next. */
function rename(chat, opener) {
  const field = make("input");
  field.value = titleOf(chat);
  field.maxLength = 200;
  field.setAttribute("aria-label", "Name of the conversation");
  const done = (keepIt) => {
    if (!renaming) return;
    renaming = false;
    if (keepIt) {
      Object.assign(chat, { title: field.value.trim(), named: later(chat.named) });
      keepConversation(chat);
    }
    opener.textContent = opener.title = visible(titleOf(chat));
    nameTab();
    field.replaceWith(opener);
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault(); // otherwise the key would press the button that is focused next
    event.stopPropagation();
    done(event.key === "Enter");
    drawList();
    $("list").querySelector("[data-does=rename]")?.focus();
  });
  field.addEventListener("blur", () => done(true));
  renaming = true;
  opener.replaceWith(field);
  field.focus();
  field.select();
}

function remove(chat) {
  deleted = chat;
  chats.delete(chat.id);
  removeConversation(chat.id);
  openChat(newConversation(lastSettings()));
  $("undone").textContent = `Deleted “${visible(titleOf(chat))}”.`;
  $("undo").hidden = false;
  $("restore").focus();
}

$("restore").addEventListener("click", () => {
  const chat = deleted;
  deleted = null;
  $("undo").hidden = true;
  chats.set(chat.id, chat);
  keepConversation(chat, true);
  openChat(chat);
  $("list").querySelector("[aria-current]")?.focus();
});

$("search").addEventListener("input", drawList);

// -- files ------------------------------------------------------------------------------------------------------------

function exportChats(list) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations: list }, null, 1);
  const link = make("a"), address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.href = address;
  link.download = list.length === 1 ? `${titleOf(list[0]).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json` : "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
  $("shelf-says").textContent = `${count(list.length, "conversation")} exported.`;
}

/** Adds the conversations of a file; known ones get what the file has in addition. Returns [added, known]. */
async function importChats(text) {
  let value;
  try { value = JSON.parse(text); } catch { throw new Failure("This file is not JSON."); }
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) throw new Failure("This file has no conversations of this page in it.");
  const read = value.conversations.map(readConversation).filter((chat) => chat.children.length);
  const known = read.filter(({ id }) => chats.has(id)).length;
  for (const chat of read) {
    const here = chats.get(chat.id);
    if (here) showNews(here, absorb(here, chat));
    chats.set(chat.id, here ?? chat);
    await keepConversation(here ?? chat, true);
  }
  drawList();
  return [read.length - known, known];
}

$("export-all").addEventListener("click", () => exportChats([...chats.values()]));
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (!file) return;
  try {
    const [added, known] = await importChats(await file.text());
    const parts = [added || !known ? `${count(added, "conversation")} imported.` : ""];
    if (known) parts.push(`${count(known, "conversation")} ${known === 1 ? "was" : "were"} here already: what the file has more is added.`);
    $("shelf-says").textContent = parts.join(" ").trim();
  } catch (error) {
    $("shelf-says").textContent = error instanceof Failure ? error.message : "This file cannot be read.";
  }
  $("file").value = "";
});

// -- other changes of the list ----------------------------------------------------------------------------------------

async function openShelved() {
  for (const chat of await openShelf()) if (!chats.has(chat.id)) chats.set(chat.id, chat);
  if (!current.children.length) openAddressed();
  drawList();
}

/** Opens the conversation that the address names; a new one if it names none. */
function openAddressed() {
  const chat = chats.get(location.hash.slice(1));
  if (chat && chat !== current) openChat(chat, false);
  else if (!chat && current.children.length) openChat(newConversation(lastSettings()), false);
}

window.addEventListener("popstate", openAddressed);

/** Shows what another tab or a file has changed, without disturbing what is read or typed here. */
function showNews(chat, { messages, settings }) {
  drawList();
  if (chat !== current) return;
  if (settings) showSettings(current.settings);
  if (!messages.length) return;
  for (const row of rows.filter(({ message }) => messages.includes(message))) {
    if (row.text) fill(row);
    else if (!row.foot) row.element.textContent = visible(textOf(row.message));
  }
  draw();
  if (!live) settle();
  follow();
}

otherTabs?.addEventListener("message", async ({ data: id }) => {
  const kept = database && await taken(id).catch(() => null);
  if (kept === null) return; // it cannot be read; undefined stands for a deleted one
  const chat = current.id === id ? current : chats.get(id) ?? kept;
  const isBack = chat === current && !chats.has(id); // it was deleted there and is restored
  if (kept) {
    shelved.add(id);
    chats.set(id, chat);
    showNews(chat, absorb(chat, kept));
    if (isBack) keepConversation(chat); // it may have more messages here
  } else {
    chats.delete(id);
    if (chat === current) warn(GONE);
    drawList();
  }
});

"use strict";

// Folders of conversations. There is a folder as long as a conversation is in it.

const FOLDED = "polarlm.folded"; // the names of the folders whose conversations the list does not show

const folderOf = (chat) => chat.folder ?? "";

function foldedNames() {
  try { return new Set(JSON.parse(kept("localStorage", FOLDED))); } catch { return new Set(); } // another program's value
}

/** Conversations as items of the list: those in no folder, then folders by name, each with its own. */
function inFolders(list, item, open) {
  const folded = open ? new Set() : foldedNames(), names = [...new Set(list.map(folderOf))].filter(Boolean);
  const among = (name) => list.filter((chat) => folderOf(chat) === name);
  names.sort((one, other) => one.localeCompare(other));
  return [...among("").map(item), ...names.map((name) => folderItem(name, among(name), item, !folded.has(name)))];
}

function folderItem(name, list, item, open) {
  const element = make("li", "folder"), inside = make("ul"), opener = button(visible(name), () => {
    const folded = foldedNames();
    if (!folded.delete(name)) folded.add(name);
    keep("localStorage", FOLDED, JSON.stringify([...folded]));
    drawList();
  }, "quiet");
  opener.setAttribute("aria-expanded", String(open));
  opener.dataset.does = `folder ${name}`;
  opener.append(make("span", "tokens", String(list.length)));
  inside.setAttribute("aria-label", visible(name));
  if (open) inside.append(...list.map(item));
  element.append(opener, inside);
  return element;
}

// -- moving conversations ---------------------------------------------------------------------------------------------

let moving = []; // the conversations that are being put into a folder

/** Asks for the folder of conversations. */
function move(list) {
  moving = list;
  $("folders").replaceChildren(...[...new Set([...chats.values()].map(folderOf))].filter(Boolean).map((name) => {
    const option = make("option");
    option.value = name;
    return option;
  }));
  $("folder").value = folderOf(list[0]);
  $("move").hidden = false;
  $("folder").focus();
  $("folder").select();
}

function moved() {
  $("move").hidden = true;
  moving = [];
  drawList();
  ($("list").querySelector("[data-does=move]") ?? $(picked ? "move-picked" : "search")).focus();
}

$("move").addEventListener("submit", (event) => {
  event.preventDefault();
  const list = moving;
  for (const chat of list) {
    Object.assign(chat, { folder: $("folder").value.trim(), filed: later(chat.filed) });
    if (chats.has(chat.id)) keepConversation(chat);
  }
  if (picked) pick(false);
  moved();
});
$("move").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  event.stopPropagation();
  moved();
});

// Folders of conversations. There is a folder as long as a conversation is in it.

const FOLDED = "polarlm.folded"; // the names of the folders whose conversations the list does not show

const folderOf = (chat) => chat.folder ?? "";

const foldedNames = () => keptValue("localStorage", FOLDED, (names) => new Set(names));

/** Items of the list: the conversations without a folder, then the folders by name, each with its conversations. */
function inFolders(list, item, open) {
  const folded = open ? new Set() : foldedNames(), names = [...new Set(list.map(folderOf))].filter(Boolean);
  const among = (name) => list.filter((chat) => folderOf(chat) === name);
  names.sort((one, other) => one.localeCompare(other));
  return [...among("").map(item), ...names.map((name) => folderItem(name, among(name), item, !folded.has(name)))];
}

function folderItem(name, list, item, open) {
  const inside = put(make("ul", "", "", visible(name)), ...(open ? list.map(item) : [])), opener = button(visible(name), () => {
    const folded = foldedNames();
    if (!folded.delete(name)) folded.add(name);
    keep("localStorage", FOLDED, JSON.stringify([...folded]));
    drawList();
  }, "quiet");
  opener.setAttribute("aria-expanded", String(open));
  opener.dataset.does = `folder ${name}`;
  opener.append(make("span", "tokens", String(list.length)));
  return put(make("li", "folder"), opener, inside);
}

// -- moving conversations ---------------------------------------------------------------------------------------------

let moving = []; // the conversations that are being put into a folder

/** Asks for the folder of conversations. */
function move(list) {
  moving = list;
  $("folders").replaceChildren(...[...new Set([...chats.values()].map(folderOf))].filter(Boolean).map((name) => option(name)));
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

onSubmit($("move"), () => {
  const list = moving;
  for (const chat of list) {
    Object.assign(chat, { folder: $("folder").value.trim(), filed: later(chat.filed) });
    if (chats.has(chat.id)) keepConversation(chat);
  }
  if (picked) pick(false);
  moved();
});
onEscape($("move"), moved);

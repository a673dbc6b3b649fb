// Folders of conversations. There is a folder as long as a conversation is in it.

const FOLDED = "polarlm.folded"; // the names of the folders whose conversations the list does not show

const folderOf = (chat) => chat.folder ?? "";

const foldedNames = () => readStoredValue("localStorage", FOLDED, (names) => new Set(names));

/** Items of the list: the conversations without a folder, then the folders by name, each with its conversations. */
function inFolders(list, item, open) {
  const foldedFolders = open ? new Set() : foldedNames(), names = [...new Set(list.map(folderOf))].filter(Boolean);
  const among = (name) => list.filter((chat) => folderOf(chat) === name);
  names.sort((one, other) => one.localeCompare(other));
  return [...among("").map(item), ...names.map((name) => folderItem(name, among(name), item, !foldedFolders.has(name)))];
}

function folderItem(name, list, item, open) {
  const inside = put(make("ul", "", "", visible(name)), ...(open ? list.map(item) : [])), opener = button(visible(name), () => {
    const foldedFolders = foldedNames();
    if (!foldedFolders.delete(name)) foldedFolders.add(name);
    writeStorage("localStorage", FOLDED, JSON.stringify([...foldedFolders]));
    drawList();
  }, "quiet");
  opener.setAttribute("aria-expanded", String(open));
  opener.dataset.does = `folder ${name}`;
  opener.append(make("span", "tokens", String(list.length)));
  return put(make("li", "folder"), opener, inside);
}

// -- moving conversations ---------------------------------------------------------------------------------------------

let chatsToMove = []; // the conversations that are being put into a folder

/** Asks for the folder of conversations. */
function move(list) {
  chatsToMove = list;
  $("folders").replaceChildren(...[...new Set([...chats.values()].map(folderOf))].filter(Boolean).map((name) => option(name)));
  $("folder").value = folderOf(list[0]);
  $("move").hidden = false;
  $("folder").focus();
  $("folder").select();
}

function endMove() {
  $("move").hidden = true;
  chatsToMove = [];
  drawList();
  ($("list").querySelector("[data-does=move]") ?? $(pickedChats ? "move-picked" : "search")).focus();
}

onSubmit($("move"), () => {
  const list = chatsToMove;
  for (const chat of list) {
    Object.assign(chat, { folder: $("folder").value.trim(), filed: timeAfter(chat.filed) });
    if (chats.has(chat.id)) keepConversation(chat);
  }
  if (pickedChats) pick(false);
  endMove();
});
onEscape($("move"), endMove);

// The list of conversations: search, names, deletion.

let deletedChats = []; // the conversations that can be restored
let isRenaming = false; // whether the current conversation is being renamed
let isPressed = false; // whether a pointer is down on the list

/** Whether a conversation has these words in its title, its messages or its files. */
function hasWords(conversation, words) {
  if (!words) return true;
  const texts = Object.values(conversation.messages).flatMap(({ text, results = [], files = [] }) =>
    [text ?? "", ...[...results, ...files].flatMap((each) => [each.name, each.text])]);
  return [titleOf(conversation), ...texts].some((text) => text.toLowerCase().includes(words));
}

const nameTab = () => { document.title = current.children.length ? `${visible(titleOf(current))} – PolarLM` : "PolarLM"; };

function drawList() {
  if (isRenaming || isPressed) return; // a new list would lose what is typed there, or the click that comes
  nameTab();
  const words = $("search").value.trim().toLowerCase();
  const sorted = [...chats.values()].filter((chat) => hasWords(chat, words)).sort((a, b) => b.changed - a.changed);
  const none = sorted.length ? "" : words ? "No conversation has these words in it." : "No conversation is kept yet.";
  setText($("none"), none);
  $("export-all").disabled = $("select").disabled = !chats.size;
  if (pickedChats) drawPicks();
  const list = $("list");
  redraw(list, inFolders(sorted, pickedChats ? pickItem : listItem, pickedChats || words), () => list.querySelector("[aria-current]"));
}

$("list").addEventListener("pointerdown", () => { isPressed = true; });
addEventListener("click", () => { isPressed = false; }, { capture: true }); // what is clicked may draw the list
for (const ended of ["pointerup", "pointercancel"]) {
  addEventListener(ended, () => setTimeout(() => { // after the click, if there is one
    isPressed = false;
    drawList();
  }));
}

function listItem(chat) {
  const name = visible(titleOf(chat));
  const opener = button(name, () => {
    if (chat !== current) openChat(chat);
    if ($("chats").classList.contains("open")) sheet("chats", false);
    $("message").focus();
  }, "chat");
  dir(opener).title = name;
  opener.dataset.does = chat.id;
  const item = put(make("li"), opener);
  if (chat !== current) return item;
  opener.setAttribute("aria-current", "true");
  const does = {
    rename: ["Rename", () => rename(chat, opener)], move: ["Folder", () => move([chat])],
    save: ["Export", () => exportChats([chat])], remove: ["Delete", () => remove([chat])],
  };
  const buttons = Object.entries(does).map(([key, [label, act]]) => {
    const element = button(label, act, "quiet");
    element.dataset.does = key;
    return element;
  });
  return put(item, put(make("div", "row"), ...buttons));
}

/** Replaces a conversation's button with a field for its name. Nothing else moves: it may be clicked next. */
function rename(chat, opener) {
  const field = Object.assign(make("input", "", "", "Name of the conversation"), { value: titleOf(chat), maxLength: 200 });
  const done = (keepIt) => {
    if (!isRenaming) return;
    isRenaming = false;
    if (keepIt) {
      Object.assign(chat, { title: field.value.trim(), named: timeAfter(chat.named) });
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
  isRenaming = true;
  opener.replaceWith(field);
  field.focus();
  field.select();
}

function remove(list) {
  deletedChats = list;
  for (const { id } of list) {
    chats.delete(id);
    removeSent(id);
    forget(id);
  }
  if (list.includes(current)) openChat(newConversation(lastSettings()));
  else drawList();
  $("undone").textContent = `Deleted ${list.length === 1 ? `“${visible(titleOf(list[0]))}”` : count(list.length, "conversation")}.`;
  $("undo").hidden = false;
  $("restore").focus();
}

$("restore").addEventListener("click", () => {
  const chatsToRestore = deletedChats;
  deletedChats = [];
  $("undo").hidden = true;
  for (const chat of chatsToRestore) {
    chats.set(chat.id, chat);
    keepConversation(chat, true);
  }
  if (chatsToRestore.length === 1) openChat(chatsToRestore[0]);
  else drawList();
  ($("list").querySelector("[aria-current]") ?? $("list").querySelector("button, input")).focus();
});

$("search").addEventListener("input", drawList);

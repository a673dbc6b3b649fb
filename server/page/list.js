"use strict";

// The list of conversations: search, names, and what is done with several at once.

let deleted = []; // the conversations that can be restored
let renaming = false; // whether the current conversation is being renamed
let picked = null; // the conversations that are selected; null while none can be
let listed = []; // what the list shows

function found(conversation, words) {
  if (!words) return true;
  const texts = Object.values(conversation.messages).flatMap(({ text, results = [], files = [] }) =>
    [text ?? "", ...[...results, ...files].flatMap((each) => [each.name, each.text])]);
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
  $("export-all").disabled = $("select").disabled = !chats.size;
  if (picked) drawPicks();
  const items = [picked, ...sorted.flatMap((chat) => [chat, titleOf(chat), chat === current])], list = $("list");
  if (items.length === listed.length && items.every((item, place) => item === listed[place])) return; // new items would lose a click
  listed = items;
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.does : null;
  list.replaceChildren(...sorted.map(picked ? pickItem : listItem));
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
  const does = { rename: ["Rename", () => rename(chat, opener)], save: ["Export", () => exportChats([chat])], remove: ["Delete", () => remove([chat])] };
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

function remove(list) {
  deleted = list;
  for (const { id } of list) {
    chats.delete(id);
    removeConversation(id);
  }
  if (list.includes(current)) openChat(newConversation(lastSettings()));
  else drawList();
  $("undone").textContent = `Deleted ${list.length === 1 ? `“${visible(titleOf(list[0]))}”` : count(list.length, "conversation")}.`;
  $("undo").hidden = false;
  $("restore").focus();
}

$("restore").addEventListener("click", () => {
  const restored = deleted;
  deleted = [];
  $("undo").hidden = true;
  for (const chat of restored) {
    chats.set(chat.id, chat);
    keepConversation(chat, true);
  }
  if (restored.length === 1) openChat(restored[0]);
  else drawList();
  ($("list").querySelector("[aria-current]") ?? $("list").querySelector("button, input")).focus();
});

// -- several at once --------------------------------------------------------------------------------------------------

/** Shows boxes in place of the conversations' buttons, or the buttons again. */
function pick(yes) {
  picked = yes ? new Set() : null;
  $("files").hidden = yes;
  $("picks").hidden = !yes;
  drawList();
  $(yes ? "pick-all" : "select").focus();
}

function pickItem(chat) {
  const item = make("li"), label = make("label", "chat"), box = make("input");
  box.type = "checkbox";
  box.checked = picked.has(chat);
  box.addEventListener("change", () => {
    if (box.checked) picked.add(chat);
    else picked.delete(chat);
    drawPicks();
  });
  label.append(box, dir(make("span", "", visible(titleOf(chat)))));
  item.append(label);
  return item;
}

function drawPicks() {
  for (const chat of picked) if (!chats.has(chat.id)) picked.delete(chat); // another tab has deleted it
  $("export-picked").disabled = $("remove-picked").disabled = !picked.size;
  $("remove-picked").textContent = picked.size ? `Delete ${number(picked.size)}` : "Delete";
}

$("select").addEventListener("click", () => pick(true));
$("pick-done").addEventListener("click", () => pick(false));
$("pick-all").addEventListener("click", () => {
  const boxes = [...$("list").querySelectorAll("input")], all = boxes.every(({ checked }) => checked);
  for (const box of boxes) if (box.checked === all) box.click();
});
$("export-picked").addEventListener("click", () => exportChats([...picked]));
$("remove-picked").addEventListener("click", () => {
  const list = [...picked];
  pick(false);
  remove(list);
});
$("picks").addEventListener("keydown", leavePicks);
$("list").addEventListener("keydown", leavePicks);

function leavePicks(event) {
  if (event.key !== "Escape" || !picked) return;
  event.stopPropagation();
  pick(false);
}

$("search").addEventListener("input", drawList);

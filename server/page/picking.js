// What is done with several conversations at once.

let pickedChats = null; // the conversations that are selected; null while none can be

/** Shows boxes in place of the conversations' buttons, or the buttons again. */
function pick(yes) {
  pickedChats = yes ? new Set() : null;
  $("files").hidden = yes;
  $("picks").hidden = !yes;
  drawList();
  $(yes ? "pick-all" : "select").focus();
}

function pickItem(chat) {
  const box = Object.assign(make("input"), { type: "checkbox", checked: pickedChats.has(chat) });
  box.addEventListener("change", () => {
    if (box.checked) pickedChats.add(chat);
    else pickedChats.delete(chat);
    drawPicks();
  });
  return put(make("li"), put(make("label", "chat"), box, dir(make("span", "", visible(titleOf(chat))))));
}

function drawPicks() {
  for (const chat of pickedChats) if (!chats.has(chat.id)) pickedChats.delete(chat); // another tab has deleted it
  for (const name of ["export", "remove", "move"]) $(`${name}-picked`).disabled = !pickedChats.size;
  $("remove-picked").textContent = pickedChats.size ? `Delete ${number(pickedChats.size)}` : "Delete";
}

$("select").addEventListener("click", () => pick(true));
$("pick-done").addEventListener("click", () => pick(false));
$("pick-all").addEventListener("click", () => {
  const boxes = [...$("list").querySelectorAll("input")], all = boxes.every(({ checked }) => checked);
  for (const box of boxes) if (box.checked === all) box.click();
});
$("move-picked").addEventListener("click", () => move([...pickedChats]));
$("export-picked").addEventListener("click", () => exportChats([...pickedChats]));
$("remove-picked").addEventListener("click", () => {
  const list = [...pickedChats];
  pick(false);
  remove(list);
});
for (const part of ["picks", "list"]) onEscape($(part), () => pick(false), () => pickedChats);

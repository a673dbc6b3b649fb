// The conversations of this browser, and switching between them.

const chats = new Map(); // id → conversation; one without messages is not in it

/** Shows how much of the context the current conversation takes, by its last answer. */
function settle() {
  const path = pathOf(current), last = path.findLast((message) => message.usage && (message.role !== "summary" || inUse(message)));
  if (last?.role === "summary") contextUse = { tokens: last.compacted ?? last.usage.completion, cached: 0, exact: last.compacted !== null && last === path.at(-1) };
  else contextUse = last
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
  isRenaming = false;
  for (const row of rows.splice(0)) drop(row);
  showSettings(current.settings);
  draw();
  settle();
  drawList();
  tell("");
  speed(0, 0);
  if (fresh) history.pushState(null, "", current.children.length ? `#${current.id}` : location.pathname + location.search);
  followsEnd = true;
  follow();
  look();
}

function newChat() {
  openChat(newConversation(lastSettings()), current.children.length > 0);
  if (!isShut("chats") && $("chats").classList.contains("open")) sheet("chats", false);
  $("message").focus();
}

/** Continues after a message in a new conversation. */
function branch(message) {
  openChat(branchOf(current, message));
  changed();
  announce("This is the new conversation.");
  const rest = message.role === "user" ? buttonOf(rows.at(-1), "Answer") : $("message");
  rest.focus();
}

async function openShelved() {
  for (const chat of await openShelf()) {
    if (!chats.has(chat.id)) chats.set(chat.id, chat);
    unsentIds.add(chat.id);
  }
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

/** Merges a conversation as another tab, a file or the server has it into the page's own, and returns that. */
function adopt(theirs) {
  const here = current.id === theirs.id ? current : chats.get(theirs.id) ?? theirs;
  chats.set(here.id, here);
  if (here === theirs) drawList();
  else showNews(here, absorb(here, theirs));
  return here;
}

/** Takes a conversation that was deleted elsewhere from the list. The page that shows it goes on to show it. */
function lose(id) {
  chats.delete(id);
  if (current.id === id) warn(GONE);
  drawList();
}

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
  const theirs = database && await shelvedChat(id).catch(() => null);
  if (theirs === null) return; // it cannot be read; undefined stands for a deleted one
  if (!theirs) return lose(id);
  const isBack = current.id === id && !chats.has(id); // it was deleted there and is restored
  shelvedIds.add(id);
  const chat = adopt(theirs);
  if (isBack) keepConversation(chat); // it may have more messages here
});

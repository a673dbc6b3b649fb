// Merges the trees of a conversation that several tabs write in.

/** The time of a change now, always later than the last change, even if the clock was set back. */
const timeAfter = (than = 0) => Math.max(Date.now(), than + 1);

const storedTimes = new WeakMap(); // answer written in this tab → `changed` of its kept version

/**
 * Merges `theirs`, a conversation as another tab or a file has it, into `mine`: messages and their versions by id, and
 * whatever was changed later there: a message, the name, the folder, the settings. What is shown here stays shown.
 * Returns { messages, settings }: the messages that were added or changed here, and whether the settings were.
 */
function absorb(mine, theirs) {
  const messages = [], settings = theirs.chosen > (mine.chosen ?? 0);
  if (settings) Object.assign(mine, { settings: theirs.settings, chosen: theirs.chosen });
  if (theirs.named > (mine.named ?? 0)) Object.assign(mine, { title: theirs.title, named: theirs.named });
  if (theirs.filed > (mine.filed ?? 0)) Object.assign(mine, { folder: theirs.folder, filed: theirs.filed });
  mine.changed = Math.max(mine.changed, theirs.changed);
  for (const message of Object.values(theirs.messages)) {
    const own = mine.messages[message.id];
    if (!own) mine.messages[message.id] = { ...message, children: [] };
    else if (isDisputed(own, message)) fork(mine, own, message);
    else if (message.changed > (own.changed ?? 0)) {
      const { parent, children, shown } = own;
      Object.assign(own, message, { parent, children, shown });
      storedTimes.delete(own);
    } else continue;
    messages.push(mine.messages[message.id]);
  }
  unite(mine, mine, theirs);
  for (const message of Object.values(theirs.messages)) unite(mine, mine.messages[message.id], message);
  return { messages, settings };
}

/**
 * Merges the children of a message. If `theirs` has children that `mine` lacks, the children of `theirs` come first, in
 * their order, then the children that only `mine` has; otherwise all stay where they are, as do their numbers on the page.
 * The same child stays shown.
 */
function unite(conversation, mine, theirs) {
  const id = mine === conversation ? null : mine.id, shownChild = mine.children[mine.shown] ?? theirs.children[theirs.shown];
  const knownChildren = theirs.children.filter((child) => conversation.messages[child]?.parent === id); // a file may have loops
  if (knownChildren.every((child) => mine.children.includes(child))) return;
  mine.children = [...knownChildren, ...mine.children.filter((child) => !knownChildren.includes(child))];
  mine.shown = Math.max(0, mine.children.indexOf(shownChild));
}

/** Whether an answer was written both here and in another tab since it was kept. */
function isDisputed(own, theirs) {
  const storedTime = storedTimes.get(own);
  return theirs.changed > storedTime && (own === live?.message || own.changed > storedTime);
}

/** Makes a separate version of what was written here. */
function fork(conversation, own, theirs) {
  const { id, children, shown } = own;
  conversation.messages[id] = { ...theirs, children, shown };
  Object.assign(own, { id: newId(), children: [], shown: 0 });
  conversation.messages[own.id] = own;
  const holder = holderOf(conversation, own);
  holder.shown = holder.children.push(own.id) - 1;
}

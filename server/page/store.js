// Conversations: trees of messages, kept in this browser, and at the server if it keeps them.

/*
 * A conversation: { id, title, named, folder, filed, changed, settings, chosen, children, shown, messages: { ID: message } }
 * A message: { id, parent, changed, children, shown, role, … }: `children` are the ids of the messages that may follow it,
 * and `shown` is the index of the one that does. The parent of a first message is null. `named`, `filed`, `chosen`
 * and a message's `changed` are times: when the title was given, the folder chosen, the settings chosen, an answer last
 * written; without one, at the beginning.
 * By its role, a message also has
 *   "user": text, files: [{ name, text, tokens, image }]: an image, as a data URL, has no text;
 *      leftOut: a sentence about files that could not go with it,
 *   "assistant": text, reasoning, calls: [{ id, name, arguments, server, tool, begun, result }]: the last four for a call of
 *      an MCP server's tool, begun and result ({ text, failed }) until all calls have results; after its end also ending, error, usage, drafts, rate, thought,
 *      varied, what its request had in place of the settings (temperature, seed),
 *      and model, its name, where the server has several;
 *   "summary": the same as an answer, and off, whether it is not in use; left, the messages that did not fit into its
 *      request; compacted, the tokens of the prompt that it begins;
 *   "tool": results: [{ id, name, text, failed }], one for each call of the previous message.
 */

const DATABASE = "polarlm", SHELF = "conversations", FORMAT = "polarlm-conversations";

const ID = /^[0-9a-f]{16}$/;
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

const newConversation = (settings) => ({ id: newId(), title: "", changed: Date.now(), settings, children: [], shown: 0, messages: {} });

/** The message, or the conversation, whose child a message is. */
const holderOf = (conversation, message) => (message.parent === null ? conversation : conversation.messages[message.parent]);

/** The messages that are shown, first to last. */
function pathOf(conversation) {
  const path = [];
  for (let at = conversation; at.children.length; ) {
    at = conversation.messages[at.children[at.shown]];
    path.push(at);
  }
  return path;
}

/** Adds a message after `parent`, or as a first one if that is null, and shows it. */
function addMessage(conversation, parent, message) {
  const newMessage = { id: newId(), parent: parent?.id ?? null, children: [], shown: 0, ...message };
  conversation.messages[newMessage.id] = newMessage;
  const holder = holderOf(conversation, newMessage);
  holder.shown = holder.children.push(newMessage.id) - 1;
  return newMessage;
}

/** A new conversation with the messages that are shown up to and including one, which has no messages in common with it. */
function branchOf(conversation, last) {
  const title = `${titleOf(conversation).replace(/ \(branch\)$/, "")} (branch)`;
  const branch = { ...newConversation(conversation.settings), title, named: Date.now(), folder: conversation.folder }, path = pathOf(conversation);
  let parent = null;
  for (const message of path.slice(0, path.indexOf(last) + 1)) {
    const { id, parent: _, children, shown, ...rest } = message;
    parent = addMessage(branch, parent, structuredClone(rest));
  }
  return branch;
}

const titleOf = (conversation) =>
  conversation.title || nameOfMessage(pathOf(conversation).find(({ role }) => role === "user")) || "New chat";
const nameOfMessage = (message) => (message?.text.trim() || message?.files?.[0]?.name || "").slice(0, 80);

// -- untrusted values -------------------------------------------------------------------------------------------------

const figure = (number) => (Number.isFinite(number) ? number : null);
const figures = (object) => Object.fromEntries(Object.entries(object ?? {}).filter(([, number]) => figure(number) !== null));
const listOf = (items, read) => (Array.isArray(items) ? items.filter((item) => item && typeof item === "object").map(read) : []);

/** By the role of a message: what else it has, read from an untrusted object. */
const READERS = {
  user: ({ text, files, leftOut }) => ({ text: string(text), ...(string(leftOut) && { leftOut }), ...(Array.isArray(files) && { files: listOf(files, readAttached) }) }),
  assistant: readAnswer,
  summary: (message) => {
    const { off, left, compacted } = message;
    return { ...readAnswer(message), off: off === true, left: figure(left) ?? 0, compacted: figure(compacted) };
  },
  tool: ({ results }) => ({ results: listOf(results, readResult) }),
};

const readAttached = ({ name, text, tokens, image }) =>
  ({ name: string(name), text: string(text), tokens: figure(tokens) ?? 0, ...(string(image).startsWith("data:image/") && { image }) });

const readResult = ({ id, name, text, failed }) =>
  ({ id: string(id), name: string(name), text: string(text), ...(failed === true && { failed }) });

function readAnswer({ text, reasoning, ending, error, calls, usage, drafts, rate, thought, model, varied }) {
  const has = (counts, ...names) => counts && names.every((name) => figure(counts[name]) !== null);
  return {
    text: string(text), reasoning: string(reasoning), ending: string(ending), error: string(error), calls: listOf(calls, readCall),
    usage: has(usage, "prompt", "completion")
      ? { prompt: usage.prompt, completion: usage.completion, cached: figure(usage.cached), places: figures(usage.places), reread: string(usage.reread) } : null,
    drafts: has(drafts, "all", "accepted") ? { all: drafts.all, accepted: drafts.accepted } : null,
    rate: figure(rate), thought: figure(thought), model: string(model), varied: figures({ temperature: varied?.temperature, seed: varied?.seed }),
  };
}

function readCall({ id, name, arguments: json, server, tool, begun, result }) {
  const call = { id: string(id), name: string(name), arguments: string(json) };
  if (string(server)) Object.assign(call, { server, tool: string(tool), ...(begun === true && { begun }) });
  if (typeof result?.text === "string") call.result = { text: result.text, failed: result.failed === true };
  return call;
}

/** The conversation in an untrusted JSON value. Throws a Failure. */
function readConversation(value) {
  if (!value?.messages || typeof value.messages !== "object" || !Array.isArray(value.children)) {
    throw new Failure("This file has no conversations of this page in it.");
  }
  const conversation = newConversation(readSettings(value.settings));
  if (ID.test(value.id)) conversation.id = value.id;
  Object.assign(conversation, { title: string(value.title).slice(0, 200), named: figure(value.named), chosen: figure(value.chosen) });
  Object.assign(conversation, { folder: string(value.folder).trim().slice(0, 80), filed: figure(value.filed) });
  conversation.changed = figure(value.changed) ?? conversation.changed;
  const queue = [[value, null]], readIds = new Set();
  while (queue.length) { // not recursive, since a conversation may be deeper than the stack
    const [from, to] = queue.pop();
    for (const id of Array.isArray(from.children) ? from.children : []) {
      const source = Object.hasOwn(value.messages, id) ? value.messages[id] : null;
      if (readIds.has(id) || !Object.keys(READERS).includes(source?.role)) continue;
      readIds.add(id);
      const message = { role: source.role, id: ID.test(id) ? id : newId(), changed: figure(source.changed), ...READERS[source.role](source) };
      queue.push([source, addMessage(conversation, to, message)]);
    }
    const holder = to ?? conversation, shownIndex = Number.isInteger(from.shown) ? from.shown : 0;
    holder.shown = Math.min(Math.max(0, shownIndex), Math.max(0, holder.children.length - 1));
  }
  return conversation;
}

// -- the browser's database -------------------------------------------------------------------------------------------

const NOT_KEPT = "This browser keeps nothing here (a private window, or storage is forbidden): conversations last until this tab is closed. Export saves them to a file.";
const GONE = "This conversation was deleted in another tab or browser. It is shown here until you leave it; a message brings it back.";
const NO_ROOM = "The browser’s storage is full: what changed last is not kept. Delete conversations, or export them to a file.";

let database = null; // null if the browser keeps nothing
let otherTabs = null; // the channel that gets the id of each conversation that has changed
try { otherTabs = new BroadcastChannel(DATABASE); } catch { /* some browsers forbid it along with storage */ }

const shelvedIds = new Set(); // ids of conversations that were kept: one that the database lacks was deleted

const resultOf = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Opens the database and returns its conversations. */
async function openShelf() {
  try {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(SHELF, { keyPath: "id" });
    database = await resultOf(request);
    database.onversionchange = () => database.close();
    const conversations = await resultOf(database.transaction(SHELF).objectStore(SHELF).getAll());
    for (const { id } of conversations) shelvedIds.add(id);
    return conversations;
  } catch {
    warn(NOT_KEPT);
    return [];
  }
}

const shelvedChat = (id) => resultOf(database.transaction(SHELF).objectStore(SHELF).get(id));

/** Applies `change` to the database in one transaction, and tells other tabs. */
async function shelve(id, change) {
  if (!database) return;
  try {
    const transaction = database.transaction(SHELF, "readwrite");
    await Promise.all([change(transaction.objectStore(SHELF)), new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    })]);
    otherTabs?.postMessage(id);
  } catch (error) {
    warn(error?.name === "QuotaExceededError" ? NO_ROOM : NOT_KEPT);
  }
}

/**
 * Keeps a conversation, merged with what other tabs have kept of it.
 *
 * A conversation that another tab has deleted stays deleted, however its answers, settings and versions change here. It
 * stays on the page that shows it, with all that is typed there, and only a deliberate act restores it (`again`): a
 * message, Undo, an import.
 */
async function keepConversation(conversation, again = false) {
  await store(conversation, again);
  if (chats.get(conversation.id) === conversation) sendChat(conversation);
}

const store = (conversation, again) => shelve(conversation.id, async (shelf) => {
  const { id } = conversation, stored = await resultOf(shelf.get(id));
  if (!stored && shelvedIds.has(id) && !again) return;
  const news = stored && absorb(conversation, stored);
  shelf.put(conversation);
  shelvedIds.add(id);
  for (const message of Object.values(conversation.messages)) if (storedTimes.has(message)) storedTimes.set(message, message.changed);
  warn("");
  if (news) showNews(conversation, news);
});

const forget = (id) => shelve(id, (shelf) => shelf.delete(id));

/** Shows a sentence about conversations that are not kept; hides it if the sentence is empty. */
const warn = (sentence) => setText($("unkept"), sentence);

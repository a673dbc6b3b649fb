// Conversations at the server, if it keeps them: what changes here is sent, and what has changed there is merged.
// The server's revisions grow with every change; it takes no change from a page that has not seen the last one.

const BATCH = 400_000; // characters of messages in a request
const TRIES = 5; // attempts to send a change when other changes come before it

let serverKeeps = null; // whether the server keeps conversations; null until it has told
let seenRevision = 0; // the revision up to which the page has the server's changes
let passingTrouble = ""; // the sentence about a trouble that ends when the next request succeeds
let lastSync = Promise.resolve(); // the last request: each request waits for the one before it

const mirrors = new Map(); // id → { head, messages }: a conversation as the server has it
const writtenRevisions = new Map(); // id → the revision of the page's own last change
const unsentIds = new Set(); // ids of conversations that have changed here

/** What differs between two states of a message, or of a conversation's head. Which version is shown is not sent. */
const printOf = (message) =>
  message && [message.changed, message.text?.length, message.children.length, message.ending, message.off].map((part) => part || "").join();
const headPrint = (head) => head && [head.title, head.named, head.folder, head.filed, head.chosen, head.changed, head.children.length].map((part) => part || "").join();

/** Sends a conversation soon, if the server keeps conversations. */
function sendChat(chat) {
  unsentIds.add(chat.id);
  if (serverKeeps) sync();
}

/** Has the server delete a conversation. */
function removeSent(id) {
  unsentIds.delete(id);
  mirrors.delete(id);
  if (!serverKeeps) return;
  inTurn(async () => {
    const { revision } = await (await ask(`conversations/${id}`, { method: "DELETE" })).json();
    writtenRevisions.set(id, revision);
  });
}

/** Runs a task after all earlier tasks. */
function inTurn(task) {
  lastSync = lastSync.then(task).catch((error) => {
    if (!serverKeeps || error.status === 401) return;
    const sentence = `Changes are not saved on the server: ${error.message}`;
    warn(sentence);
    if (error.status !== 413) passingTrouble = sentence;
  });
  return lastSync;
}

/** Gets what is new at the server, and sends what is new here. */
function sync() {
  return inTurn(async () => {
    await pull();
    if (!serverKeeps) return;
    if (passingTrouble && $("unkept").textContent === passingTrouble) warn("");
    for (const id of [...unsentIds]) {
      const chat = chats.get(id);
      if (chat && live?.conversation === chat) continue; // it is sent when the answer is complete
      unsentIds.delete(id);
      try {
        if (chat) await push(chat);
      } catch (error) {
        if (error.status !== 413) unsentIds.add(id); // what is too large once is too large always
        throw error;
      }
    }
  });
}

async function pull() {
  for (let more = true; more;) {
    const reply = await askJson(`conversations?since=${seenRevision}`);
    serverKeeps = reply.kept === true;
    if (!serverKeeps) return;
    $("where").textContent = "Conversations are kept at this server, and in this browser.";
    for (const [id, change] of Object.entries(reply.conversations)) if (ID.test(id)) await receive(id, change);
    seenRevision = reply.revision;
    more = reply.more;
  }
}

/** Merges what has changed of a conversation at the server. */
async function receive(id, { head, messages }) {
  if (head === null) {
    mirrors.delete(id);
    unsentIds.delete(id);
    if (!chats.has(id)) return;
    await forget(id);
    return lose(id);
  }
  const mirror = mirrors.get(id) ?? { head: null, messages: {} };
  mirrors.set(id, mirror);
  mirror.head = head ?? mirror.head;
  Object.assign(mirror.messages, messages);
  if (!mirror.head) return; // it comes with the next part of the answer
  const theirs = readConversation({ ...mirror.head, id, messages: mirror.messages });
  if (!theirs.children.length) return;
  const here = adopt(theirs);
  await store(here, true);
  if (differs(here).length || headPrint(here) !== headPrint(mirror.head)) unsentIds.add(id);
}

const differs = (chat) => Object.values(chat.messages).filter((message) => printOf(message) !== printOf(mirrors.get(chat.id)?.messages[message.id]));

/** Sends what is new of a conversation. */
async function push(chat) {
  for (let round = 0; ; round += 1) {
    try {
      return await pushOnce(chat);
    } catch (error) {
      if (error.status !== 409 || round === TRIES) throw error;
      await pull();
      if (!chats.has(chat.id)) return; // it was deleted elsewhere
    }
  }
}

async function pushOnce(chat) {
  const mirror = mirrors.get(chat.id) ?? { head: null, messages: {} }, { messages: _, ...rest } = chat, head = structuredClone(rest);
  const waiting = differs(chat).map((message) => structuredClone(message));
  while (waiting.length || headPrint(mirror.head) !== headPrint(head)) {
    const batch = {};
    for (let size = 0; waiting.length && size < BATCH;) {
      const message = waiting.shift();
      batch[message.id] = message;
      size += JSON.stringify(message).length;
    }
    const base = Math.max(seenRevision, writtenRevisions.get(chat.id) ?? 0);
    const { revision } = await askJson(`conversations/${chat.id}`, { base, head, messages: batch });
    writtenRevisions.set(chat.id, revision);
    mirror.head = head;
    Object.assign(mirror.messages, batch);
    mirrors.set(chat.id, mirror);
  }
}

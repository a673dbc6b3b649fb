// Compaction: in prompts, a summary takes the place of the messages above it. They stay in the conversation.

const NEARLY_FULL = 0.75; // the part of the context that a prompt may take before the conversation is compacted by itself
const SHORT = 3; // characters of a token, before they are counted: most texts have more
const ROUNDS = 5; // rounds of counting and shortening the text that is summarized
const INSTRUCTION = "Summarize our conversation so that it can go on from your summary alone: facts, decisions, open questions, code in use.";

const newSummary = () => ({ role: "summary", ...READERS.summary({}) });

/** Whether prompts have the summary in place of the messages above it. */
const inUse = ({ role, text, off, ending, error }) => role === "summary" && text !== "" && !off && !error && !["", "stopped"].includes(ending);

/** The most tokens that a summary may have. */
const summaryTokens = () => Math.min(1024, Math.floor(stats.context / 4));

/** Whether the end of the current conversation can be compacted now. */
function canCompact() {
  const last = rows.at(-1)?.message;
  return Boolean(stats && !stats.state && !live && last?.role === "assistant" && last.text && !last.calls.length);
}

/** Whether a message of this text, and `more` tokens of files, would leave little of the context. */
const isNearlyFull = (text, more) =>
  $("auto_compact").checked && canCompact() && contextUse.tokens + more + text.length / SHORT > NEARLY_FULL * stats.context;

/** The request for a summary: the conversation up to it, whose prompt is in the cache, and the instruction. */
async function summaryRequest(message, signal) {
  const { tools, tool_choice: _, response_format: __, ...settings } = requestSettings();
  if (tools) Object.assign(settings, { tools, tool_choice: "none" }); // they are in the prompt that is in the cache
  const sentMessages = messagesUpTo(parentOf(message)), all = sentMessages.length;
  for (let round = 0; ; round += 1) {
    const request = { ...settings, messages: [...sentMessages, { role: "user", content: INSTRUCTION }], max_tokens: summaryTokens() };
    const tokens = await tokensOf(request, signal), over = tokens + summaryTokens() - stats.context;
    message.left = all - sentMessages.length;
    if (over <= 0 || round === ROUNDS) return request; // the server refuses a request that is still too long
    shorten(sentMessages, over / tokens);
  }
}

/** Takes all images away, or else about this part of the text: first messages other than the system's, and the beginning of the longest of the last two. */
function shorten(messages, part) {
  const withImages = messages.filter(({ content }) => Array.isArray(content));
  for (const message of withImages) message.content = message.content.at(-1).text ?? "…";
  if (withImages.length) return;
  const size = ({ content }) => content?.length ?? 0, first = messages[0].role === "system" ? 1 : 0;
  let over = 1.1 * part * messages.reduce((sum, message) => sum + size(message), 0);
  while (messages.length > first + 2 && (over > 0 || messages[first].role !== "user")) over -= size(messages.splice(first, 1)[0]);
  const longest = messages.slice(first).reduce((most, message) => (size(message) > size(most) ? message : most));
  if (over > 0) longest.content = `…${longest.content.slice(Math.ceil(over))}`;
}

/** Adds a summary at the end of the conversation. Returns whether it is in use. */
async function compact() {
  const summary = addMessage(current, rows.at(-1).message, newSummary());
  followsEnd = true;
  await answer(summary);
  return inUse(summary);
}

let prefillAbort = null; // ends the request that computes the compacted prompt

/** Has the server compute the compacted prompt while its summary is read; the next message finds it in the cache. */
async function prefill(summary) {
  prefillAbort = new AbortController();
  const body = { ...requestSettings(), messages: [...messagesUpTo(summary), { role: "user", content: "…" }], max_tokens: 1 };
  try {
    summary.compacted = (await askJson("v1/chat/completions", body, prefillAbort.signal)).usage.prompt_tokens;
  } catch {
    return; // the next message computes it
  }
  if (rowOf(summary) && !live) settle();
}

/** Sets whether prompts have the summary in place of what is above it. */
function useSummary(message, yes) {
  Object.assign(message, { off: !yes, changed: timeAfter(message.changed) });
  const row = rowOf(message);
  nameSummary(row);
  drawFoot(row);
  settle();
  changed();
  if (yes && message === rows.at(-1).message) prefill(message);
  buttonOf(row, yes ? "Undo" : "Use again").focus();
}

$("compact").addEventListener("click", async () => {
  if (!canCompact() || !settingsHold()) return;
  $("message").focus();
  const conversation = current;
  if (await compact() && current === conversation) prefill(rows.at(-1).message);
});

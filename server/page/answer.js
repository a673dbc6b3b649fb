// Answers: the request that is sent, and the stream that is received.

const LOOP = { pieces: 300, rounds: 3, every: 64 }; // an answer ending in so many repeated pieces stops; pieces between checks
const KEEP_MS = 2000; // between two times that an unfinished answer is kept
const SPOKEN = 600; // characters of a complete answer that a screen reader gets
const ENDINGS = {
  length: "as long as the server and the context allow",
  stopped: "stopped",
  loop: "stopped, because it repeated itself over and over (Settings can let it continue)",
  edited: "edited",
};

let live = null; // the answer that is being generated: { conversation, message, row, stop }

/** Adds a message of the user's after `parent`, by default the last one, and has it answered. */
function say(message, parent = rows.at(-1)?.message ?? null) {
  if (message.role === "user") unaskedCalls = 0;
  const previous = parent === current || parent === null ? null : parent;
  const said = addMessage(current, previous, message);
  chats.set(current.id, current);
  followsEnd = true;
  return answer(newAnswer(said));
}

const VARIED = 0.6; // the temperature of another version where it is zero

/** What a request for another version of a message has in place of the settings: greedy decoding would say the same again, and so would the same seed. */
function variation(message) {
  const { temperature, seed } = Object.fromEntries(["temperature", "seed"].map((name) => [name, $(name).value || $(name).placeholder]));
  return {
    ...(temperature !== "" && Number(temperature) === 0 && { temperature: VARIED }),
    ...(Number.isFinite(Number(seed)) && { seed: Number(seed) + holderOf(current, message).children.length }),
  };
}

const newAnswer = (parent) => addMessage(current, parent, { role: "assistant", ...readAnswer({}) });

/** Generates another version of an answer, which stays; one that failed is requested again as it was. */
function regenerate(message) {
  const { text, calls } = message;
  const other = () => {
    const varied = message.error ? {} : variation(message);
    return Object.assign(message.role === "summary" ? addMessage(current, parentOf(message), newSummary()) : newAnswer(parentOf(message)), { varied });
  };
  resume(message, text || calls.length ? other : undefined);
}

const canContinue = ({ text, calls, ending, error }) =>
  text !== "" && !calls.length && !$("schema").value.trim() && (error !== "" || ["length", "stopped", "loop", "edited", ""].includes(ending));

/** Lets the model continue an answer; `begin` returns another one, which it begins. */
function resume(message, begin = () => message) {
  if (live || !settingsHold()) return;
  followsEnd = true;
  answer(begin());
  $("message").focus();
}

/** What is sent of the messages up to and including one. The server continues an answer that has text. */
function messagesUpTo(message) {
  const messages = [];
  let summary = null;
  for (let at = message; at; at = parentOf(at)) {
    if (inUse(at)) {
      summary = at;
      break;
    }
    messages.unshift(at);
  }
  const sentMessages = [], system = [$("system").value.trim(), summary && `Summary of the conversation so far:\n\n${summary.text}`].filter(Boolean);
  if (system.length) sentMessages.push({ role: "system", content: system.join("\n\n") });
  messages.forEach((each, place) => {
    if (each.role === "user") sentMessages.push({ role: "user", content: contentOf(each) });
    if (each.role === "tool") for (const { id, text } of each.results) sentMessages.push({ role: "tool", tool_call_id: id, content: text });
    if (each.role !== "assistant") return;
    if (each.text || each.calls.length) sentMessages.push(sentAnswer(each));
    else if (each !== message && sentMessages.at(-1)?.role === "user") sentMessages.pop(); // most models expect no two questions in a row
    const isLeft = each !== message && messages[place + 1]?.role !== "tool"; // by the user, who wrote something else
    if (isLeft) for (const { id } of each.calls) sentMessages.push({ role: "tool", tool_call_id: id, content: NOT_RUN });
  });
  return sentMessages;
}

function sentAnswer({ text, reasoning, calls }) {
  const sentMessage = { role: "assistant", content: calls.length && !text ? null : text };
  if (reasoning) sentMessage.reasoning_content = reasoning;
  if (calls.length) sentMessage.tool_calls = calls.map(({ id, name, arguments: json }) => ({ id, type: "function", function: { name, arguments: json } }));
  return sentMessage;
}

async function answer(message) {
  const conversation = current;
  const mine = live = { conversation, message, row: null, stop: new AbortController() };
  const pace = { pieces: 0, first: 0, last: 0, thought: 0, thoughtOut: false }, begins = [];
  let flow = "", usage = null, drawing = 0, trouble = null, keptAt = performance.now();
  prefillAbort?.abort();
  storedTimes.set(message, message.changed ?? 0);
  settle();
  let before = contextUse.tokens;
  Object.assign(message, { ending: "", error: "", usage: null, rate: null, drafts: null, model: "", changed: timeAfter(message.changed) });
  if (!message.text) Object.assign(message, { reasoning: "", thought: null, calls: [] });
  draw();
  mine.row = rowOf(message);
  fill(mine.row, true);
  begin(mine);
  try {
    await mcpReady(mine.stop.signal);
    const request = message.role === "summary" ? await summaryRequest(message, mine.stop.signal) : { messages: messagesUpTo(message), ...requestSettings() };
    const body = { ...request, ...message.varied, stream: true, stream_options: { include_usage: true }, return_progress: true };
    const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: mine.stop.signal });
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      if (modelNames.length && event.model) message.model = event.model;
      if (event.prompt_progress && live === mine) before = showProgress(event.prompt_progress);
      const choice = event.choices?.[0];
      message.ending = choice?.finish_reason ?? message.ending;
      const piece = choice && take(message, choice.delta ?? {}, pace);
      if (!piece) continue;
      if (!flow && live === mine) look(); // now that it is computed
      begins.push(flow.length);
      flow += piece;
      drawing ||= requestAnimationFrame(() => {
        drawing = 0;
        if (live === mine) show(mine, pace, before);
      });
      if (performance.now() - keptAt > KEEP_MS) {
        keptAt = performance.now();
        keepLive(conversation, message);
      }
      if (begins.length < LOOP.pieces || begins.length % LOOP.every || !$("loop_check").checked) continue;
      if (loops(flow, flow.length - begins.at(-LOOP.pieces))) {
        message.ending = "loop";
        mine.stop.abort();
        break;
      }
    }
  } catch (error) {
    trouble = error;
  }
  cancelAnimationFrame(drawing);
  finish(mine, pace, usage, trouble, before);
}

/** Keeps an answer and its conversation, unless that was deleted while the answer was generated. */
function keepLive(conversation, message) {
  message.changed = timeAfter(message.changed);
  if (chats.get(conversation.id) === conversation) keepConversation(conversation);
}

/** Adds a piece to an answer and returns its text. */
function take(message, { reasoning_content: reasoning, content, tool_calls: calls }, pace) {
  const now = performance.now();
  let text = "";
  if (reasoning) {
    message.reasoning += reasoning;
    pace.thought ||= now;
    text += reasoning;
  }
  if (pace.thought && !pace.thoughtOut) message.thought = (now - pace.thought) / 1000;
  pace.thoughtOut ||= Boolean(content || calls);
  if (content) {
    message.text += content;
    text += content;
  }
  for (const { index, id, function: { name, arguments: more } = {} } of calls ?? []) {
    const call = message.calls[index] ??= { id: "", name: "", arguments: "" };
    if (id) call.id = id;
    if (name) call.name = name;
    call.arguments += more ?? "";
    text += `${name ?? ""}${more ?? ""}`;
  }
  if (text) {
    pace.first ||= now;
    pace.last = now;
    pace.pieces += 1;
  }
  return text;
}

function begin({ row }) {
  row.body.setAttribute("aria-busy", "true");
  contextUse = { ...contextUse, exact: false };
  busy(true);
  tell("Reading the prompt …");
  speed(0, 0);
  changed();
  follow();
  look();
}

/** Shows how much of the prompt has been computed, and returns the number of its tokens. */
function showProgress({ total, cache, processed }) {
  contextUse = { tokens: processed, cached: cache, exact: processed === total };
  if (processed < total) tell("Reading the prompt …", `${number(processed)} of ${number(total)} tokens`);
  else tell("Answering …");
  meter();
  return total;
}

/** Shows what has been received so far. Most pieces of text are one token; the usage at the end is exact. */
function show({ row, message }, pace, before) {
  grow(row);
  tell(message.text || message.calls.length ? "Answering …" : "Thinking …");
  contextUse = { ...contextUse, tokens: before + pace.pieces, exact: false };
  speed(pace.pieces, pace.last - pace.first);
  meter();
  follow();
}

function finish(mine, pace, usage, trouble, before) {
  const { conversation, message, row } = mine;
  const isStopped = trouble?.name === "AbortError", isShown = live === mine;
  message.calls = message.calls.filter(Boolean);
  for (const call of message.calls) Object.assign(call, originOf(call.name));
  if (usage) {
    message.usage = {
      prompt: usage.prompt_tokens, completion: usage.completion_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? null,
      places: usage.prompt_tokens_details?.cached_from ?? {}, reread: whyReread(usage.prompt_tokens_details?.reread),
    };
  }
  message.drafts = draftsOf(usage?.completion_tokens_details);
  const milliseconds = pace.last - pace.first, tokens = usage?.completion_tokens ?? pace.pieces;
  if (milliseconds > 0) message.rate = (1000 * (tokens - 1)) / milliseconds;
  if (isStopped && message.ending !== "loop") message.ending = "stopped";
  if (trouble && !isStopped) {
    const lost = !(trouble instanceof Failure);
    message.error = lost ? "The connection to the server was lost before the answer was complete." : trouble.message;
    message.ending ||= "error";
  }
  if (live === mine) live = null;
  conversation.changed = Date.now();
  keepLive(conversation, message);
  if (!isShown) return; // another conversation is shown
  row.body.setAttribute("aria-busy", "false");
  grow(row);
  row.text.end();
  complain(row, true);
  contextUse = { tokens: before + pace.pieces, cached: contextUse.cached, exact: pace.pieces === 0 };
  speed(tokens, milliseconds);
  draw();
  if (usage || message.role === "summary") settle();
  busy(false);
  if (trouble instanceof Failure) point(trouble);
  if (trouble?.status === 401) lock(message);
  tell(trouble && !isStopped ? "" : isStopped || message.ending === "loop" ? "Stopped." : message.calls.length ? "It waits for results." : message.role === "summary" ? "Compacted." : "Answered.");
  if (message.text && !message.error) announce(spokenText(row.body));
  drawList();
  meter();
  follow();
  look();
  if (message.ending === "tool_calls") proceed(message);
}

/** The numbers of drafted and of accepted tokens; null if none were drafted. */
function draftsOf(details) {
  const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } = details ?? {};
  return accepted + rejected > 0 ? { all: accepted + rejected, accepted } : null;
}

/** The words of an answer, a line for each block; only the beginning of a long answer. */
function spokenText(body) {
  let text = "";
  withSources(() => {
    for (const block of body.querySelectorAll("p, h3, h4, h5, h6, th, td, pre")) {
      text += `${text && "\n"}${block.innerText}`;
      if (text.length > SPOKEN) break;
    }
  });
  return text.length > SPOKEN ? `${text.slice(0, SPOKEN)} … The answer continues.` : text;
}

/** Shows an error of the server at the field that it is about, "tools" or "schema". */
function point({ field, message }) {
  const isSchema = /^(response_format|json_schema)/.test(field) || /^The JSON schema\b/.test(message), areTools = /^tool/.test(field);
  if (!isSchema && !areTools) return;
  sayWrong(areTools ? "tools" : "schema", message);
  $("more").open = true;
}

/** Whether the text ends in `least` characters or more that repeat a piece; one pass, from the end to the beginning. */
function loops(text, least) {
  const at = (place) => text.charCodeAt(text.length - 1 - place);
  const borders = new Int32Array(text.length); // borders[n]: the length of the longest border of the first n + 1 characters of the reversed text
  for (let place = 1, border = 0; place < text.length; place += 1) {
    while (border && at(place) !== at(border)) border = borders[border - 1];
    if (at(place) === at(border)) border += 1;
    borders[place] = border;
    const length = place + 1;
    if (length >= least && LOOP.rounds * (length - border) <= length) return true;
  }
  return false;
}

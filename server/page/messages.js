"use strict";

// The messages that are shown: their elements and their buttons.

let current = newConversation(lastSettings()); // the conversation that is shown
let rows = []; // { message, element, … } of each message that is shown

/** Shows the messages of the current conversation. Rows that are shown already stay as they are. */
function draw() {
  const path = pathOf(current);
  let same = 0;
  while (same < rows.length && rows[same].message === path[same]) same += 1;
  for (const row of rows.splice(same)) row.element.remove();
  for (const message of path.slice(same)) {
    const row = { user: userRow, assistant: assistantRow, tool: toolRow }[message.role](message);
    rows.push(row);
    $("turns").append(row.element);
  }
  rows.forEach(drawFoot);
  $("welcome").hidden = path.length > 0;
}

const rowOf = (message) => rows.find((row) => row.message === message);
const parentOf = (message) => (message.parent === null ? null : current.messages[message.parent]);

function article(message, name) {
  const element = make("article", `message ${message.role}`);
  element.setAttribute("aria-label", name);
  return element;
}

function button(name, does, className = "quiet act") {
  const made = make("button", className, name);
  made.type = "button";
  made.addEventListener("click", does);
  return made;
}

function fold(className, summary) {
  const element = make("details", `fold ${className}`);
  element.append(make("summary", "", summary));
  return element;
}

// -- the three kinds of messages --------------------------------------------------------------------------------------

function userRow(message) {
  const element = article(message, "You"), foot = make("footer", "foot"), body = make("div", "question text"), text = new Markdown(body);
  text.write(message.text);
  text.end();
  element.append(body, foot);
  return { message, element, body, foot };
}

function assistantRow(message) {
  const element = article(message, "Answer"), foot = make("footer", "foot");
  const row = { message, element, foot, thoughts: null, body: make("div", "answer text"), calls: make("div", "calls"), written: 0 };
  element.append(row.body, row.calls, foot);
  fill(row);
  return row;
}

/** Shows a whole answer anew; `going`: whether it is still being generated. */
function fill(row, going = false) {
  row.thoughts?.remove();
  row.thoughts = null;
  row.calls.replaceChildren();
  row.text = new Markdown(row.body);
  row.written = 0;
  grow(row);
  if (!going) row.text.end();
  complain(row);
}

/** Shows what was added to an answer. */
function grow(row) {
  const { message } = row;
  if (message.reasoning) think(row);
  row.text.write(message.text.slice(row.written));
  row.text.flush();
  row.written = message.text.length;
  message.calls.forEach((call, index) => showCall(row, call, index));
}

function think(row) {
  const { message } = row;
  if (!row.thoughts) {
    row.thoughts = fold("thinking", "");
    row.thoughts.append(dir(make("div", "thoughts")));
    row.body.before(row.thoughts);
  }
  const [summary, text] = row.thoughts.children, busy = live?.row === row && !message.text && !message.calls.length;
  const seconds = message.thought === null || message.thought === undefined ? "" : `${number(message.thought, 1)} s`;
  const line = busy ? `Thinking … ${seconds}` : seconds ? `Thought for ${seconds}` : "Thoughts";
  if (summary.textContent !== line) summary.textContent = line;
  const written = row.thoughts.written ?? 0;
  if (message.reasoning.length > written) addText(text, visible(message.reasoning.slice(written)));
  row.thoughts.written = message.reasoning.length;
}

function showCall(row, call, index) {
  let element = row.calls.children[index];
  if (!element) {
    element = fold("call", "");
    const text = make("pre");
    text.tabIndex = 0;
    text.setAttribute("role", "region");
    text.setAttribute("aria-label", "Arguments");
    element.append(text);
    row.calls.append(element);
  }
  const busy = live?.row === row && index === row.message.calls.length - 1, [summary, text] = element.children;
  const line = `${busy ? "Calling" : "Called"} ${visible(call.name)}${busy ? " …" : ""}`;
  if (summary.textContent !== line) summary.textContent = line;
  if (element.shown === call.arguments && element.busy === busy) return;
  Object.assign(element, { shown: call.arguments, busy });
  text.textContent = visibleCode(busy ? call.arguments : indented(call.arguments));
}

function indented(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

function toolRow(message) {
  const element = article(message, "Results of tools"), foot = make("footer", "foot"), body = make("div", "calls");
  for (const { name, text } of message.results) {
    const result = fold("call", `Result of ${visible(name)}`), shown = make("pre", "", visibleCode(indented(text)));
    shown.tabIndex = 0;
    shown.setAttribute("role", "region");
    shown.setAttribute("aria-label", `Result of ${visible(name)}`);
    result.append(shown);
    body.append(result);
  }
  element.append(body, foot);
  return { message, element, body, foot };
}

/** A sentence about what went wrong with an answer; empty if nothing did. */
function troubleOf({ text, calls, ending, error }) {
  if (error || ending) return error;
  const which = text || calls.length ? "This answer has no end" : "This answer has not come";
  return `${which}: the page was closed before it did, or another tab still waits for it.`;
}

/** Shows below an answer what went wrong with it; `now`: whether it has just happened. */
function complain(row, now = false) {
  row.element.querySelector(".notice")?.remove();
  const trouble = live?.message === row.message ? "" : troubleOf(row.message);
  if (!trouble) return;
  const notice = make("p", "notice", trouble);
  if (now) notice.setAttribute("role", "alert");
  row.foot.before(notice);
}

// -- below a message --------------------------------------------------------------------------------------------------

function drawFoot(row) {
  const { message, foot } = row;
  const last = message === rows.at(-1).message, copied = () => message.text;
  const parts = [...arrows(row)];
  if (message.role === "user") parts.unshift(sign(button("Edit", () => edit(row)), "edit"), copyButton("Copy message", copied, true));
  if (message.role === "tool") parts.push(button("Edit", () => editResults(row)));
  if (message.role === "assistant" && live?.message !== message) {
    const whole = message.text || message.calls.length;
    const fails = !whole || message.error;
    parts.push(button(fails ? "Retry" : "Regenerate", () => regenerate(message), `quiet act ${fails ? "retry" : ""}`));
    if (last && canContinue(message)) parts.push(button("Continue", () => resume(message)));
    if (message.text) parts.push(button("Edit", () => edit(row)), copyButton("Copy answer", copied));
  }
  if (message.role === "assistant") parts.push(make("span", "figures", figuresOf(message)));
  const focused = foot.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  foot.replaceChildren(...parts);
  if (focused) buttonOf(row, focused)?.focus({ preventScroll: true });
  const waits = message.role === "assistant" && last && message.calls.length > 0 && live?.message !== message;
  if (waits && !row.form) {
    row.form = resultsForm(message.calls.map(({ id, name }) => ({ id, name, text: "" })), "Send results", (results) => {
      row.form.remove();
      row.form = null;
      say({ role: "tool", results }, message);
    });
    foot.before(row.form);
  }
  if (!waits && row.form && !isTyped(row.form)) {
    row.form.remove();
    row.form = null;
  }
}

/** Whether a form has a result that the user has begun to type. */
const isTyped = (form) => [...form.querySelectorAll("textarea")].some(({ value }) => value);

const nameOf = (made) => made.getAttribute("aria-label") ?? made.textContent;
const buttonOf = ({ foot }, name) => [...foot.querySelectorAll("button")].find((made) => nameOf(made) === name);

/** The number of the version of a message that is shown, with buttons to show others; nothing for a single version. */
function arrows({ message }) {
  const holder = above(current, message), all = holder.children.length;
  if (all < 2) return [];
  const turn = (by, name, sign) => {
    const made = button(sign, () => {
      holder.shown += by;
      draw();
      settle();
      keepConversation(current);
      const buttons = rowOf(current.messages[holder.children[holder.shown]]).foot.querySelectorAll(".arrows button");
      [...buttons].sort((a, b) => a.disabled - b.disabled || (a.textContent === sign ? -1 : 1))[0].focus();
    });
    made.setAttribute("aria-label", name);
    made.disabled = !(holder.shown + by in holder.children);
    return made;
  };
  const element = make("span", "arrows");
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", `Version ${holder.shown + 1} of ${all}`);
  element.append(turn(-1, "Earlier version", "‹"), make("span", "", `${holder.shown + 1}/${all}`), turn(1, "Later version", "›"));
  return [element];
}

function figuresOf({ usage, rate, ending, drafts, error, text }) {
  if (!ending || (error && !usage)) return "";
  const most = Number(current.settings.max_tokens || Infinity);
  const why = ending === "length" && usage?.completion >= most ? "as long as the settings allow" : ENDINGS[ending];
  return [
    usage && fromCache(usage), usage && count(usage.completion, "token"), rate && `${number(rate, 1)} tokens/s`,
    drafts && `${number(drafts.accepted)} of ${count(drafts.all, "drafted token")} right`, why && ending === "stopped" && !text ? "stopped before the first token" : why,
  ].filter(Boolean).join(" · ");
}

const fromCache = ({ prompt, cached, places = {} }) =>
  cached === null ? count(prompt, "prompt token") : `${number(cached)} of ${number(prompt)} prompt tokens from the cache${fromTiers(places)}`;

/** How many of the cached tokens came from a tier of the cache, in brackets. */
function fromTiers(places) {
  const tiers = Object.entries(places).filter(([place]) => place !== "store");
  return tiers.length ? ` (${tiers.map(([place, tokens]) => `${number(tokens)} from ${place}`).join(", ")})` : "";
}

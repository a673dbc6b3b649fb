// What is in the row of a message, by its role.

const fold = (className, summary, body) => put(make("details", `fold ${className}`), make("summary", "", summary), body);

const LONG = 20; // lines of a question that is folded

/** Fills the row of a question; other functions fill the rows of answers, summaries and results of tools. */
function buildQuestion(row) {
  const { text, files = [], leftOut } = row.message, words = make("div", "text"), markdown = new Markdown(words);
  markdown.write(text);
  markdown.end();
  row.body = put(make("div", "question"), ...files.map(shownFile), ...(text ? [words] : []));
  row.element.append(row.body);
  const lines = linesOf(text);
  if (lines >= LONG) row.element.append(unfoldButton(row, words, `Show all ${number(lines)} lines`));
  if (leftOut) row.element.append(make("p", "hint", visible(leftOut)));
  row.element.append(row.foot);
}

/** A button that shows a text, which it folds, to its end, and folds it again. */
function unfoldButton(row, words, name) {
  const unfold = button(name, () => {
    const isFolded = words.classList.toggle("folded");
    unfold.textContent = isFolded ? name : "Show less";
    unfold.setAttribute("aria-expanded", String(!isFolded));
    if (isFolded) row.element.scrollIntoView({ block: "nearest" }); // its beginning may be far above
  }, "quiet unfold");
  unfold.setAttribute("aria-expanded", "false");
  words.classList.add("folded");
  return unfold;
}

function buildAnswer(row) {
  Object.assign(row, { thoughts: null, body: make("div", "answer text"), calls: make("div", "calls"), written: 0 });
  row.element.append(row.body, row.calls, row.foot);
  fill(row);
}

function buildSummary(row) {
  buildAnswer(row);
  row.title = make("p", "hint");
  row.element.prepend(row.title);
  nameSummary(row);
}

/** Says what a summary is for, and whether it is in use. */
function nameSummary({ message, title, element }) {
  const left = message.left ? ` The first ${count(message.left, "message")} did not fit, and ${message.left === 1 ? "is" : "are"} not in it.` : "";
  title.textContent = message.off
    ? "Summary, not in use: the model gets the messages above."
    : `Summary: the model gets it in place of the messages above.${left}`;
  element.classList.toggle("off", message.off);
}

/** Shows a whole answer anew; `isGoing`: whether it is still being generated. */
function fill(row, isGoing = false) {
  row.thoughts?.remove();
  row.thoughts = null;
  row.calls.replaceChildren();
  row.text = new Markdown(row.body);
  row.written = 0;
  grow(row);
  if (!isGoing) row.text.end();
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
    const text = make("div", "thoughts");
    row.thoughts = fold("thinking", "", text);
    Object.assign(row.thoughts, { parts: new Parts(text), written: 0 });
    row.body.before(row.thoughts);
  }
  const [summary] = row.thoughts.children, busy = live?.row === row && !message.text && !message.calls.length;
  const seconds = message.thought === null || message.thought === undefined ? "" : `${number(message.thought, 1)} s`;
  const line = busy ? `Thinking … ${seconds}` : seconds ? `Thought for ${seconds}` : "Thoughts";
  setText(summary, line);
  const more = message.reasoning.slice(row.thoughts.written);
  direct(row.thoughts.lastChild, more);
  row.thoughts.parts.addText(more);
  row.thoughts.written = message.reasoning.length;
}

function showCall(row, call, index) {
  let element = row.calls.children[index];
  if (!element) {
    element = fold("call", "", region("pre", "", "", "Arguments"));
    row.calls.append(element);
  }
  const busy = live?.row === row && index === row.message.calls.length - 1, [summary, text] = element.children;
  const line = `${busy ? "Calling" : "Called"} ${visible(call.name)}${busy ? " …" : ""}`;
  setText(summary, line);
  const { shown, busy: wasBusy } = element, grows = busy && wasBusy;
  if (shown === call.arguments && wasBusy === busy) return;
  if (!grows) {
    text.replaceChildren();
    element.parts = new Parts(text);
  }
  element.parts.addText(visibleCode(busy ? call.arguments.slice(grows ? shown.length : 0) : indentedJson(call.arguments)));
  Object.assign(element, { shown: call.arguments, busy });
}

const INDENTED = 8; // times its length that a JSON text may grow by

/** A JSON text with a line for each value; as it is if it is no JSON, or so deep that it would be mostly spaces. */
function indentedJson(json) {
  let depth = 0, spaces = 0;
  for (const [sign] of json.matchAll(/[[\]{},]/g)) {
    if (sign !== ",") depth += "[{".includes(sign) ? 1 : -1;
    spaces += 2 * Math.max(0, depth);
  }
  if (spaces > INDENTED * (json.length + 100)) return json;
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

function buildResults({ message, element, foot }) {
  const results = message.results.map(({ name, text, failed }) => {
    const body = region("pre", "", visibleCode(indentedJson(text)), `Result of ${visible(name)}`);
    return fold(failed ? "call failed" : "call", `${failed ? "Error" : "Result"} of ${visible(name)}`, body);
  });
  element.append(put(make("div", "calls"), ...results), foot);
}

/** A sentence about what went wrong with an answer; empty if nothing did. */
function troubleOf({ text, calls, ending, error }) {
  if (error || ending) return error;
  const what = text || calls.length ? "was cut off" : "did not come";
  return `This answer ${what}: the page was closed, or another tab is still waiting for it.`;
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

// The rows of the messages that are shown. A row is built when it comes near to what is seen.

let current = newConversation(lastSettings()); // the conversation that is shown
let rows = []; // { message, element } of each message that is shown; what else a built row has depends on its role

const SCREENS = 2; // heights of the view that are built at the end of a conversation before it is shown

/** Shows the messages of the current conversation. Rows that are shown already stay as they are. */
function draw() {
  const path = pathOf(current);
  let same = 0;
  while (same < rows.length && rows[same].message === path[same]) same += 1;
  for (const row of rows.splice(same)) drop(row);
  const newRows = path.slice(same).map(plainRow);
  rows.push(...newRows);
  $("turns").append(...newRows.map(({ element }) => element));
  for (const row of rows) if (row.foot) drawFoot(row);
  for (let place = rows.length - 1, room = SCREENS * $("log").clientHeight; place >= 0 && room > 0; place -= 1) {
    room -= heightOf(build(rows[place]).message);
  }
  $("welcome").hidden = path.length > 0;
}

function drop(row) {
  nearby.unobserve(row.element);
  row.element.remove();
}

/** The row of a message, built; undefined if the message is not shown. */
function rowOf(message) {
  const row = rows.find((each) => each.message === message);
  return row && build(row);
}

const parentOf = (message) => (message.parent === null ? null : current.messages[message.parent]);

// -- rows that are not built yet --------------------------------------------------------------------------------------

const LINE = { characters: 80, pixels: 26 }; // estimates for a line of text
const textOf = ({ text, results, files = [] }) => [...files.map(({ name }) => name), text ?? results.map((result) => result.text).join("\n")].join("\n");

/** About the number of lines that a text is shown in. */
const linesOf = (text) => text.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / LINE.characters)), 0);

/** About the height of a built row, in pixels. */
function heightOf(message) {
  const text = textOf(message), lines = 3 + Math.ceil(text.length / LINE.characters) + text.split("\n").length / 2;
  return LINE.pixels * (message.role === "user" ? Math.min(LONG, lines) : lines);
}

/** A row with the text as it was written, which browsers find when they search the page, but do not lay out. */
function plainRow(message) {
  const label = { user: "You", assistant: "Answer", summary: "Summary", tool: "Results of tools" }[message.role];
  const element = make("article", `message ${message.role} plain`, visible(textOf(message)), label);
  element.style.containIntrinsicHeight = `auto ${Math.round(heightOf(message))}px`;
  const row = { message, element };
  nearby.observe(element);
  return row;
}

const nearby = new IntersectionObserver((entries) => {
  const near = new Set(entries.filter(({ isIntersecting }) => isIntersecting).map(({ target }) => target));
  const waiting = rows.filter(({ element, foot }) => !foot && near.has(element));
  waiting.forEach(build);
  if (waiting.length) follow(); // otherwise it would take back a step of the user's whose event has not come yet
}, { root: $("log"), rootMargin: "100% 0px" });

/** Builds the row of a message unless it is built, and returns it. */
function build(row) {
  if (row.foot) return row;
  nearby.unobserve(row.element);
  row.element.classList.remove("plain");
  row.element.replaceChildren();
  row.foot = make("footer", "foot");
  ({ user: buildQuestion, assistant: buildAnswer, summary: buildSummary, tool: buildResults })[row.message.role](row);
  drawFoot(row);
  return row;
}

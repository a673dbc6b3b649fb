// Markdown: markdown-it reads it, with rules of ours. HTML is text, and so is a link that is not safe to follow.

const NESTED = 24; // levels of lists, their items and quotes in each other: a browser's layout is recursive

const SAFE = new Set(["http:", "https:", "mailto:"]);
const isSafe = (address) => { try { return SAFE.has(new URL(address).protocol); } catch { return false; } }; // a relative address would lead to this server

/** What later lines decide is left out, since what is above them is drawn: definitions of links, and lines under headings. */
const parser = Object.assign(markdownit({ html: false, linkify: true }), { validateLink: isSafe }).disable(["entity", "lheading", "reference"]);

const CLOSING = { $$: "$$", "\\(": "\\)", "\\[": "\\]" };
const DOLLARS = /(?<![\w$])\$(?![\s$`])(?:[^\\$`\n]|\\[^\n])+(?<!\s)\$(?![\d$])/y; // no two prices
const NOTE_MARK = /\[\^(\d{1,3})\]/y, NOTE = /^\[\^(\d{1,3})\]: +(?=\S)/, TASK = /^\[([ xX])\] +(?=\S)/;
const LITERAL = /\\[()[\]]|(?<=\w)\*(?=\w)/y; // a delimiter of no formula, and a product

/** What a regular expression matches at a place of a text, and there only. */
const matchAt = (expression, text, place) => Object.assign(expression, { lastIndex: place }).exec(text);

/** The place after the formula that begins at a place of a text; -1 if none does. One of several lines begins a line. */
function formulaEnd(text, place) {
  const opening = text.slice(place, place + 2), closing = CLOSING[opening];
  if (!closing) return matchAt(DOLLARS, text, place) ? DOLLARS.lastIndex : -1;
  const end = text.indexOf(closing, place + 3), beginsLine = opening !== "\\(" && (place === 0 || text[place - 1] === "\n");
  if (end === -1 || end - place > FORMULAS.longest || (!beginsLine && text.slice(place, end).includes("\n"))) return -1;
  return opening === "$$" && [text[place - 1], text[place + 2], text[end + 2]].includes("$") ? -1 : end + 2;
}

/** The token of our own that begins at a place of a text: { type, content, end }; null if none does. */
function ownToken(text, place) {
  const end = formulaEnd(text, place), isDisplayed = /^(\$\$|\\\[)/.test(text.slice(place, place + 2));
  if (end > 0) return { type: "maths", content: text.slice(place, end), end: isDisplayed && text[end] === "\n" ? end + 1 : end };
  const note = matchAt(NOTE_MARK, text, place), literal = matchAt(LITERAL, text, place);
  if (note) return { type: "note", content: note[1], end: NOTE_MARK.lastIndex };
  return literal && { type: "text", content: literal[0], end: LITERAL.lastIndex };
}

parser.inline.ruler.before("escape", "own", (state, silent) => {
  const own = /[$\\[*]/.test(state.src[state.pos]) && ownToken(state.src, state.pos);
  if (!own || own.end > state.posMax) return false;
  if (!silent) state.push(own.type, "", 0).content = own.content;
  state.pos = own.end;
  return true;
});

/** Makes lines a paragraph, whatever they begin with. */
function addParagraph(state, from, to) {
  state.push("paragraph_open", "p", 1).map = [from, to];
  state.push("inline", "", 0).content = state.getLines(from, to, state.blkIndent, false).trim();
  state.push("paragraph_close", "p", -1);
  state.line = to;
  return true;
}

const lineOf = (state, line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);

parser.block.ruler.before("table", "deep", (state, from, to, silent) => !silent && state.level >= NESTED && addParagraph(state, from, to));

/** A formula that its line does not close, up to an empty line: what its lines begin with is no Markdown. */
parser.block.ruler.before("table", "maths", (state, from, to, silent) => {
  const line = lineOf(state, from), closing = state.sCount[from] - state.blkIndent < 4 && CLOSING[/^(?:\$\$(?!\$)|\\\[)/.exec(line)?.[0]];
  if (!closing || line.includes(closing, 2)) return false;
  if (silent) return true;
  let end = from + 1, isOpen = true;
  for (let length = line.length; isOpen && end < to && !state.isEmpty(end) && state.sCount[end] >= state.blkIndent; end += 1) {
    length += lineOf(state, end).length + 1;
    isOpen = length <= FORMULAS.longest && !lineOf(state, end).includes(closing);
  }
  return addParagraph(state, from, end);
}, { alt: ["paragraph", "blockquote", "list"] });

/** A note ends the paragraph before it. */
parser.block.ruler.before("paragraph", "note", (state, line, _to, silent) => silent && NOTE.test(lineOf(state, line)), { alt: ["paragraph"] });

/** The tokens that `parser.block` or `parser.inline` makes of a text. */
function parse(rules, text) {
  const tokens = [];
  rules.parse(text, parser, {}, tokens);
  return tokens;
}

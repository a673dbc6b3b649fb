// Blocks of Markdown that grow: words, code, the rows of a table.

/** Bounds of an answer: elements of its formulas, and milliseconds in which its code is coloured. */
const roomOf = () => ({ elements: FORMULAS.all, milliseconds: COLOURS.all });

/** A paragraph, a heading, an item or a cell. When it grows, only text whose meaning may still change is read again. */
class InlineText {
  /** before: nodes in front of the words. */
  constructor(element, room, ...before) {
    this.element = put(element, ...before);
    this.parts = new Parts(element);
    this.room = room;
    this.text = ""; // the text after the fixed nodes, and one character before it
    this.from = 0; // the place in `text` after that character
    this.lastFixed = element.lastChild; // the last node that no longer changes
    this.elementsOfRest = 0; // what the other nodes took of the room
    this.wholeText = "";
    this.lines = 1;
    this.unreadLines = ""; // lines in which no formula has been looked for
    this.formulaEnd = ""; // what ends the formula that they may belong to
    this.formulaLength = 0; // its characters
  }

  write(text) {
    this.text += text;
    this.wholeText += text;
    this.unreadLines += text;
  }

  /** Whether the next line belongs to a formula. */
  get opensFormula() {
    const lines = this.unreadLines.split("\n");
    this.unreadLines = "";
    for (const line of lines) this.#look(line);
    return this.formulaEnd !== "";
  }

  #look(line) {
    const opening = !this.formulaEnd && /^(?:\$\$(?!\$)|\\\[)/.exec(line)?.[0];
    if (opening) [this.formulaEnd, this.formulaLength] = [opening === "$$" ? "$$" : "\\]", 0];
    this.formulaLength += line.length + 1;
    if (this.formulaEnd && (line.includes(this.formulaEnd, opening ? 2 : 0) || this.formulaLength > FORMULAS.longest)) this.formulaEnd = "";
  }

  flush() {
    const { marks, settled } = read(this.text, this.from), { text, room, parts } = this;
    direct(this.element, text);
    while (parts.last.lastChild !== this.lastFixed) parts.last.lastChild.remove();
    room.elements += this.elementsOfRest;
    parts.add(nodesOf(text, marks, this.from, settled, room));
    this.lastFixed = parts.last.lastChild;
    this.elementsOfRest = room.elements;
    parts.last.append(...nodesOf(text, marks, settled, text.length, room));
    this.elementsOfRest -= room.elements;
    if (settled === this.from) return;
    this.text = text.slice(settled - 1);
    this.from = 1;
  }
}

/**
 * Bounds of colours: characters of a block of code, and of the pieces in which highlight.js reads it, since it takes
 * quadratic time for some; milliseconds for all code of an answer; colours in each other; and how much a block grows before
 * it is coloured again.
 */
const COLOURS = { longest: 50_000, piece: 500, all: 500, depth: 20, growth: 1.2 };
const PIECE = new RegExp(`[^]{1,${COLOURS.piece}}(?<=\\n)|[^]{1,${COLOURS.piece}}`);

let colouredUntil = 0; // when highlight.js stops

/** highlight.js's name of the language that reads `language` in pieces; undefined if it does not know it. */
function inPieces(language) {
  const languageObject = hljs.getLanguage(language), subLanguage = languageObject && hljs.listLanguages().find((name) => hljs.getLanguage(name) === languageObject);
  const name = subLanguage && `pieces of ${subLanguage}`;
  if (name && !hljs.getLanguage(name)) {
    const stops = () => { if (performance.now() > colouredUntil) throw new Error("the time is over"); }; // highlight.js returns what it has by then
    hljs.registerLanguage(name, () => ({ unicodeRegex: true, contains: [{ begin: PIECE, subLanguage, "on:begin": stops }] }));
  }
  return name;
}

/** A block of code. Text is appended to it, and coloured when it has grown and when it is complete. */
class Code {
  constructor(fence, indent, language, room) {
    Object.assign(this, { fence, indent, language, room, lines: 0, text: "", fresh: "", coloured: 0 });
    const copying = copyButton("Copy code", () => this.text + this.fresh);
    const bar = put(make("figcaption"), make("span", "language", language || "Code"), copying);
    this.pre = region("pre", "", "", language ? `Code, ${language}` : "Code");
    this.parts = new Parts(this.pre.appendChild(make("code")), "\n", Infinity);
    this.element = put(make("figure", "code"), bar, this.pre);
    this.pieces = inPieces(/^[\w+#.-]*/.exec(language)[0]);
  }

  write(text) { this.fresh += text; }

  flush() {
    this.#append();
    const whole = this.text.lastIndexOf("\n") + 1;
    if (whole > COLOURS.growth * this.coloured) this.#colour(whole, this.room.milliseconds - COLOURS.all / 2);
  }

  /** Colours the code if highlight.js knows its language. */
  close() {
    this.#append();
    this.#colour(this.text.length, this.room.milliseconds);
  }

  #append() {
    this.parts.addText(visibleCode(this.fresh));
    this.text += this.fresh;
    this.fresh = "";
  }

  /** Colours the first `length` characters, if it takes no more than so many milliseconds; those that come later stay as they are. */
  #colour(length, milliseconds) {
    if (!this.pieces || length > COLOURS.longest || milliseconds <= 0) return;
    const startTime = performance.now(), text = visibleCode(this.text.slice(0, length));
    colouredUntil = startTime + milliseconds;
    const { _emitter } = hljs.highlight(text, { language: this.pieces, ignoreIllegals: true });
    const nodes = _emitter.rootNode.children.flatMap((piece) => piece.children ?? piece).map((node) => colouredNode(node));
    const parts = new Parts(make("code"), "\n", Infinity), done = nodes.reduce((sum, { textContent }) => sum + textContent.length, 0);
    parts.add(nodes);
    parts.addText(text.slice(done) + visibleCode(this.text.slice(length)));
    this.#replace(parts);
    this.coloured = length;
    this.room.milliseconds -= performance.now() - startTime;
  }

  /** Shows other nodes, but keeps those at the beginning that are the same, and with them what somebody has selected. */
  #replace(parts) {
    const code = this.pre.firstChild;
    let lastSame = null;
    for (let next = code.firstChild; next && parts.element.firstChild?.isEqualNode(next); next = next.nextSibling) {
      parts.element.firstChild.remove();
      lastSame = next;
    }
    while (code.lastChild !== lastSame) code.lastChild.remove();
    const isWhole = parts.last === parts.element;
    while (parts.element.firstChild) code.append(parts.element.firstChild);
    this.parts = Object.assign(parts, { element: code, last: isWhole ? code : code.lastChild });
  }
}

/** A node of highlight.js's tree as a node of the page: a text, or an element around others. */
function colouredNode(node, depth = 0) {
  if (typeof node === "string") return document.createTextNode(node);
  if (depth === COLOURS.depth) return document.createTextNode(textUnder(node));
  return put(make("span", colourOf(node)), ...node.children.map((child) => colouredNode(child, depth + 1)));
}

const colourOf = ({ scope }) => (!scope || scope.includes(":") ? "" : `hljs-${scope.split(".")[0]}`); // with a colon: a language in another

/** The text in a node of highlight.js's tree, which may be deeper than the stack. */
function textUnder(node) {
  const texts = [], waiting = [node];
  while (waiting.length) {
    const next = waiting.pop();
    if (typeof next === "string") texts.push(next);
    else waiting.push(...next.children.slice().reverse());
  }
  return texts.join("");
}

/** A row of a table, whose cells grow one after the other. */
class Row {
  constructor(element, cell, aligns, room) {
    Object.assign(this, { element, cell, aligns, room, hasBegun: false, pending: "", words: null, cells: 0 });
    this.placeholder = make(cell); // one element in place of the cells that have not come
    this.placeholder.colSpan = aligns.length;
    element.append(this.placeholder);
    this.dirty = new Set();
  }

  write(text) {
    const parts = (this.pending + text).split(/(?<!\\)\|/), last = parts.pop();
    for (const part of parts) {
      this.#put(part.trimEnd());
      if (this.hasBegun) this.#begin(); // a bar before the first cell only opens the row
      this.hasBegun = true;
      this.words = null;
    }
    const certainText = last.replace(/\\$/, "").trimEnd();
    const rest = last.slice(certainText.length); // spaces, and a sign that may be the bar's
    this.pending = `${/\s/.test(rest) ? " " : ""}${rest.endsWith("\\") ? "\\" : ""}`;
    this.#put(certainText);
  }

  /** Ends the row: nothing follows the pending text. */
  complete() {
    this.#put(this.pending.trimEnd());
    this.pending = "";
  }

  flush() {
    for (const words of this.dirty) words.flush();
    this.dirty.clear();
  }

  #put(text) {
    const shownText = this.words ? text : text.trimStart();
    if (!shownText) return;
    this.hasBegun = true;
    this.#begin();
    this.words.write(shownText.replaceAll("\\|", "|"));
    this.dirty.add(this.words);
  }

  /** Begins a cell if none is begun. */
  #begin() {
    if (this.words) return;
    this.words = new InlineText(make(this.cell, this.aligns[this.cells] ?? ""), this.room);
    this.cells += 1;
    if (this.cells > this.aligns.length) return; // as in other Markdown, a row has no more cells than the head
    this.placeholder.before(this.words.element);
    if (this.cells === this.aligns.length) this.placeholder.remove();
    else this.placeholder.colSpan = this.aligns.length - this.cells;
  }
}

const cells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

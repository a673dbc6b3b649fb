// Blocks of code: text is appended to them as it comes, and highlight.js colours them within bounds.

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
  constructor(language, room) {
    Object.assign(this, { room, text: "", coloured: 0, isComplete: false });
    const bar = put(make("figcaption"), make("span", "language", language || "Code"), copyButton("Copy code", () => this.text));
    this.pre = region("pre", "", "", language ? `Code, ${language}` : "Code");
    this.parts = new Parts(this.pre.appendChild(make("code")), "\n", Infinity);
    this.element = put(make("figure", "code"), bar, this.pre);
    this.pieces = inPieces(/^[\w+#.-]*/.exec(language)[0]);
  }

  /** Shows a text that begins with the one that is there. */
  grow(text) {
    this.parts.addText(visibleCode(text.slice(this.text.length)));
    this.text = text;
    const whole = text.lastIndexOf("\n") + 1;
    if (whole > COLOURS.growth * this.coloured) this.#colour(whole, this.room.milliseconds - COLOURS.all / 2);
  }

  /** Colours the code if highlight.js knows its language. */
  complete() {
    if (!this.isComplete) this.#colour(this.text.length, this.room.milliseconds);
    this.isComplete = true;
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
    const code = this.pre.firstChild, isWhole = parts.last === parts.element;
    renew(code, [...code.childNodes], [...parts.element.childNodes]);
    this.parts = Object.assign(parts, { element: code, last: isWhole ? code : code.lastChild });
    this.coloured = length;
    this.room.milliseconds -= performance.now() - startTime;
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

// Blocks of Markdown that grow: words, code, the rows of a table.

const SEGMENT = 2000; // characters after which the end of a mark, such as `**`, is no longer looked for
const COLOURED = 50_000; // characters of code beyond which it gets no colours
const PIECE = new RegExp(`^[^]{1,${2 * SEGMENT}}`, "u"); // the most text that is read at a time; it cuts no character

/** A paragraph, a heading or an item. When it grows, only text whose meaning may still change is read again. */
class Words {
  /** before: nodes in front of the words. */
  constructor(element, ...before) {
    this.element = put(element, ...before);
    this.text = ""; // the text after the fixed nodes
    this.fixed = before.length; // the number of nodes that no longer change
    this.whole = "";
    this.lines = 1;
  }

  write(text) {
    this.text += text;
    this.whole += text;
    if (this.text.length > 4 * SEGMENT) this.flush();
  }

  /** Whether the next line belongs to a formula. */
  get opened() { return openedAt(this.text) >= 0; }

  flush() {
    while (this.text.length > 4 * SEGMENT) this.#settle(PIECE.exec(this.text)[0]);
    this.#settle(this.text);
    this.#show(this.text);
  }

  /** Fixes the nodes of the longest beginning of the text that later text cannot change. */
  #settle(text) {
    let cut = settledUpTo(text);
    if (text.length - cut > SEGMENT) cut = Math.max(cut, text.lastIndexOf(" ")) || text.length;
    if (!cut) return;
    this.#show(text.slice(0, cut));
    this.fixed = this.element.childNodes.length;
    this.text = this.text.slice(cut);
  }

  #show(text) {
    while (this.element.childNodes.length > this.fixed) this.element.lastChild.remove();
    this.element.append(...inline(text));
  }
}

/** A block of code. Text is appended to it, and read again once, when it is complete. */
class Code {
  constructor(fence, indent, language) {
    Object.assign(this, { fence, indent, language, lines: 0, text: "", fresh: "" });
    const copying = copyButton("Copy code", () => this.text + this.fresh);
    const bar = put(make("figcaption"), make("span", "language", language || "Code"), copying);
    this.pre = region("pre", "", "", language ? `Code, ${language}` : "Code");
    this.pre.append(make("code"));
    this.element = put(make("figure", "code"), bar, this.pre);
  }

  write(text) { this.fresh += text; }

  flush() {
    if (!this.fresh) return;
    addText(this.pre.firstChild, visibleCode(this.fresh));
    this.text += this.fresh;
    this.fresh = "";
  }

  /** Colours the code if highlight.js knows its language. */
  close() {
    this.flush();
    const language = /^[\w+#.-]*/.exec(this.language)[0];
    if (this.text.length > COLOURED || !hljs.getLanguage(language)) return;
    const { _emitter } = hljs.highlight(visibleCode(this.text), { language, ignoreIllegals: true });
    this.pre.replaceChildren(put(make("code"), ..._emitter.rootNode.children.map(coloured)));
  }
}

/** A node of highlight.js's tree: a text, or an element around others. */
const coloured = (node) => (typeof node === "string" ? node : put(make("span", colourOf(node)), ...node.children.map(coloured)));
const colourOf = ({ scope }) => (!scope || scope.includes(":") ? "" : `hljs-${scope.split(".")[0]}`); // with a colon: a language in another

/** A row of a table. */
class Row {
  constructor(element, cell, aligns) {
    Object.assign(this, { element, cell, aligns, text: "" });
  }

  write(text) { this.text += text; }

  flush() {
    const texts = cells(this.text), wanted = this.aligns.length || texts.length;
    this.element.replaceChildren(...Array.from({ length: wanted }, (_, column) => {
      const text = texts[column] ?? "";
      return put(make(this.cell, this.aligns[column] ?? ""), ...inline(text.slice(0, SEGMENT)), visible(text.slice(SEGMENT)));
    }));
  }
}

const cells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

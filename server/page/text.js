"use strict";

// Markdown to elements, as it streams in. What a model writes is never HTML: every character ends up in a text node.

const SEGMENT = 2000; // characters after which nothing is closed any more, such as emphasis
const DEPTH = 6; // of emphasis in emphasis
const LONGEST_MARK = 500; // characters of a line after which it is known what it is

/** Characters that cannot be seen, or that would reorder what can, as signs for them. */
const CONTROLS = /[\0-\x08\x0b-\x1f\x7f]/g, REORDERING = /[\u202a-\u202e\u2066-\u2069]/g;
const visible = (text) => text.replace(CONTROLS, (sign) => String.fromCharCode(sign === "\x7f" ? 0x2421 : 0x2400 + sign.charCodeAt()));
const visibleCode = (text) =>
  visible(text).replace(REORDERING, (sign) => `⟨U+${sign.charCodeAt().toString(16).toUpperCase()}⟩`);

function make(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** Adds to the text of an element; in several nodes, since a node is shaped as a whole whenever it grows. */
function addText(element, text) {
  for (const part of text.match(/[^]{1,8000}/gu) ?? []) {
    const last = element.lastChild;
    if (last?.length < 8000) last.appendData(part);
    else element.append(part);
  }
}

// -- inside of a line -------------------------------------------------------------------------------------------------

const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[\\\`*_{}[\]()#+.!|~<>-])`,
    "``(?<code2>[^\\n]*?[^\\n`])``(?!`)",
    "(?<!`)`(?<code>[^`\\n]+)`(?!`)",
    String.raw`\*\*(?<strong>(?=\S)[^\n]*?\S)\*\*`,
    String.raw`(?<!\w)__(?<strong2>(?=\S)[^\n]*?\S)__(?!\w)`,
    String.raw`~~(?<struck>(?=\S)[^\n]*?\S)~~`,
    String.raw`(?<![\w*])\*(?<em>(?![\s*])[^*\n]*[^*\s])\*(?![\w*])`,
    String.raw`(?<!\w)_(?<em2>(?![\s_])[^_\n]*[^_\s])_(?!\w)`,
    String.raw`\[(?<label>[^[\]\n]{1,500})\]\((?<target>[^\s()<>\0-\x1f]*(?:\([^\s()<>\0-\x1f]*\)[^\s()<>\0-\x1f]*)*)(?:[ ]+"[^"\n]*")?\)`,
    String.raw`(?<![\w/])(?<address>https?://[^\s<>"'\`|\0-\x1f]*[^\s<>"'\`|.,;:!?)\]*_~\0-\x1f])`,
  ].join("|"),
  "g",
);
const OPENER = /[*_~](?=\S|$)|[`[\\]/; // may begin one of these
const SAFE = new Set(["http:", "https:", "mailto:"]);

/** The nodes that a text without line structure stands for. */
function inline(text, depth = 0) {
  const nodes = [];
  let done = 0;
  for (const match of depth < DEPTH ? text.matchAll(INLINE) : []) {
    const node = inlineElement(match, depth);
    if (!node) continue;
    if (match.index > done) nodes.push(document.createTextNode(visible(text.slice(done, match.index))));
    nodes.push(node);
    done = match.index + match[0].length;
  }
  if (done < text.length) nodes.push(document.createTextNode(visible(text.slice(done))));
  return nodes;
}

function inlineElement({ groups: found }, depth) {
  const holding = (name, content) => {
    const element = make(name);
    element.append(...inline(content, depth + 1));
    return element;
  };
  if (found.escaped) return document.createTextNode(found.escaped);
  const code = found.code ?? found.code2;
  if (code !== undefined) return make("code", "", visibleCode(code));
  const strong = found.strong ?? found.strong2, em = found.em ?? found.em2;
  if (strong) return holding("strong", strong);
  if (em) return holding("em", em);
  if (found.struck) return holding("s", found.struck);
  return link(found.address ?? found.target, found.label ?? found.address);
}

/** A link to another site, or null where the address is none that is safe to follow. */
function link(address, label) {
  let url;
  try { url = new URL(address); } catch { return null; } // a relative one would lead to the server
  if (!SAFE.has(url.protocol)) return null;
  const anchor = make("a", "", visible(label));
  Object.assign(anchor, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
  return anchor;
}

// -- where the characters of a line go --------------------------------------------------------------------------------

/** A paragraph, a heading or an item. Only what may still become something else is read again when more comes. */
class Words {
  constructor(element) {
    this.element = element;
    this.text = ""; // behind the nodes that stay
    this.fixed = 0; // the number of these
    this.whole = "";
    this.lines = 1;
  }

  write(text) {
    this.text += text;
    this.whole += text;
  }

  flush() {
    let cut = settledUpTo(this.text);
    if (this.text.length - cut > SEGMENT) cut = Math.max(cut, this.text.lastIndexOf(" ") + 1 || this.text.length);
    if (cut) {
      this.#show(this.text.slice(0, cut));
      this.fixed = this.element.childNodes.length;
      this.text = this.text.slice(cut);
    }
    this.#show(this.text);
  }

  #show(text) {
    while (this.element.childNodes.length > this.fixed) this.element.lastChild.remove();
    this.element.append(...inline(text));
  }
}

/** Up to where a text means the same whatever comes behind it: the beginning of a word, before what may yet be closed. */
function settledUpTo(text) {
  let done = text.lastIndexOf("\n") + 1, settled = done; // nothing reaches over the end of a line
  const matches = [...text.matchAll(INLINE)].filter(({ index }) => index >= done);
  for (const { index, 0: { length } } of [...matches, { index: text.length, 0: "" }]) {
    const gap = text.slice(done, index), opener = gap.search(OPENER);
    const space = gap.slice(0, opener < 0 ? gap.length : opener).lastIndexOf(" ");
    if (space >= 0) settled = done + space + 1;
    if (opener >= 0) break;
    done = index + length;
  }
  return settled;
}

/** A block of code: its lines are added to, and never read again. */
class Code {
  constructor(fence, indent, language) {
    Object.assign(this, { fence, indent, lines: 0, text: "", fresh: "" });
    this.element = make("figure", "code");
    const bar = make("figcaption");
    bar.append(make("span", "language", language || "Code"), copyButton("Copy code", () => this.text + this.fresh));
    this.pre = make("pre");
    this.pre.tabIndex = 0; // it may have to be scrolled
    this.pre.setAttribute("role", "region");
    this.pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    this.pre.append(make("code"));
    this.element.append(bar, this.pre);
  }

  write(text) { this.fresh += text; }

  flush() {
    if (!this.fresh) return;
    addText(this.pre.firstChild, visibleCode(this.fresh));
    this.text += this.fresh;
    this.fresh = "";
  }
}

/** A row of a table. */
class Row {
  constructor(element, cell, aligns) {
    Object.assign(this, { element, cell, aligns, text: "" });
  }

  write(text) { this.text += text; }

  flush() {
    const texts = cells(this.text), wanted = this.aligns.length || texts.length;
    this.element.replaceChildren(...Array.from({ length: wanted }, (_, column) => {
      const made = make(this.cell, this.aligns[column] ?? "");
      made.append(...inline((texts[column] ?? "").slice(0, SEGMENT)));
      return made;
    }));
  }
}

const cells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

// -- the structure ----------------------------------------------------------------------------------------------------

const FENCE = /^( *)(`{3,}|~{3,}) *([^`\n]*)$/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)]) +(?=\S)/;
const HEADING = /^ {0,3}(#{1,6}) +(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const RULER = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/; // between the head of a table and its rows
/** Beginnings of a line that may still become another kind of line. */
const UNDECIDED = /^ *(?:[-*+_] *|\d{1,9}[.)]? *|#{1,6} *|> *|`{1,2}|`{3,}[^`]*|~{1,2}|~{3,}.*|([-*_])(?: *\1)* *|[|:\- ]*)?$/;

/** Writes Markdown into an element, piece by piece: `write` any text, then `flush` once for each frame. */
class Markdown {
  #rest = ""; // of the line, as long as it may become anything
  #open = null; // where the characters of the line go, once that is known
  #block = null; // what the next line may go on with: words, code or a table
  #lists = []; // the lists that are open, each in an item of the one before
  #blank = false; // whether an empty line came last
  #quote = null;
  #rows = null; // of the table, with how their cells are aligned
  #aligns = [];
  #dirty = new Set();

  constructor(target) {
    this.target = target;
    target.replaceChildren();
  }

  write(text) {
    const lines = text.replaceAll("\r\n", "\n").split("\n");
    lines.forEach((piece, index) => {
      if (index) this.#newline();
      if (piece) this.#piece(piece);
    });
  }

  /** The text ends here. */
  end() {
    if (this.#rest) this.#begin(this.#rest, true);
    this.flush();
  }

  flush() {
    for (const open of this.#dirty) open.flush();
    this.#dirty.clear();
  }

  #piece(piece) {
    if (this.#open) return this.#put(piece);
    this.#rest += piece;
    if (this.#settled(this.#rest)) this.#begin(this.#rest, false);
  }

  #newline() {
    if (!this.#open) this.#begin(this.#rest, true);
    this.#open = null;
  }

  #settled(line) {
    if (line.length > LONGEST_MARK) return true;
    if (this.#block instanceof Code) return !/^ *(?:`*|~*) *$/.test(line);
    if (this.#block instanceof Row && !line.includes("|")) return false;
    return !UNDECIDED.test(line);
  }

  /** Finds out what a line is; `whole`: no more of it comes. */
  #begin(line, whole) {
    this.#rest = "";
    if (this.#block instanceof Code) return this.#codeLine(line);
    if (!line.trim()) {
      this.#block = this.#quote = null;
      this.#blank = true;
      return undefined;
    }
    const indent = /^ */.exec(line)[0].length, fence = whole && FENCE.exec(line);
    if (fence) return this.#fence(fence, indent);
    if (whole && this.#isRuler(line)) return this.#table(line);
    if (this.#block instanceof Row && line.includes("|")) return this.#row(line, "td");
    if (whole && RULE.test(line)) {
      this.#leave(indent);
      this.#add(make("hr"));
      return this.#none();
    }
    for (const [kind, take] of [[ITEM, this.#item], [HEADING, this.#heading], [QUOTE, this.#quoted]]) {
      const match = kind.exec(line);
      if (match) return take.call(this, match, line.slice(match[0].length), indent);
    }
    return this.#words(line, indent);
  }

  #words(line, indent) {
    if (this.#block instanceof Words && !this.#blank) {
      this.#block.lines += 1;
      this.#open = this.#block;
      return this.#put(`\n${line.trimStart()}`);
    }
    if (this.#blank) this.#leave(indent);
    return this.#start(make("p"), line.trimStart());
  }

  #heading([, signs], text) {
    this.#leave(0);
    return this.#once(make(`h${Math.min(6, signs.length + 2)}`), text); // below the page's own
  }

  #quoted(_match, text) {
    this.#lists = [];
    if (!this.#quote) this.#target.append(this.#quote = dir(make("blockquote")));
    this.#blank = false;
    if (!text.trim()) { this.#block = null; return this.#none(); }
    if (this.#block instanceof Words && this.#block.element.parentNode === this.#quote) {
      this.#open = this.#block;
      return this.#put(`\n${text}`);
    }
    const paragraph = dir(make("p"));
    this.#quote.append(paragraph);
    return this.#into(new Words(paragraph), text);
  }

  #item([, , sign, number], text, indent) {
    this.#quote = null;
    while (this.#lists.length && indent < this.#lists.at(-1).indent) this.#lists.pop();
    const name = number === undefined ? "ul" : "ol";
    let list = this.#lists.at(-1);
    const deeper = !list || indent >= list.indent + 2;
    if (list && !deeper && list.element.localName !== name) {
      this.#lists.pop();
      list = null;
    }
    if (!list || deeper) {
      if (this.#lists.length >= 12) return this.#words(`${sign} ${text}`, indent);
      const element = make(name);
      if (number !== undefined && number !== "1") element.start = Number(number);
      this.#target.append(element);
      list = { element, indent, item: null };
      this.#lists.push(list);
    }
    list.item = dir(make("li"));
    list.element.append(list.item);
    this.#blank = false;
    return this.#into(new Words(list.item.appendChild(make("p"))), text);
  }

  #fence([, spaces, fence, language], indent) {
    if (this.#blank || indent === 0) this.#leave(indent);
    const code = new Code(fence, spaces.length, visible(language.trim().slice(0, 40)));
    this.#add(code.element);
    this.#block = code;
    return this.#none();
  }

  #codeLine(line) {
    const code = this.#block, bare = line.trim();
    if (bare.startsWith(code.fence) && bare === code.fence[0].repeat(bare.length)) {
      this.#block = null;
      return this.#none();
    }
    const begun = line.slice(Math.min(code.indent, /^ */.exec(line)[0].length));
    this.#open = code;
    this.#put(code.lines ? `\n${begun}` : begun);
    code.lines += 1;
    return undefined;
  }

  #isRuler(line) {
    const head = this.#block;
    if (!(head instanceof Words) || head.lines !== 1 || this.#blank || !RULER.test(line)) return false;
    return head.whole.includes("|") && cells(head.whole).length === cells(line).length;
  }

  #table(line) {
    const head = this.#block, text = head.whole;
    const aligns = cells(line).map((cell) => (/^:-+:$/.test(cell) ? "middle" : /-:$/.test(cell) ? "right" : "left"));
    const [box, table] = [make("div", "table"), make("table")];
    box.tabIndex = 0; // it may have to be scrolled
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
    head.element.replaceWith(box);
    this.#dirty.delete(head);
    box.append(table);
    this.#rows = table;
    this.#aligns = aligns;
    this.#row(text, "th");
    return this.#none();
  }

  #row(line, cell) {
    const element = make("tr");
    this.#rows.append(element);
    return this.#into(new Row(element, cell, this.#aligns), line);
  }

  /** A line that is not indented ends the lists behind whose items it stands. */
  #leave(indent) {
    this.#quote = null;
    while (this.#lists.length && indent < this.#lists.at(-1).indent + 2) this.#lists.pop();
  }

  get #target() { return this.#lists.at(-1)?.item ?? this.target; }

  #add(element) {
    this.#target.append(element);
    this.#block = this.#quote = null;
    this.#blank = false;
  }

  #start(element, text) {
    this.#add(dir(element));
    return this.#into(new Words(element), text);
  }

  /** A block of one line. */
  #once(element, text) {
    this.#start(element, text);
    this.#block = null;
  }

  #into(block, text) {
    this.#blank = false;
    this.#block = this.#open = block;
    return this.#put(text);
  }

  #none() {
    this.#open = { write() {}, flush() {} };
  }

  #put(text) {
    this.#open.write(text);
    this.#dirty.add(this.#open);
  }
}

/** Right to left where its own letters are. */
function dir(element) {
  element.dir = "auto";
  return element;
}

// -- copying ----------------------------------------------------------------------------------------------------------

function copyButton(name, text) {
  const button = make("button", "quiet", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not copied";
    announce(copied ? "Copied." : "The browser does not let the page copy.");
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

/** Whether a text is in the clipboard now. Browsers have the modern way on safe origins alone. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* the old way, then */ }
  const area = make("textarea", "unseen"), focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

// Markdown that grows, as elements: blocks that are complete are forgotten, and of the others only what changes is drawn anew.

const WORDS = /[^]{1,6000}$|[^]{1,6000}(?<=\s)|[^]{1,6000}/gu; // pieces of a long paragraph, which are read and laid out each on its own
const MARKS = 12; // bold text, links and the like in each other
const ROWS = 300; // of a table, which goes on in another one: a browser lays out a whole table anew whenever it grows
const OFTEN = { length: 4000, share: 128 }; // a longer text is drawn when this share of the rest is new, so that the time for all is linear

/** Beginnings of a line that may still become another kind of line. */
const UNDECIDED = /^(?:[\s\d>*+_=#~`|:.)([\]$\\-]{0,500}[xX]?|\s*(?:`{3,}|~{3,}).*|.*\r)$/;

/** Writes Markdown into an element piece by piece: `write` any text, then `flush` once a frame. */
class Markdown {
  #text = ""; // from the last block on
  #drawn = 0; // its characters that are drawn
  #blocks = [];
  #room = { elements: FORMULAS.all, milliseconds: COLOURS.all }; // what its formulas and the colours of its code may take yet

  constructor(target) {
    this.target = target;
    target.replaceChildren();
  }

  write(text) { this.#text = (this.#text + text).replaceAll("\r\n", "\n"); }

  flush() {
    const { length } = this.#text, lastLine = this.#text.lastIndexOf("\n") + 1;
    if (OFTEN.share * (length - this.#drawn) < length - OFTEN.length) return;
    this.#draw(UNDECIDED.test(this.#text.slice(lastLine)) ? this.#text.slice(0, lastLine) : this.#text);
  }

  /** Ends the text. */
  end() {
    this.#draw(this.#text);
    for (const block of this.#blocks) block.complete();
  }

  #draw(text) {
    const nodes = treeOf(parse(parser.block, text)), lines = text.split("\n");
    drawNodes(this.target, this.#blocks, nodes, this.#room);
    const last = nodes.findLastIndex(({ line }) => line + 2 < lines.length); // what its first two lines begin
    const from = last > 0 ? lines.slice(0, nodes[last].line).join("\n").length + 1 : 0;
    if (from) for (const block of this.#blocks.splice(0, last)) block.complete();
    this.#text = this.#text.slice(from);
    this.#drawn = text.length - from;
  }
}

/** The nodes of a list of tokens: { key, token, line, text, children, … }. Blocks with one key may stay when their text changes. */
function treeOf(tokens) {
  const root = { children: [] }, open = [root];
  for (const token of tokens) {
    const { type, tag, info, attrs, content, nesting, map } = token, parent = open.at(-1);
    if (tag === "thead" || tag === "tbody") continue;
    if (type === "inline") addWords(open, content);
    else if (nesting < 0) open.pop();
    else {
      const node = { key: `${type} ${tag} ${info} ${attrs ?? ""}`, token, line: map?.[0], children: [] };
      if (!nesting && tag === "code") Object.assign(node, { text: content.replace(/\n$/, ""), isComplete: isClosed(token) });
      (type === "tr_open" ? rowsOf(parent) : parent).children.push(node);
      if (nesting) open.push(node);
    }
  }
  return root.children;
}

/** Gives the last open node its words; a note and an item of a task begin with a mark. */
function addWords(open, content) {
  const node = open.at(-1), around = open.at(-2);
  node.text = content;
  if (node.token.tag !== "p" || !content.startsWith("[")) return;
  node.note = NOTE.exec(content);
  node.task = around.token?.tag === "li" && around.children.length === 1 ? TASK.exec(content) : null;
  const [mark] = node.note ?? node.task ?? [""];
  node.key += mark;
  node.text = content.slice(mark.length);
}

/** The part of a table that gets its next row. */
function rowsOf({ children }) {
  if (!(children.at(-1)?.children.length < ROWS)) children.push({ key: "rows", token: { tag: "table" }, children: [] });
  return children.at(-1);
}

/** Whether a block of code has a line that ends it. */
function isClosed({ type, content, map: [from, to] }) {
  const lines = content.split("\n").length - (content.endsWith("\n") || !content);
  return type === "code_block" || to - from === lines + 2;
}

/** Has an element show nodes as blocks. Those in `blocks`, which it shows already, stay as long as they have the same keys. */
function drawNodes(element, blocks, nodes, room) {
  nodes.forEach((node, place) => {
    if (!blocks[place]?.mayBecome(node)) {
      for (const block of blocks.splice(place)) block.remove();
      blocks.push(new Block(node, room));
      element.append(blocks[place].element);
    }
    blocks[place].draw(node);
  });
  for (const block of blocks.splice(nodes.length)) block.remove();
}

/** A block that is drawn: an element with words, with blocks in it, or with code. */
class Block {
  blocks = [];
  pieces = []; // of its words: { text, element, nodes, elements }

  constructor(node, room) {
    const { key, token, text } = node;
    this.code = token.tag === "code" ? new Code(visible(token.info.trim().slice(0, 40)), room) : null;
    Object.assign(this, { key, room, element: this.code?.element ?? elementOf(node) });
  }

  mayBecome({ key, text }) { return key === this.key && (!this.code || text.startsWith(this.code.text)); }

  draw({ text, children, isComplete }) {
    if (this.code) this.code.grow(text);
    else if (text !== undefined) this.#write(text);
    if (isComplete) this.complete();
    drawNodes(this.element, this.blocks, children, this.room);
  }

  /** Colours the code in it; nothing is added to it. */
  complete() {
    this.code?.complete();
    for (const block of this.blocks) block.complete();
  }

  remove() {
    this.element.remove();
    this.#release();
  }

  #release() {
    for (const { elements } of this.pieces) this.room.elements += elements;
    for (const block of this.blocks) block.#release();
  }

  #write(text) {
    if (text === this.text) return;
    this.text = text;
    direct(this.element, text);
    const texts = text.match(WORDS) ?? [], { element, pieces, room } = this;
    for (let place = 0; place < Math.max(texts.length, pieces.length); place += 1) {
      const words = texts[place] ?? "", piece = pieces[place] ??= { text: "", element: place ? element.appendChild(make("span", "part")) : element, nodes: [], elements: 0 };
      if (words === piece.text) continue;
      room.elements += piece.elements;
      const before = room.elements, nodes = renew(piece.element, piece.nodes, nodesOf(words, room));
      Object.assign(piece, { text: words, nodes, elements: before - room.elements });
    }
  }
}

/** An element for a node, without its words and blocks. */
function elementOf({ token, note, task }) {
  const { type, tag } = token;
  if (type === "table_open") return region("div", "table", "", "Table");
  if (type === "heading_open") return make(`h${Math.min(6, Number(tag[1]) + 2)}`); // below the levels of the page's own headings
  const element = make(tag, { "text-align:center": "middle", "text-align:right": "right" }[token.attrGet?.("style")]);
  if (type === "ordered_list_open") element.start = token.attrGet("start") ?? 1;
  if (task) element.append(Object.assign(make("input", "", "", "Done"), { type: "checkbox", disabled: true, checked: task[1] !== " " }));
  if (note) {
    Object.assign(element, { className: "footnote" }).dataset.note = note[1];
    element.append(make("sup", "", note[1]));
  }
  return element;
}

/** The nodes of words: text, and elements for marks. */
function nodesOf(text, room) {
  const root = make("span"), open = [root];
  let words = ""; // up to the next element
  const add = (...nodes) => {
    if (words) open.at(-1).append(visible(words));
    words = "";
    open.at(-1).append(...nodes);
  };
  for (const token of parse(parser.inline, text)) {
    const { type, tag, content, nesting } = token, element = markOf(token, room, open.at(-1));
    if (nesting < 0) {
      add();
      const ended = open.pop();
      if (tag === "a" && !ended.firstChild) ended.textContent = visible(ended.title);
    } else if (element && open.length <= MARKS) {
      add(element);
      if (nesting) open.push(element);
    } else if (nesting) {
      add();
      open.push(open.at(-1));
    } else words += type === "softbreak" || type === "hardbreak" ? "\n" : content;
  }
  add();
  return [...root.childNodes];
}

/** The element of a token of words; null if it is text. */
function markOf(token, room, parent) {
  const { type, tag, content, nesting } = token;
  if (type === "maths") return formula(visible(content.trimEnd()), room);
  if (type === "code_inline") return make("code", "", visibleCode(content));
  if (type === "note") return put(make("sup"), button(content, showNote, "note", `Footnote ${content}`));
  if (type === "image") return parent.closest("a") ? null : put(link(token.attrGet("src")), visible(content || token.attrGet("src"))); // the page loads nothing
  if (type === "link_open") return link(token.attrGet("href"));
  return nesting > 0 ? make(tag) : null;
}

/** A link to another site. */
function link(address) {
  const { href } = new URL(address);
  return Object.assign(make("a"), { href, title: href, target: "_blank", rel: "noopener noreferrer" });
}

/** Scrolls to the note that a number in the text stands for. */
function showNote({ target }) {
  target.closest(".text").querySelector(`[data-note="${target.textContent}"]`)?.scrollIntoView({ block: "nearest" });
}

/** Replaces nodes of an element, and returns those that are there then. What is the same at the beginning stays, and with it what somebody has selected. */
function renew(element, old, nodes) {
  const next = old.at(-1)?.nextSibling ?? null;
  let same = 0;
  while (same < nodes.length && old[same]?.isEqualNode(nodes[same])) same += 1;
  const [before, now] = [old[same], nodes[same]], grows = before?.nodeType === Node.TEXT_NODE && now?.nodeType === Node.TEXT_NODE && now.data.startsWith(before.data);
  if (grows) before.appendData(now.data.slice(before.length));
  const kept = old.slice(0, same + grows), added = nodes.slice(kept.length);
  for (const node of old.slice(kept.length)) node.remove();
  for (const node of added) element.insertBefore(node, next);
  return [...kept, ...added];
}

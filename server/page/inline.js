// Markdown inside a paragraph: emphasis, code, links, mathematics. The time is linear in the text, whatever its marks are.

const DEPTH = 6; // levels of nested emphasis
const REACH = 2000; // characters in which a mark has to end; one that does not is text

const TARGET = String.raw`[^\s()<>\0-\x1f]*(?:\([^\s()<>\0-\x1f]*\)[^\s()<>\0-\x1f]*)*`;
const LINK = new RegExp(String.raw`!?\[([^[\]\n]{0,500})\]\((${TARGET})(?: +"[^"\n]*")?\)`, "y"); // an image is a link: the page loads nothing
const HALF_LINK = new RegExp(String.raw`!?(?:\[(?:[^[\]\n]{0,500}(?:\](?:\(${TARGET}(?:\([^\s()<>\0-\x1f]*)?(?: +(?:"[^"\n]*"?)?)?)?)?)?)?$`, "y");
const NO_ADDRESS = /[\s<>"'`|\0-\x1f]/g, ADDRESS = /https?:\/\/[^\s<>"'`|\0-\x1f]*[^\s<>"'`|.,;:!?)\]*_~\0-\x1f]/y;
const NOTE_MARK = /\[\^(\d{1,3})\]/y, ESCAPED = /\\[\\`*_{}#+.!|~<>$-]/y;
const BEGINNING = /[*_~$]|`+|\\|!?\[|(?<![\w/])https?:\/\//g; // of what may be a mark
const SAFE = new Set(["http:", "https:", "mailto:"]);

/**
 * Marks with a beginning and an end, by the sign that they begin with, in the order in which they are tried. `ends` finds
 * the end, or what no such mark has inside; `holds` is what an end has to match. A formula of several lines begins a line.
 */
const PAIRS = {
  $: [
    { begins: /(?<=^|\n)\$\$(?!\$)/y, ends: /\$\$/g, holds: /\$\$(?!\$)/y, width: 2, maths: true, displayed: true, reach: FORMULAS.longest },
    { begins: /(?<!\$)\$\$(?![$\n])/y, ends: /[$\n]/g, holds: /\$\$(?!\$)/y, width: 2, maths: true, displayed: true },
    { begins: /(?<![\w$])\$(?![\s$`])/y, ends: /\n|[$`](?<=(?<!\\)(?:\\\\)*.)/g, holds: /(?<!\s)\$(?![\d$])/y, width: 1, maths: true }, // no two prices
  ],
  "\\": [
    { begins: /(?<=^|\n)\\\[/y, ends: /\\\]/g, width: 2, maths: true, displayed: true, reach: FORMULAS.longest },
    { begins: /\\\[(?!\n)/y, ends: /\\\]|\n/g, width: 2, maths: true, displayed: true },
    { begins: /\\\((?!\n)/y, ends: /\\\)|\n/g, width: 2, maths: true },
  ],
  "`": [
    { begins: /(?<!`)``(?![`\n])/y, ends: /(?<!`)``(?!`)|\n/g, width: 2, name: "code" },
    { begins: /(?<!`)`(?![`\n])/y, ends: /(?<!`)`(?!`)|\n/g, width: 1, name: "code" },
  ],
  "*": [
    { begins: /\*\*(?=\S)/y, ends: /(?<=\S)\*\*|\n/g, width: 2, name: "strong" },
    { begins: /(?<![\w*])\*(?![\s*])/y, ends: /[*\n]/g, holds: /(?<!\s)\*(?![\w*])/y, width: 1, name: "em" },
  ],
  _: [
    { begins: /(?<!\w)__(?=\S)/y, ends: /(?<=\S)__(?!\w)|\n/g, width: 2, name: "strong" },
    { begins: /(?<!\w)_(?![\s_])/y, ends: /[_\n]/g, holds: /(?<!\s)_(?!\w)/y, width: 1, name: "em" },
  ],
  "~": [{ begins: /~~(?=\S)/y, ends: /(?<=\S)~~|\n/g, width: 2, name: "s" }],
};

/** What a regular expression matches at a place of a text, or from there on if it is not sticky. */
const matchAt = (expression, text, place) => Object.assign(expression, { lastIndex: place }).exec(text);

/**
 * The marks of a text from a place on, in order: { index, end, … }, where `end` is the place after the mark. `settled` is
 * the length of the beginning that later text cannot change.
 */
function read(text, from = 0) {
  const marks = [], endPlaces = new Map(), all = text.length;
  let undecided = all; // the first place about which later text decides
  const later = (place) => { undecided = Math.min(undecided, place); };

  /** The first place with one of the `ends`, from a place on. Where a search has ended, the next one begins: together they read the text once. */
  const endOf = (ends, place) => {
    if (!(endPlaces.get(ends) >= place)) endPlaces.set(ends, matchAt(ends, text, place)?.index ?? all);
    return endPlaces.get(ends);
  };

  const pairAt = (index, pair) => {
    const { begins, ends, holds, width, reach = REACH } = pair;
    if (!matchAt(begins, text, index)) return null;
    const end = endOf(ends, index + width + 1), far = end - index > reach;
    if (end + width >= all && !far) later(index); // also if half of the end is there
    if (end === all || far || text[end] === "\n" || (holds && !matchAt(holds, text, end))) return null;
    const after = end + width + (pair.displayed && text[end + width] === "\n" ? 1 : 0);
    return { index, end: after, content: text.slice(index + width, end), pair };
  };

  const linkAt = (index) => {
    const note = matchAt(NOTE_MARK, text, index), link = note ?? matchAt(LINK, text, index);
    if (!link && all - index <= REACH && matchAt(HALF_LINK, text, index)) later(index);
    if (!link || link[0].length > REACH) return null;
    return { index, end: index + link[0].length, ...(note ? { note: note[1] } : { label: link[1], target: link[2] }) };
  };

  const addressAt = (index) => {
    const end = endOf(NO_ADDRESS, index);
    if (end - index > REACH) return null;
    if (end === all) later(index);
    const address = matchAt(ADDRESS, text, index)?.[0];
    return address ? { index, end: index + address.length, target: address, label: address } : null;
  };

  const markAt = (index, sign) => {
    if (sign.length > 2 && sign[0] === "`") return null;
    if (index + sign.length === all) later(index);
    if (sign[0] === "h") return addressAt(index);
    if (sign.endsWith("[")) return linkAt(index);
    for (const pair of PAIRS[sign[0]]) {
      const mark = pairAt(index, pair);
      if (mark) return mark;
    }
    return sign === "\\" && matchAt(ESCAPED, text, index) ? { index, end: index + 2, escaped: text[index + 1] } : null;
  };

  for (let at = from, match; (match = matchAt(BEGINNING, text, at)); ) {
    const [sign] = match, mark = markAt(match.index, sign);
    if (mark) marks.push(mark);
    at = mark ? mark.end : match.index + (sign === "![" ? 1 : sign.length);
  }
  return { marks, settled: settledUpTo(text, from, marks, undecided) };
}

/** The place up to which nodes may be fixed: after a mark, after a space, or in a word that is longer than any mark. */
function settledUpTo(text, from, marks, undecided) {
  const last = marks.findLast(({ end }) => end < text.length && end <= undecided), settled = last?.end ?? from;
  const end = Math.min(undecided, marks.find(({ index }) => index >= settled)?.index ?? undecided);
  const word = 1 + Math.max(text.lastIndexOf(" ", end - 1), text.lastIndexOf("\n", end - 1));
  if (word > settled) return word;
  if (end - settled <= REACH) return settled;
  const cut = end - REACH / 2;
  return /[\udc00-\udfff]/.test(text[cut]) ? cut - 1 : cut; // no character is cut
}

/** The nodes of a text between two places, by its marks. */
function nodesOf(text, marks, from, to, room, depth = 0) {
  const nodes = [];
  let done = from, words = ""; // up to the next element
  const addText = () => {
    for (const piece of visible(words).match(/[^]{1,2000}(?<=\s)|[^]{1,2000}/gu) ?? []) nodes.push(document.createTextNode(piece));
    words = "";
  };
  for (const mark of marks) {
    if (mark.index < from || mark.end > to) continue;
    words += text.slice(done, mark.index);
    done = mark.end;
    const element = elementOf(mark, text, room, depth);
    if (typeof element === "string") words += element;
    else {
      addText();
      nodes.push(element);
    }
  }
  words += text.slice(done, to);
  addText();
  return nodes;
}

/** The nodes of a text without block structure. */
const inline = (text, room, depth = 0) => nodesOf(text, depth < DEPTH ? read(text).marks : [], 0, text.length, room, depth);

/** The element of a mark, or a text in place of one. */
function elementOf({ index, end, pair, content, escaped, note, label, target }, text, room, depth) {
  const { maths, name } = pair ?? {};
  if (maths) return formula(visible(text.slice(index, end).trimEnd()), room) ?? text.slice(index, end);
  if (escaped) return escaped;
  if (name === "code") return make("code", "", visibleCode(content));
  if (name) return put(make(name), ...inline(content, room, depth + 1));
  if (note) return put(make("sup"), button(note, showNote, "note", `Footnote ${note}`));
  return link(target, label || target) ?? text.slice(index, end);
}

/** A link to another site; null if the address is not safe to follow. */
function link(address, label) {
  let url;
  try { url = new URL(address); } catch { return null; } // a relative address would lead to this server
  if (!SAFE.has(url.protocol)) return null;
  const anchor = make("a", "", visible(label));
  Object.assign(anchor, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
  return anchor;
}

/** Scrolls to the note that a number in the text stands for. */
function showNote({ target }) {
  target.closest(".text").querySelector(`[data-note="${target.textContent}"]`)?.scrollIntoView({ block: "nearest" });
}

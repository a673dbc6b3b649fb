// Markdown inside a paragraph: emphasis, code, links, mathematics.

const DEPTH = 6; // levels of nested emphasis

const INLINE = new RegExp(
  [
    String.raw`(?<maths>(?:(?<=^|\n)(?:\$\$(?!\$)(?:(?!\$\$)[^])+\$\$(?!\$)|\\\[(?:(?!\\\])[^])+\\\])`, // the only mark of several lines
    String.raw`(?<!\$)\$\$(?!\$)[^$\n]+\$\$(?!\$)|\\\[[^\n]+?\\\])\n?`,
    String.raw`\\\([^\n]+?\\\)`,
    String.raw`(?<![\w$])\$(?![\s$])(?:\\.|[^$\\\`\n])+(?<!\s)\$(?![\d$]))`, // no two prices
    String.raw`\\(?<escaped>[\\\`*_{}#+.!|~<>$-])`,
    "``(?<code2>[^\\n]*?[^\\n`])``(?!`)",
    "(?<!`)`(?<code>[^`\\n]+)`(?!`)",
    String.raw`\*\*(?<strong>(?=\S)[^\n]*?\S)\*\*`,
    String.raw`(?<!\w)__(?<strong2>(?=\S)[^\n]*?\S)__(?!\w)`,
    String.raw`~~(?<struck>(?=\S)[^\n]*?\S)~~`,
    String.raw`(?<![\w*])\*(?<em>(?![\s*])[^*\n]*[^*\s])\*(?![\w*])`,
    String.raw`(?<!\w)_(?<em2>(?![\s_])[^_\n]*[^_\s])_(?!\w)`,
    String.raw`\[\^(?<note>\d{1,3})\]`,
    String.raw`\[(?<label>[^[\]\n]{1,500})\]\((?<target>[^\s()<>\0-\x1f]*(?:\([^\s()<>\0-\x1f]*\)[^\s()<>\0-\x1f]*)*)(?:[ ]+"[^"\n]*")?\)`,
    String.raw`(?<![\w/])(?<address>https?://[^\s<>"'\`|\0-\x1f]*[^\s<>"'\`|.,;:!?)\]*_~\0-\x1f])`,
  ].join("|"),
  "g",
);
const OPENER = /[*_~$](?=\S|$)|[`[\\]/; // may begin a match of INLINE
const DISPLAYED = /(?<=^|\n)(?:\$\$(?!\$)(?:(?!\$\$)[^])*(\$\$)?|\\\[(?:(?!\\\])[^])*(\\\])?)/g; // a formula that a later line may close
const SAFE = new Set(["http:", "https:", "mailto:"]);

/** The nodes of a text without block structure. */
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

function inlineElement({ groups }, depth) {
  const holding = (name, content) => put(make(name), ...inline(content, depth + 1));
  if (groups.maths) return formula(visible(groups.maths.trimEnd()));
  if (groups.escaped) return document.createTextNode(groups.escaped);
  const code = groups.code ?? groups.code2;
  if (code !== undefined) return make("code", "", visibleCode(code));
  const strong = groups.strong ?? groups.strong2, em = groups.em ?? groups.em2;
  if (strong) return holding("strong", strong);
  if (em) return holding("em", em);
  if (groups.struck) return holding("s", groups.struck);
  if (groups.note) return put(make("sup"), button(groups.note, showNote, "note", `Footnote ${groups.note}`));
  return link(groups.address ?? groups.target, groups.label ?? groups.address);
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

/** Where a formula begins that a later line may close; -1 if there is none. */
function openedAt(text) {
  const last = [...text.matchAll(DISPLAYED)].at(-1);
  return last && !last[1] && !last[2] ? last.index : -1;
}

/** The length of the text's beginning that later text cannot change: up to a word, before any mark that is not closed. */
function settledUpTo(text) {
  const opened = openedAt(text), line = text.lastIndexOf("\n") + 1;
  if (opened >= 0) return opened;
  const matches = [...text.matchAll(INLINE)].filter(({ index, 0: { length } }) => index + length > line);
  let done = Math.min(line, matches[0]?.index ?? line), settled = done;
  for (const { index, 0: { length } } of [...matches, { index: text.length, 0: "" }]) {
    const gap = text.slice(done, index), opener = gap.search(OPENER);
    const space = gap.slice(0, opener < 0 ? gap.length : opener).lastIndexOf(" ");
    if (space >= 0) settled = done + space; // what is left shows that it does not begin a line
    if (opener >= 0) break;
    done = index + length;
  }
  return settled;
}

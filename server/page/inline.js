// Markdown inside a line: emphasis, code, links.

const DEPTH = 6; // levels of nested emphasis

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
const OPENER = /[*_~](?=\S|$)|[`[\\]/; // may begin a match of INLINE
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
  if (groups.escaped) return document.createTextNode(groups.escaped);
  const code = groups.code ?? groups.code2;
  if (code !== undefined) return make("code", "", visibleCode(code));
  const strong = groups.strong ?? groups.strong2, em = groups.em ?? groups.em2;
  if (strong) return holding("strong", strong);
  if (em) return holding("em", em);
  if (groups.struck) return holding("s", groups.struck);
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

/** The length of the text's beginning that later text cannot change: up to a word, before any mark that is not closed. */
function settledUpTo(text) {
  let done = text.lastIndexOf("\n") + 1, settled = done; // no mark spans the end of a line
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

// Formulas: KaTeX draws them, and their sources are what is copied and spoken.

const formulas = new Map(); // source → element: text that is still growing is read again, its formulas are not
const FORMULAS = { kept: 300, depth: 160 }; // elements, and elements in each other: a browser's layout is recursive

/** The element of a formula, or a text if it cannot be drawn, by its source with delimiters. */
function formula(source) {
  if (!formulas.has(source)) {
    if (formulas.size === FORMULAS.kept) formulas.clear();
    formulas.set(source, drawFormula(source));
  }
  return formulas.get(source).cloneNode(true);
}

function drawFormula(source) {
  const displayMode = /^(\$\$|\\\[)/.test(source), cut = /^\$[^$]/.test(source) ? 1 : 2, drawn = make("span");
  const options = { displayMode, throwOnError: false, errorColor: "var(--alarm)", trust: false, strict: false, maxSize: 50, maxExpand: 1000 };
  try { katex.render(source.slice(cut, -cut), drawn, options); } catch { return document.createTextNode(source); } // KaTeX is recursive, too
  let depth = 0;
  for (let level = [drawn]; level.length && depth <= FORMULAS.depth; depth += 1) level = level.flatMap(({ children }) => [...children]);
  if (depth > FORMULAS.depth || drawn.firstChild.className === "katex-error") return document.createTextNode(source);
  const made = displayMode ? region("span", "maths display", "", "Formula") : make("span", "maths");
  return put(made, make("span", "source", source), drawn);
}

/** What `read` returns while formulas show their sources. */
function withSources(read) {
  document.body.classList.add("sources");
  try { return read(); } finally { document.body.classList.remove("sources"); }
}

document.addEventListener("copy", (event) => {
  const selection = getSelection();
  if (selection.isCollapsed) return;
  const range = selection.getRangeAt(0), around = (node) => (node.closest ? node : node.parentElement).closest(".maths");
  const first = around(range.startContainer), last = around(range.endContainer); // a part of a formula has no source
  if (first) range.setStartBefore(first);
  if (last) range.setEndAfter(last);
  if (!range.cloneContents().querySelector(".maths")) return;
  event.clipboardData.setData("text/plain", withSources(() => selection.toString()));
  event.preventDefault();
});

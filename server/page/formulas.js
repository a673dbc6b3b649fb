// Formulas: KaTeX draws them, within bounds, and their sources are what is copied and spoken.

/**
 * Bounds of a formula: characters, elements, the height of its lines in em, and elements in each other (a browser's layout
 * is recursive); and `all`, the elements of an answer's formulas. What exceeds them is shown as it was written.
 */
const FORMULAS = { longest: 5000, elements: 8000, tall: 150, depth: 160, all: 30_000, kept: 300 };
const DEFINES = /\\(?:[a-zA-Z]*@|(?:[egx]?def|let|futurelet|(?:new|renew|provide)command)(?![a-zA-Z]))/; // with it, a few characters draw any number of others
const formulas = new Map(); // source → { element, elements }: text that is still growing is read again, its formulas are not

/** The element of a formula by its source with delimiters; null if it is not drawn. `room` loses the elements. */
function formula(source, room) {
  if (room.elements <= 0 || source.length > FORMULAS.longest || DEFINES.test(source)) return null;
  if (!formulas.has(source)) {
    if (formulas.size === FORMULAS.kept) formulas.clear();
    formulas.set(source, drawFormula(source));
  }
  const { element, elements } = formulas.get(source);
  room.elements -= elements;
  return element && element.cloneNode(true);
}

function drawFormula(source) {
  const displayMode = /^(\$\$|\\\[)/.test(source), cut = /^\$[^$]/.test(source) ? 1 : 2, drawing = make("span");
  const options = { displayMode, throwOnError: false, errorColor: "var(--alarm)", trust: false, strict: false, maxSize: 20, maxExpand: 1000 };
  try { katex.render(source.slice(cut, -cut), drawing, options); } catch { return { element: null, elements: FORMULAS.longest }; } // KaTeX is recursive, too
  const elements = drawing.getElementsByTagName("*").length;
  if (elements > FORMULAS.elements || depthOf(drawing) > FORMULAS.depth || heightOfLines(drawing) > FORMULAS.tall || drawing.firstChild.className === "katex-error") {
    return { element: null, elements };
  }
  const element = displayMode ? region("span", "maths display", "", "Formula") : make("span", "maths");
  return { element: put(element, make("span", "source", source), drawing), elements: elements + 3 };
}

function depthOf(element) {
  let depth = 0;
  for (let level = [element]; level.length && depth <= FORMULAS.depth; depth += 1) level = level.flatMap(({ children }) => [...children]);
  return depth;
}

/** The height of a formula's lines together, in em. */
function heightOfLines(drawing) {
  let all = 0, line = 0;
  for (const part of drawing.querySelectorAll(".katex-strut, .katex-newline")) {
    line = Math.max(line, Number.parseFloat(part.style.height) || 0);
    if (!part.matches(".katex-newline")) continue;
    all += line;
    line = 0;
  }
  return all + line;
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

// Elements and their texts. What a model writes is never HTML: every character ends up in a text node.

/**
 * Invisible characters, and characters that reorder text, are shown as signs. A circle goes between marks on one letter
 * that no language has in such numbers: browsers take quadratic time to place them.
 */
const CONTROLS = /[\0-\x08\x0b-\x1f\x7f]/g, REORDERING = /[\u202a-\u202e\u2066-\u2069]/g;
const STACKED = /[\p{M}\p{Emoji_Modifier}\u0e33\u0eb3]{10}(?=[\p{M}\p{Emoji_Modifier}\u0e33\u0eb3])/gu, STACK = 20; // characters in which such a run is seen
const visible = (text) => text.replace(CONTROLS, (sign) => String.fromCharCode(sign === "\x7f" ? 0x2421 : 0x2400 + sign.charCodeAt())).replace(STACKED, "$&\u25cc");
const visibleCode = (text) =>
  visible(text).replace(REORDERING, (sign) => `⟨U+${sign.charCodeAt().toString(16).toUpperCase()}⟩`);

/** An element with a text; `label` is its name for screen readers, if that is not the text. */
function make(name, className = "", text = "", label = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  if (label) element.setAttribute("aria-label", label);
  return element;
}

/** Appends children to an element, and returns it. */
function put(element, ...children) {
  element.append(...children);
  return element;
}

function button(name, does, className = "quiet act", label = "") {
  const element = Object.assign(make("button", className, name, label), { type: "button" });
  element.addEventListener("click", does);
  return element;
}

/** An element that the keyboard can scroll. */
function region(name, className, text, label) {
  const element = make(name, className, text, label);
  element.tabIndex = 0;
  element.setAttribute("role", "region");
  return element;
}

const option = (value, text = "") => Object.assign(make("option", "", text), { value });

/** Sets the text of an element unless it has that text: a screen reader would read it again. */
const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };

const nameOf = (element) => element.getAttribute("aria-label") ?? element.textContent;

/** Replaces the children of an element. If an old child had the focus, the new child with the same name gets it. */
function redraw(element, children, other = () => null) {
  const keyOf = (child) => child.id || child.dataset.does || nameOf(child), at = document.activeElement;
  const key = element.contains(at) && at !== element && keyOf(at);
  element.replaceChildren(...children);
  if (!key) return;
  const same = [...element.querySelectorAll("button, input, summary")].find((child) => keyOf(child) === key);
  (same ?? other())?.focus({ preventScroll: true });
}

/** Has a form do something in place of being sent. */
const onSubmit = (form, does) => form.addEventListener("submit", (event) => { event.preventDefault(); does(); });

/** Has the Escape key do something in an element, and nothing outside it. */
function onEscape(element, does, holds = () => true) {
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing || !holds()) return;
    event.stopPropagation();
    does();
  });
}

/** Shows a button as a sign. Its text becomes its name, for screen readers. */
function sign(button, name) {
  const [drawing, use] = ["svg", "use"].map((element) => document.createElementNS("http://www.w3.org/2000/svg", element));
  drawing.setAttribute("class", "sign");
  drawing.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#sign-${name}`);
  drawing.append(use);
  button.classList.add("signed");
  button.title = button.textContent;
  button.replaceChildren(drawing, make("span", "unseen", button.textContent));
  return button;
}

const PART = 4000; // characters after which the content of an element goes on in a block, and the most of a text node
const NODE = 20; // characters that a node counts for beside its text

/** The content of an element that grows, in blocks of about PART characters: a browser lays out a whole block anew whenever it grows. */
class Parts {
  /** ends: the signs after which a block may end; after `most` characters it ends anywhere. */
  constructor(element, ends = " \n", most = 2 * PART) {
    Object.assign(this, { element, ends, most, last: element, size: 0 });
  }

  add(nodes) {
    let fragment = new DocumentFragment();
    for (const node of nodes) {
      if (this.#isFull(fragment.lastChild ?? this.last.lastChild)) {
        this.last.append(fragment);
        this.last = this.element.appendChild(make("span", "part"));
        this.size = 0;
      }
      this.size += node.textContent.length + NODE;
      fragment.append(node);
    }
    this.last.append(fragment);
  }

  /** Adds a text, to the last node if that is a short text. */
  addText(text) {
    for (const piece of this.#shown(text).match(/[^]{1,4000}(?<=\n)|[^]{1,4000}/gu) ?? []) {
      const { lastChild } = this.last;
      if (!(lastChild?.length < PART) || this.#isFull(lastChild)) this.add([document.createTextNode(piece)]);
      else {
        lastChild.appendData(piece);
        this.size += piece.length;
      }
    }
  }

  #isFull(node) { return this.size > PART && (this.ends.includes(node.textContent.at(-1)) || this.size > this.most); }

  /** A text as `visible` shows it behind the text that is there. */
  #shown(text) {
    const { lastChild } = this.last, before = lastChild?.nodeType === Node.TEXT_NODE ? lastChild.data.slice(-STACK) : "";
    return visible(before + text).slice(before.length);
  }
}

/** Has the browser set the direction of an element by its own letters, and returns it. */
const dir = (element) => Object.assign(element, { dir: "auto" });

const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/** Sets the direction of an element that grows, and of the item or the quote that it begins, by the first letter: the browser would look for it anew with each node. */
function direct(element, text) {
  const letter = !element.dir && /\p{L}/u.exec(text);
  if (!letter) return;
  element.dir = RIGHT_TO_LEFT.test(letter[0]) ? "rtl" : "ltr";
  const around = element.parentElement;
  if (around?.matches("li, blockquote")) around.dir ||= element.dir;
}

/** A button that copies what `text` returns; with `signed`, it shows a sign, not a word. */
function copyButton(name, text, signed = false) {
  const show = (word, drawing) => {
    element.textContent = word;
    if (signed) sign(element, drawing);
  };
  const element = button("Copy", async () => {
    const isCopied = await copy(text());
    show(isCopied ? "Copied" : "Not copied", isCopied ? "done" : "failed");
    announce(isCopied ? "Copied." : "The browser does not let the page copy.");
    setTimeout(show, 2000, "Copy", "copy");
  }, "quiet", name);
  show("Copy", "copy");
  return element;
}

/** Copies a text to the clipboard, and returns whether it could. Browsers have `navigator.clipboard` on safe origins only. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* the older command follows */ }
  const area = Object.assign(make("textarea", "unseen"), { value: text }), focus = document.activeElement;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focus?.focus();
  return isCopied;
}

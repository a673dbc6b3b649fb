"use strict";

// Elements and their texts. What a model writes is never HTML: every character ends up in a text node.

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

/** Shows a button as a sign. Its text is its name, for those who do not see the sign. */
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

/** Adds to the text of an element; in several nodes, since a node is shaped as a whole whenever it grows. */
function addText(element, text) {
  for (const part of text.match(/[^]{1,8000}/gu) ?? []) {
    const last = element.lastChild;
    if (last?.length < 8000) last.appendData(part);
    else element.append(part);
  }
}

/** Right to left where its own letters are. */
function dir(element) {
  element.dir = "auto";
  return element;
}

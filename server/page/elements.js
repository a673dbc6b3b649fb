"use strict";

// Elements and their texts. What a model writes is never HTML: every character ends up in a text node.

/** Invisible characters, and those that reorder text, are shown as signs. */
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

function button(name, does, className = "quiet act") {
  const made = make("button", className, name);
  made.type = "button";
  made.addEventListener("click", does);
  return made;
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

/** Appends to the text of an element, in several nodes: a browser lays out a whole node anew whenever it grows. */
function addText(element, text) {
  for (const part of text.match(/[^]{1,8000}/gu) ?? []) {
    const last = element.lastChild;
    if (last?.length < 8000) last.appendData(part);
    else element.append(part);
  }
}

/** Sets the direction of an element by its own letters, and returns it. */
function dir(element) {
  element.dir = "auto";
  return element;
}

"use strict";

// Buttons that copy a text.

/** A button that copies what `text` returns; with `signed`, it shows a sign, not a word. */
function copyButton(name, text, signed = false) {
  const button = make("button", "quiet"), show = (word, drawing) => {
    button.textContent = word;
    if (signed) sign(button, drawing);
  };
  button.type = "button";
  button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    show(copied ? "Copied" : "Not copied", copied ? "done" : "failed");
    announce(copied ? "Copied." : "The browser does not let the page copy.");
    setTimeout(show, 2000, "Copy", "copy");
  });
  show("Copy", "copy");
  return button;
}

/** Copies a text to the clipboard, and returns whether it could. Browsers have `navigator.clipboard` on safe origins only. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* the older command follows */ }
  const area = make("textarea", "unseen"), focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

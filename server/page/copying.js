"use strict";

// Buttons that copy a text.

function copyButton(name, text) {
  const button = make("button", "quiet", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not copied";
    announce(copied ? "Copied." : "The browser does not let the page copy.");
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

/** Whether a text is in the clipboard now. Browsers have the modern way on safe origins alone. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* the old way, then */ }
  const area = make("textarea", "unseen"), focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

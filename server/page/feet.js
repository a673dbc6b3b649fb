// Below a message: its buttons, its versions and its figures.

function drawFoot(row) {
  const { message, foot } = row;
  const last = message === rows.at(-1).message, textToCopy = () => message.text;
  const parts = [...arrows(row)];
  const branches = button("Branch", () => branch(message));
  branches.title = "Continue from here in a new conversation";
  if (message.role === "user") {
    parts.unshift(sign(branches, "branch"), sign(button("Edit", () => edit(row)), "edit"), copyButton("Copy message", textToCopy, true));
    if (last) parts.unshift(button("Answer", () => resume(message, () => newAnswer(message))));
  }
  if (message.role === "tool") parts.push(button("Edit", () => editResults(row)), branches);
  if (message.role === "assistant" && live?.message !== message) {
    const whole = message.text || message.calls.length;
    const fails = !whole || message.error;
    parts.push(button(fails ? "Retry" : "Regenerate", () => regenerate(message), `quiet act ${fails ? "retry" : ""}`));
    if (last && canContinue(message)) parts.push(button("Continue", () => resume(message)));
    if (message.text) parts.push(button("Edit", () => edit(row)), copyButton("Copy answer", textToCopy), branches);
  }
  if (message.role === "summary" && live?.message !== message) {
    nameSummary(row);
    if (inUse(message) || message.off) parts.push(button(message.off ? "Use again" : "Undo", () => useSummary(message, message.off)));
    parts.push(button(message.text ? "Regenerate" : "Retry", () => regenerate(message), `quiet act ${message.text ? "" : "retry"}`));
    if (message.text) parts.push(button("Edit", () => edit(row)), copyButton("Copy summary", textToCopy));
  }
  if (["assistant", "summary"].includes(message.role)) parts.push(make("span", "figures", figuresOf(message)));
  redraw(foot, parts);
  drawWaiting(row);
}

const buttonOf = ({ foot }, name) => [...foot.querySelectorAll("button")].find((element) => nameOf(element) === name);

/** The number of the version of a message that is shown, with buttons to show others; nothing for a single version. */
function arrows({ message }) {
  const holder = holderOf(current, message), all = holder.children.length;
  if (all < 2) return [];
  const turn = (by, name, sign) => {
    const arrow = button(sign, () => {
      holder.shown += by;
      draw();
      settle();
      keepConversation(current);
      const buttons = rowOf(current.messages[holder.children[holder.shown]]).foot.querySelectorAll(".arrows button");
      [...buttons].sort((a, b) => a.disabled - b.disabled || (a.textContent === sign ? -1 : 1))[0].focus();
    }, "quiet act", name);
    arrow.disabled = !(holder.shown + by in holder.children);
    return arrow;
  };
  const element = make("span", "arrows", "", `Version ${holder.shown + 1} of ${all}`);
  element.setAttribute("role", "group");
  element.append(turn(-1, "Earlier version", "‹"), make("span", "", `${holder.shown + 1}/${all}`), turn(1, "Later version", "›"));
  return [element];
}

function figuresOf({ usage, rate, ending, drafts, error, text, model, varied }) {
  if (!ending || (error && !usage)) return "";
  const most = Number(current.settings.max_tokens || $("max_tokens").placeholder); // which is a number for some models
  const why = ending === "length" && usage?.completion >= most ? "as long as the settings allow" : ENDINGS[ending];
  return [
    model && visible(model), usage && fromCache(usage), usage?.reread, usage && count(usage.completion, "token"), rate && `${number(rate, 1)} tokens/s`,
    drafts && `${number(drafts.accepted)} of ${count(drafts.all, "drafted token")} right`, varied?.temperature && `temperature ${varied.temperature}, to differ`, varied?.seed && `seed ${varied.seed}, to differ`, why && ending === "stopped" && !text ? "stopped before the first token" : why,
  ].filter(Boolean).join(" · ");
}

const fromCache = ({ prompt, cached, places = {} }) =>
  cached === null ? count(prompt, "prompt token") : `${number(cached)} of ${number(prompt)} prompt tokens from the cache${fromTiers(places)}`;

/** How many tokens of a prompt were read again, and what of it differs from an earlier one. */
const whyReread = (reread) =>
  reread ? `${number(reread.tokens)} read again (${reread.places.length ? `other than before: ${reread.places.join(", ")}` : "no longer in the cache"})` : "";

/** How many of the cached tokens came from a tier of the cache, in brackets. */
function fromTiers(places) {
  const tiers = Object.entries(places).filter(([place]) => place !== "store");
  return tiers.length ? ` (${tiers.map(([place, tokens]) => `${number(tokens)} from ${place}`).join(", ")})` : "";
}

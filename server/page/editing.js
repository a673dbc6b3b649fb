"use strict";

// Forms in place of a message: another text for it, or the results of calls.

/** Shows a field in place of a message's text, with buttons to send or save it. */
function edit(row) {
  const { message, element } = row;
  if (live || element.querySelector(".edit")) return;
  const mine = message.role === "user", form = make("form", "edit"), area = make("textarea");
  area.value = message.text;
  area.setAttribute("aria-label", mine ? "Edit your message" : message.role === "summary" ? "Edit the summary" : "Edit the answer");
  const close = () => {
    form.remove();
    element.classList.remove("edited");
  };
  const cancel = () => {
    close();
    buttonOf(row, "Edit")?.focus();
  };
  const save = () => {
    if (live) return; // it would take the place of the answer that is being generated
    close();
    buttonOf(rowOf(rewrite(message, area.value)), "Edit").focus();
  };
  const summary = message.role === "summary", send = make("button", "main", mine ? "Send" : summary ? "Save" : "Save and continue");
  const buttons = make("div", "row");
  buttons.append(send, ...(mine || summary ? [] : [button("Save", save, "")]), button("Cancel", cancel, ""));
  let files = message.files ?? [];
  const list = make("ul", "files"), drawFiles = () => list.replaceChildren(...chips(files, (file) => {
    files = files.filter((other) => other !== file);
    drawFiles();
    area.focus();
  }));
  list.setAttribute("aria-label", "Attached files");
  drawFiles();
  form.append(list, area, buttons);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if ((!area.value.trim() && !files.length) || live || !settingsHold()) return;
    if (summary) return save();
    close();
    $("message").focus();
    if (mine) say({ role: "user", text: area.value.trim(), ...(files.length && { files }) }, above(current, message));
    else resume(rewrite(message, area.value));
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) {
      event.stopPropagation();
      cancel();
    }
    if (event.key !== "Enter" || event.isComposing || (mine ? event.shiftKey : !event.ctrlKey && !event.metaKey)) return;
    event.preventDefault();
    form.requestSubmit();
  });
  element.classList.add("edited");
  element.append(form);
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
}

/** Adds a version of an answer with another text, which no message follows yet. */
function rewrite(message, text) {
  const { role, reasoning, calls, thought } = message;
  const written = { role, text, reasoning, thought, calls: structuredClone(calls), ending: "edited", error: "", usage: null, rate: null };
  const made = addMessage(current, parentOf(message), written);
  draw();
  settle();
  changed();
  return made;
}

/** A form with a field for the result of each call. */
function resultsForm(results, name, send) {
  const form = make("form", "results"), areas = results.map((result) => {
    const label = make("label", "", `Result of ${visible(result.name)}`), area = make("textarea");
    area.rows = 2;
    area.value = result.text;
    area.spellcheck = false;
    label.append(area);
    form.append(label);
    return area;
  });
  const buttons = make("div", "row");
  buttons.append(make("button", "main", name));
  form.append(buttons);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (live || !settingsHold()) return;
    $("message").focus();
    send(results.map(({ id, name: tool }, index) => ({ id, name: tool, text: areas[index].value })));
  });
  return form;
}

function editResults(row) {
  const { message, element } = row;
  if (live || element.querySelector(".results")) return;
  const form = resultsForm(message.results, "Send again", (results) => {
    close();
    say({ role: "tool", results }, parentOf(message));
  });
  const close = () => {
    form.remove();
    element.classList.remove("edited");
  };
  form.querySelector(".row").append(button("Cancel", () => {
    close();
    row.foot.querySelector("button:last-of-type").focus();
  }, ""));
  element.classList.add("edited");
  element.append(form);
  form.querySelector("textarea").focus();
}

// Forms in place of a message: another text for it, or the results of calls.

/** Shows a field in place of a message's text, with buttons to send or save it. */
function edit(row) {
  const { message, element } = row;
  if (live || element.querySelector(".edit")) return;
  const mine = message.role === "user", summary = message.role === "summary", form = make("form", "edit");
  const name = mine ? "Edit your message" : summary ? "Edit the summary" : "Edit the answer";
  const area = Object.assign(make("textarea", "", "", name), { value: message.text });
  const save = () => {
    if (live) return; // it would take the place of the answer that is being generated
    close();
    buttonOf(rowOf(rewrite(message, area.value)), "Edit").focus();
  };
  const send = make("button", "main", mine ? "Send" : summary ? "Save" : "Save and continue");
  const buttons = put(make("div", "row"), send, ...(mine || summary ? [] : [button("Save", save, "")]));
  let files = message.files ?? [];
  const list = make("ul", "files", "", "Attached files"), drawFiles = () => list.replaceChildren(...chips(files, (file) => {
    files = files.filter((other) => other !== file);
    drawFiles();
    area.focus();
  }));
  drawFiles();
  form.append(list, area, buttons);
  onSubmit(form, () => {
    if ((!area.value.trim() && !files.length) || live || !settingsHold()) return;
    if (summary) return save();
    close();
    $("message").focus();
    if (mine) say({ role: "user", text: area.value.trim(), ...(message.leftOut && { leftOut: message.leftOut }), ...(files.length && { files }) }, holderOf(current, message));
    else resume(rewrite(message, area.value));
  });
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || (mine ? event.shiftKey : !event.ctrlKey && !event.metaKey)) return;
    event.preventDefault();
    form.requestSubmit();
  });
  const close = openForm(row, form);
  area.setSelectionRange(area.value.length, area.value.length);
}

/** Shows a form in place of a message until it is cancelled. Returns a function that closes it. */
function openForm(row, form) {
  const close = () => {
    form.remove();
    row.element.classList.remove("edited");
  };
  const cancel = () => {
    close();
    buttonOf(row, "Edit")?.focus();
  };
  form.querySelector(".row").append(button("Cancel", cancel, ""));
  onEscape(form, cancel);
  row.element.classList.add("edited");
  row.element.append(form);
  form.querySelector("textarea").focus();
  return close;
}

/** Adds a version of an answer with another text, which no message follows yet. */
function rewrite(message, text) {
  const { role, reasoning, calls, thought } = message;
  const version = { ...readAnswer({}), role, text, reasoning, thought, calls: structuredClone(calls), ending: "edited" };
  const newVersion = addMessage(current, parentOf(message), version);
  draw();
  settle();
  changed();
  return newVersion;
}

/** A form with a field for the result of each call. */
function resultsForm(results, name, send) {
  const form = make("form", "results"), areas = results.map((result) => {
    const area = Object.assign(make("textarea"), { rows: 2, value: result.text, spellcheck: false });
    form.append(put(make("label", "", `Result of ${visible(result.name)}`), area));
    return area;
  });
  form.append(put(make("div", "row"), make("button", "main", name)));
  onSubmit(form, () => {
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
  const close = openForm(row, form);
}

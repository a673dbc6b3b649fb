// Calls of tools of MCP servers. The user confirms each, since a model may have read in a text what it shall call.

const UNASKED = 20; // calls in a row that run without a question
const ALWAYS = "polarlm.always"; // permissions of this tab alone: a file or another browser cannot bring a permission
const REFUSED = "The user refused this call.", NOT_RUN = "The user did not run this call.";

let unaskedCalls = 0;

const permissions = () => readStoredValue("sessionStorage", ALWAYS, (value) => new Set(value));
const permissionOf = ({ server, tool }) => JSON.stringify([current.id, server, tool]);
const allow = (call) => writeStorage("sessionStorage", ALWAYS, JSON.stringify([...permissions().add(permissionOf(call))]));

/** What is wrong with the arguments of a call; empty if nothing is. */
function faultOf(call) {
  try {
    return isObject(JSON.parse(call.arguments || "{}")) ? "" : "The arguments are not a JSON object.";
  } catch (error) {
    return `The arguments are not JSON: ${withPeriod(error.message)}`;
  }
}

/** Whether a call is for a server that there is here: the user enters the results of others. */
const isOurs = ({ server }) => Boolean(server && mcpServer(server));

/** Continues with the calls of an answer: runs the calls that the user has allowed, asks about the next call, or sends the results. */
async function proceed(message) {
  for (let call; (call = message.calls.find(({ result }) => !result)); ) {
    const fault = isOurs(call) && faultOf(call);
    if (!isOurs(call) || unaskedCalls >= UNASKED || !(fault || permissions().has(permissionOf(call)))) return askAbout(message);
    unaskedCalls += 1;
    if (fault) decide(message, call, { text: fault, failed: true });
    else if (!(await run(message, call))) return undefined;
  }
  return sendResults(message);
}

/** Sets the result of a call. Another tab may have put a copy in the call's place. */
function decide(message, { id }, result) {
  message.calls.find((call) => call.id === id && !call.result).result = result;
  keepLive(current, message);
}

function askAbout(message) {
  const row = rowOf(message);
  draw();
  follow();
  if (!row?.form?.classList.contains("confirm")) return;
  tell("It waits for your decision.");
  const at = document.activeElement; // a text that is being typed keeps the focus
  if (at === document.body || (at === $("message") && !at.value) || row.element.contains(at)) row.form.focus();
  else announce(row.form.getAttribute("aria-label"));
}

/** Runs a call. Returns whether it has a result, or false if it was stopped or the conversation was left. */
async function run(message, call) {
  const mine = live = { conversation: current, message, row: rowOf(message), stop: new AbortController() };
  const { server, tool, arguments: json } = call;
  call.begun = true;
  keepLive(current, message);
  draw();
  grow(mine.row);
  busy(true);
  tell(`${visible(tool)} of ${visible(server)} is running …`);
  let result = null, trouble = null;
  try {
    const reply = await askJson("mcp/call", { server, tool, arguments: JSON.parse(json || "{}") }, mine.stop.signal);
    result = { text: reply.text, failed: reply.is_error };
  } catch (error) {
    if ([400, 502].includes(error.status)) result = { text: error.message, failed: true };
    else trouble = error;
  }
  if (live !== mine) return false; // another conversation is shown
  live = null;
  busy(false);
  grow(mine.row);
  if (result) {
    decide(message, call, result);
    return true;
  }
  if (trouble.status) delete call.begun; // it was refused
  draw();
  tell(trouble.name === "AbortError" ? "Stopped." : trouble.message);
  if (trouble.status === 401) lock();
  return false;
}

function sendResults(message) {
  if (live || !settingsHold()) return draw();
  const results = message.calls.map(({ id, name, result: { text, failed } }) => ({ id, name, text, ...(failed && { failed }) }));
  for (const call of message.calls) {
    delete call.result;
    delete call.begun;
  }
  message.changed = timeAfter(message.changed);
  return say({ role: "tool", results }, message);
}

// -- below an answer --------------------------------------------------------------------------------------------------

/** Shows what an answer waits for: a decision about a call, or results. */
function drawWaiting(row) {
  const { message, foot } = row;
  const waits = message.role === "assistant" && message === rows.at(-1).message && message.calls.length > 0 && live?.message !== message;
  const next = waits && message.calls.find(({ result }) => !result), about = JSON.stringify([next, next && isOurs(next), unaskedCalls >= UNASKED]);
  [...(row.calls?.children ?? [])].forEach((fold, index) => {
    fold.hidden = waits && isOurs(message.calls[index]) && !message.calls[index].result;
  });
  const close = () => {
    row.form.remove();
    row.form = null;
  };
  if (row.form && (!waits || row.form.dataset.about !== about) && ![...row.form.querySelectorAll("textarea")].some(({ value }) => value)) close(); // nothing is typed
  if (!waits || row.form) return;
  row.form = next && isOurs(next) ? confirmForm(message, next) : resultsForm(callsToEnter(message), "Send results", (results) => {
    for (const { id, text } of results) {
      const call = message.calls.find((each) => each.id === id && !each.result) ?? message.calls.find((each) => each.id === id);
      call.result = { text, failed: call.result?.failed };
    }
    close();
    proceed(message);
  });
  row.form.dataset.about = about;
  foot.before(row.form);
}

/** The calls whose results the user enters; all of them, with their results, if none lacks one. */
function callsToEnter({ calls }) {
  const openCalls = calls.filter((call) => !call.result && !isOurs(call));
  return (openCalls.length ? openCalls : calls).map(({ id, name, result }) => ({ id, name, text: result?.text ?? "" }));
}

/** A question about a call, with its arguments. */
function confirmForm(message, call) {
  const fault = faultOf(call), all = message.calls.length;
  const name = `${visible(call.tool)} of ${visible(call.server)}`, place = all > 1 ? ` (call ${message.calls.indexOf(call) + 1} of ${all})` : "";
  const title = `${fault ? "The model cannot run" : "Run"} ${name}${fault ? "" : "?"}${place}`;
  const form = make("div", "results confirm", "", title), text = region("pre", "", visibleCode(indentedJson(call.arguments || "{}")), "Arguments");
  form.tabIndex = -1;
  form.setAttribute("role", "group");
  const notes = [
    fault, !fault && call.begun && "It was started before, and may have run.",
    unaskedCalls >= UNASKED && `${UNASKED} calls have run without a question.`,
  ].filter(Boolean);
  const settleCall = (result) => {
    unaskedCalls = 0;
    $("message").focus();
    decide(message, call, result);
    proceed(message);
  };
  const runs = async (always) => {
    if (live) return;
    unaskedCalls = 0;
    if (always) allow(call);
    $("message").focus();
    if (await run(message, call)) proceed(message);
  };
  const buttons = fault ? [button("Tell the model", () => settleCall({ text: fault, failed: true }), "main")] : [
    button("Run once", () => runs(false), "main"), button("Always in this conversation", () => runs(true), ""),
    button("Refuse", () => settleCall({ text: REFUSED, failed: true }), ""),
  ];
  const lines = notes.map((note) => make("p", fault ? "wrong" : "hint", note));
  return put(form, dir(make("p", "asks", title)), text, ...lines, put(make("div", "row"), ...buttons));
}

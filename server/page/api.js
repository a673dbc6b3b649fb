// The server: requests, refusals and streams.

const $ = (id) => document.getElementById(id);

/** An error of the server; `field` is the field of the request that it names. */
class Failure extends Error {
  constructor(sentence, status = 0, field = "") {
    super(sentence);
    Object.assign(this, { status, field });
  }
}

async function ask(path, options = {}) {
  const headers = {};
  const key = readStorage("localStorage", KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (options.body) headers["Content-Type"] = options.type ?? "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The JSON that the server answers; a request with a body, which is sent as JSON, is a POST. */
async function askJson(path, body, signal) {
  const response = await ask(path, body && { method: "POST", body: JSON.stringify(body), signal });
  return response.json();
}

async function refusal(response) {
  let sentence = `The server answered with status ${response.status}.`, field = "";
  try {
    const { error } = await response.json();
    sentence = withPeriod(error.message);
    field = error.param ?? "";
  } catch { /* a proxy may answer with anything */ }
  const seconds = Number(response.headers.get("Retry-After"));
  if (seconds > 0) sentence += ` It asks to wait for about ${seconds} ${seconds === 1 ? "second" : "seconds"}.`;
  if (response.status === 401) sentence = "This server asks for an API key.";
  return new Failure(sentence, response.status, String(field));
}

const withPeriod = (sentence) => (/[.!?]$/.test(sentence) ? sentence : `${sentence}.`);

/** The JSON of each server-sent event, up to [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the stream ended too early");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith(":")) continue; // a sign of life
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(withPeriod(event.error.message), 0, String(event.error.param ?? ""));
      yield event;
    }
  }
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const string = (value) => (typeof value === "string" ? value : "");

// -- small values in the browser's storage ----------------------------------------------------------------------------

const SETTINGS = "polarlm.settings", KEY = "polarlm.key", DRAFT = "polarlm.draft", ENGINE = "polarlm.engine";

/** Values for this page only: storage may be full or forbidden, and even reading its name may throw. */
const unstoredValues = {};

function readStorage(storage, name) {
  try { return unstoredValues[name] ?? window[storage].getItem(name); } catch { return null; }
}

/** What `read` makes of a value that is kept as JSON; of undefined if there is none, or another program's value. */
function readStoredValue(storage, name, read) {
  try { return read(JSON.parse(readStorage(storage, name))); } catch { return read(); }
}

function writeStorage(storage, name, value) {
  unstoredValues[name] = value;
  try {
    window[storage].setItem(name, value);
    delete unstoredValues[name];
  } catch { /* it stays in `unstoredValues` */ }
}

// Settings: the current conversation's settings, and the last settings, with which a new conversation begins.

const NUMBERS = [...document.querySelectorAll("#fields input[type=number]")].map((input) => input.id);
const FIELDS = ["system", ...NUMBERS, "cache_salt", "pack", "tools", "tool_choice", "schema"];
const FOLDS = [$("sampling"), $("more")]; // a conversation that has chosen something in them opens them
const SWITCHES = ["loop_check", "auto_compact"];

/** The settings in an untrusted value: a string for each field that is not empty, the model, the SWITCHES that are off, and the MCP servers that are on. */
function readSettings(value) {
  const settings = {};
  for (const name of [...FIELDS, "model"]) {
    const setting = value?.[name];
    if (typeof setting === "string" ? setting : Number.isFinite(setting)) settings[name] = String(setting);
  }
  for (const name of SWITCHES) if (value?.[name] === false) settings[name] = false;
  const mcp = readMcp(value?.mcp);
  if (mcp) settings.mcp = mcp;
  return settings;
}

const lastSettings = () => readStoredValue("localStorage", SETTINGS, readSettings);

function showSettings(settings) {
  for (const name of FIELDS) $(name).value = settings[name] ?? "";
  for (const name of SWITCHES) $(name).checked = settings[name] ?? true;
  mcpOn = structuredClone(settings.mcp ?? {});
  drawMcp();
  chosenModel = settings.model ?? "";
  showChoice();
  for (const name of ["tools", "schema"]) checkJson(name);
  for (const fold of FOLDS) fold.open ||= [...fold.querySelectorAll("input, textarea")].some(({ value }) => value);
}

function remember() {
  const settings = {};
  for (const name of FIELDS) if ($(name).value !== "") settings[name] = $(name).value;
  for (const name of SWITCHES) if (!$(name).checked) settings[name] = false;
  if (chosenModel) settings.model = chosenModel;
  if (Object.keys(mcpOn).length) settings.mcp = structuredClone(mcpOn);
  writeStorage("localStorage", SETTINGS, JSON.stringify({ ...settings, mcp: undefined })); // a new conversation begins without servers
  Object.assign(current, { settings, chosen: timeAfter(current.chosen) });
  if (current.children.length) keepConversation(current);
}

/** Shows the defaults from /props in empty fields (-1: none), and a warning if the model has no chat template. */
function showProps({ default_generation_settings: { params }, chat_template_is_default: isDefault, modalities }) {
  for (const name of NUMBERS) {
    if (params[name] >= 0) $(name).placeholder = String(Number(params[name].toPrecision(6)));
  }
  $("attach").title = `Attach ${modalities?.vision ? "images, " : ""}text, code or PDF files`;
  $("untaught").textContent = isDefault ? "This model has no chat template: it continues text, and was probably not made for chats." : "";
}

/** Offers the packs of /v1/packs; without any, the field is there only while a conversation has one. */
function showPacks({ data }) {
  $("packs").replaceChildren(...data.map(({ id, tokens }) => Object.assign(document.createElement("option"), { value: id, label: `${tokens.toLocaleString("en")} tokens` })));
  $("pack-row").hidden = !data.length && !$("pack").value;
}

/** Whether the values of all fields can be sent; otherwise the browser shows what is wrong. */
function settingsHold() {
  if ($("fields").checkValidity()) return true;
  const field = $("fields").querySelector(":invalid");
  if (isShut("settings")) sheet("settings", true);
  for (const fold of FOLDS) fold.open ||= fold.contains(field);
  field.focus();
  $("fields").reportValidity();
  return false;
}

// -- JSON in fields ---------------------------------------------------------------------------------------------------

/** A sentence about what is wrong with the JSON in a field; empty if nothing is. */
function wrongJson(name) {
  const text = $(name).value.trim();
  if (!text) return "";
  let value;
  try { value = JSON.parse(text); } catch (error) { return `This is not JSON: ${withPeriod(error.message)}`; }
  if (name === "tools") return Array.isArray(value) ? "" : "Tools are a JSON array: [{\"name\": …, \"parameters\": …}].";
  return isObject(value) ? "" : "A schema is a JSON object: {\"type\": \"object\", …}.";
}

function checkJson(name) {
  sayWrong(name, wrongJson(name));
  $(name).setCustomValidity(wrongJson(name));
}

function sayWrong(name, sentence) {
  $(`${name}-wrong`).textContent = sentence;
  $(name).setAttribute("aria-invalid", String(Boolean(sentence)));
}

/** The fields of a request that follow from the settings. */
function requestSettings() {
  const body = askedModel() ? { model: askedModel() } : {};
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = $(name).valueAsNumber;
  if ($("pack").value) body.pack = $("pack").value;
  if ($("cache_salt").value) body.cache_salt = $("cache_salt").value;
  if ($("tools").value.trim()) {
    body.tools = JSON.parse($("tools").value).map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
  }
  const functions = mcpTools().map(({ tool }) => ({ type: "function", function: tool.function }));
  if (functions.length) body.tools = [...(body.tools ?? []), ...functions];
  if (body.tools && $("tool_choice").value) body.tool_choice = $("tool_choice").value;
  if ($("schema").value.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse($("schema").value) } };
  }
  return body;
}

$("fields").addEventListener("input", (event) => {
  if (event.target.id === "prompt-name") return;
  if (event.target.id === "tools" || event.target.id === "schema") checkJson(event.target.id);
  remember();
});
$("fields").addEventListener("reset", () => setTimeout(() => {
  showSettings(chosenModel ? { model: chosenModel } : {});
  remember();
}));
onSubmit($("fields"), () => {});

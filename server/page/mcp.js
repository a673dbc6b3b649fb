// MCP servers: which there are, and which of their tools the model of the current conversation may call.

let mcpServers = []; // { name, state, trouble, tools: [{ name, function, trouble }] }, as the server has them
let mcpOn = {}; // the current conversation's: name of a server that is on → names of its tools that are off
const connections = new Map(); // name → the promise of a server that is being connected to

async function listMcp() {
  mcpServers = (await askJson("mcp/servers")).servers;
  drawMcp();
  for (const row of rows) if (row.foot) drawWaiting(row); // a call may wait for a server
}

/** Connects to a server, and shows its tools or why it has failed. Rejects if `signal` ends it. */
async function connectTo(name, signal) {
  if (!connections.has(name)) {
    const connection = askJson("mcp/connect", { server: name })
      .catch((error) => ({ name, state: "failed", trouble: error.message, tools: [] }))
      .then((connectedServer) => {
        connections.delete(name);
        mcpServers = mcpServers.map((server) => (server.name === name ? connectedServer : server));
        drawMcp();
      });
    connections.set(name, connection);
    drawMcp();
  }
  await Promise.race([connections.get(name), new Promise((_, reject) => {
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
  })]);
}

const mcpServer = (name) => mcpServers.find((server) => server.name === name);

/** Returns when the servers that are on are ready, or have failed. */
async function mcpReady(signal) {
  const waiting = Object.keys(mcpOn).filter((name) => mcpServer(name) && mcpServer(name).state !== "ready");
  if (!waiting.length) return;
  tell("Connecting to MCP servers …");
  await Promise.all(waiting.map((name) => connectTo(name, signal)));
}

/** The tools that are on: [{ server, tool }]. */
const mcpTools = () => mcpServers.filter(({ name, state }) => state === "ready" && Object.hasOwn(mcpOn, name)).flatMap(({ name, tools }) =>
  tools.filter((tool) => !tool.trouble && !mcpOn[name].includes(tool.name)).map((tool) => ({ server: name, tool })));

/** The names of the server and its tool that a model calls by this name; undefined if no server has it. */
function originOf(functionName) {
  const match = mcpTools().find(({ tool }) => tool.function.name === functionName);
  return match && { server: match.server, tool: match.tool.name };
}

/** The servers that are on, in an untrusted value; null if there are none. */
function readMcp(value) {
  if (!isObject(value)) return null;
  const strings = (list) => (Array.isArray(list) ? list.filter((name) => typeof name === "string") : []);
  const read = Object.fromEntries(Object.entries(value).map(([name, off]) => [name, strings(off)]));
  return Object.keys(read).length ? read : null;
}

// -- in the settings --------------------------------------------------------------------------------------------------

function drawMcp() {
  const open = [...$("servers").querySelectorAll("details[open]")].map(({ dataset }) => dataset.server);
  $("mcp").hidden = !mcpServers.length;
  redraw($("servers"), mcpServers.map((server, place) => mcpItem(server, place, open.includes(server.name))));
  const failedServers = mcpServers.filter(({ name, state }) => state === "failed" && Object.hasOwn(mcpOn, name));
  const sentence = failedServers.map(({ name, trouble }) => `${visible(name)} is not available. ${withPeriod(visible(trouble))}`).join(" ");
  setText($("unconnected"), sentence);
}

function mcpItem(server, place, open) {
  const item = make("li"), on = Object.hasOwn(mcpOn, server.name), isConnecting = connections.has(server.name);
  const state = isConnecting ? "connecting …" : !on ? "" : server.state === "ready" ? "" : server.state;
  item.append(switchOf(`server-${place}`, visible(server.name), state, on, (yes) => {
    if (yes) mcpOn[server.name] = [];
    else delete mcpOn[server.name];
    if (yes && server.state !== "ready") connectTo(server.name);
    else setTimeout(drawMcp); // not while the browser handles this box
  }));
  if (on && server.state === "failed" && !isConnecting) {
    const again = button("Connect again", () => connectTo(server.name), "quiet", `Connect to ${visible(server.name)} again`);
    item.append(make("p", "wrong", withPeriod(visible(server.trouble))), again);
  }
  if (!on || server.state !== "ready") return item;
  const off = mcpOn[server.name], items = server.tools.map((tool, index) => {
    const isOn = !tool.trouble && !off.includes(tool.name);
    const box = switchOf(`server-${place}-${index}`, visible(tool.name), "", isOn, (yes) => {
      mcpOn[server.name] = yes ? mcpOn[server.name].filter((name) => name !== tool.name) : [...mcpOn[server.name], tool.name];
      setTimeout(drawMcp);
    });
    box.querySelector("input").disabled = Boolean(tool.trouble);
    const about = tool.trouble ? withPeriod(`It cannot be used: ${tool.trouble}`) : tool.function.description ?? "";
    return put(make("li"), box, ...(about ? [dir(make("p", tool.trouble ? "wrong" : "hint", visible(about.slice(0, 300))))] : []));
  });
  const usable = mcpTools().filter((each) => each.server === server.name).length;
  const summary = make("summary", "", `${number(usable)} of ${count(server.tools.length, "tool")}`);
  const tools = put(make("details"), summary, put(make("ul", "", "", `Tools of ${visible(server.name)}`), ...items));
  tools.dataset.server = server.name;
  tools.open = open;
  return put(item, tools);
}

/** A box with a name that can be checked. The form of the settings keeps what `change` has changed. */
function switchOf(id, name, state, on, change) {
  const box = Object.assign(make("input"), { type: "checkbox", id, checked: on });
  const label = Object.assign(make("label", "", state ? `${name} · ${state}` : name), { htmlFor: id });
  box.addEventListener("input", () => change(box.checked));
  return put(make("p", "choice"), box, dir(label));
}

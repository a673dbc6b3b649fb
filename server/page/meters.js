// Meters: speed, context, the picture of the cache, memory. The picture is computed from counts of tokens only.

const BUSY_MS = 1000, IDLE_MS = 5000; // between two requests for /stats

let contextUse = { tokens: 0, cached: 0, exact: true }; // tokens of the conversation, and how many of them were in the cache
let stats = null; // the last response of /stats

const number = (value, digits = 0) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let power = 0;
  while (bytes >= 1023.95 && power < 3) { bytes /= 1024; power += 1; }
  return `${number(bytes, power ? 1 : 0)} ${units[power]}`;
}

/** Shows the rate of the steps after the first token, which the prefill yields. */
function speed(tokens, milliseconds) {
  $("speed").textContent = milliseconds > 0 ? `${number((1000 * (tokens - 1)) / milliseconds, 1)} tokens/s` : "–";
}

function meter() {
  $("compact").disabled = !canCompact();
  if (!stats) return;
  tellWaiting();
  showChoice();
  if (stats.state) return meterless();
  const about = contextUse.exact ? "" : "≈ ";
  $("model").textContent = stats.model;
  $("context").textContent = `${about}${number(contextUse.tokens)} of ${number(stats.context)}`;
  $("context-brief").textContent = `${$("context").textContent} tokens`;
  $("filled").max = stats.context;
  $("filled").value = contextUse.tokens;
  const { bytes, f16_bytes: f16 } = stats.sequence, whole = stats.whole_context;
  $("bits").textContent = `${number(whole.bits_per_value, 2)} bits/value`;
  $("types").textContent = `Stored as ${stats.cache_types}`;
  const saves = f16 > 1.05 * bytes; // false for short sequences: the newest blocks and the first one are f16 in both
  const will = whole.f16_bytes > 1.05 * whole.bytes && `${number(whole.tokens)} tokens take ${size(whole.bytes)}, in f16 ${size(whole.f16_bytes)}`;
  $("memory").textContent = saves ? `${size(bytes)}, ${number(f16 / bytes, 1)}× saved` : bytes ? size(bytes) : "–";
  $("saved").textContent = [saves && `f16 would take ${size(f16)}`, will].filter(Boolean).join("; ");
  $("bars").hidden = !saves;
  for (const [id, value] of [["bytes", bytes], ["f16-bytes", f16]]) {
    $(id).max = Math.max(bytes, f16, 1);
    $(id).value = value;
  }
  $("requests").textContent = `${stats.running} running, ${stats.waiting} waiting`;
  $("in-use").textContent = `${number(stats.blocks_used)} of ${number(stats.blocks)} blocks in use, ${number(stats.blocks_kept)} kept`;
  drawBlocks(blocksOf(contextUse.tokens, contextUse.cached, stats), stats);
}

/** Shows that the model is not in memory, so that nothing is known of its cache. */
function meterless() {
  for (const id of ["context", "bits", "memory", "requests"]) $(id).textContent = "–";
  for (const id of ["types", "saved", "in-use"]) $(id).textContent = "";
  $("context-brief").textContent = $("types").textContent = `The model is ${stats.state}`;
  if (stats.state === "unloaded") $("types").textContent = "The model is not in memory. A message loads it.";
  $("filled").value = 0;
  $("bars").hidden = true;
  const nothing = { block_size: 1, bits_per_value: 16, context: 0, recent_blocks: 0 };
  drawBlocks(blocksOf(0, 0, nothing), nothing);
  $("blocks-say").textContent = "";
  drawnState = "";
  if (live && live.row && !live.message.text) tell(stats.state === "unloaded" ? "Loading the model …" : `The model is ${stats.state} …`);
}

let lookTimer = 0;
let worry = ""; // the error of the last request
let listRequest = null; // the first request for the models
let shownModel = ""; // the name of the model whose /props are shown

/** Requests /stats now, and repeatedly while the page is visible. */
async function look() {
  clearTimeout(lookTimer);
  try {
    if (!listRequest) await (listRequest = Promise.all([listModels(), listMcp()]).catch((error) => { listRequest = null; throw error; }));
    const query = ofModel(), reply = await askJson(`stats?${[`tokens=${contextUse.tokens}`, query].filter(Boolean).join("&")}`);
    if (query !== ofModel()) return look(); // another model was chosen meanwhile
    stats = reply;
    if ($("status").textContent === worry) tell("");
    meter();
    if (shownModel !== stats.model && !stats.state) { // to ask of a model that is not in memory would load it
      shownModel = stats.model;
      showProps(await askJson(`props?${query}`));
      showPacks(await askJson(`v1/packs?${query}`));
    }
    if (serverKeeps !== false) sync();
  } catch (error) {
    if (error.status === 401) return lock();
    worry = error.message;
    if (!live) tell(worry);
  }
  clearTimeout(lookTimer);
  if (!document.hidden) lookTimer = setTimeout(look, live || !areRead() ? BUSY_MS : IDLE_MS);
}

// -- the picture of the cache -----------------------------------------------------------------------------------------

const WIDTH = 264; // the picture's width, in its own units
const PITCHES = [[12, 132], [8, 660], [5, 2640]]; // (pitch of a cell, most cells that are drawn at this pitch)

/**
 * The blocks of a sequence of `tokens`; the first `cached` tokens were in the cache. The first block, the newest complete
 * ones and the block that is being filled are in full precision; the blocks between them are coded. With a window, only
 * blocks that a later token sees are left.
 */
function blocksOf(tokens, cached, { block_size: length, window, recent_blocks: recent }) {
  const complete = Math.floor(tokens / length), rest = tokens % length;
  const first = window ? Math.floor(Math.max(0, tokens - window + 1) / length) : 0;
  const sink = complete > 0 && first === 0 ? 1 : 0;
  const all = complete - first + (rest > 0 ? 1 : 0), coded = Math.max(0, complete - recent - Math.max(1, first));
  return {
    length, first, sink, complete, filled: rest / length, all, full: all - coded, coded, recent,
    shared: Math.max(0, Math.min(complete, Math.floor(cached / length)) - first),
  };
}

/** The picture in words. */
function blocksInWords({ all, length, full, coded, shared }, bits) {
  if (!all) return `No block of ${length} tokens yet`;
  const parts = coded ? [`${number(full)} in full precision`, `${number(coded)} coded (${number(bits, 1)} bits)`] : ["all in full precision"];
  if (shared) parts.push(`${number(shared)} shared with an earlier prompt`);
  return `${count(all, "block")} of ${length} tokens: ${parts.join(", ")}`;
}

let drawnState = ""; // the state that the picture shows

/** Draws a cell for each block, filled in proportion to the bits of its values, of 16, and to its tokens. */
function drawBlocks(blocks, { bits_per_value: bits, context }) {
  const words = blocksInWords(blocks, bits), state = `${words} ${blocks.filled.toFixed(2)}`;
  if (state === drawnState) return;
  drawnState = state;
  setText($("blocks-say"), words);
  const [pitch, most] = PITCHES.find(([, cells]) => blocks.all <= cells) ?? PITCHES.at(-1);
  const columns = Math.floor(WIDTH / pitch), each = Math.max(1, Math.ceil(blocks.all / most)); // blocks to a cell
  const cells = Math.ceil(blocks.all / each), room = Math.ceil(context / blocks.length / each);
  const drawnCells = Math.max(cells, Math.min(room, columns * Math.max(2, Math.ceil(cells / columns))));
  const side = pitch - (pitch > 8 ? 3 : 2), height = Math.min(1, bits / 16);
  const paths = { free: "", "outline own": "", "outline shared": "", "fill own": "", "fill shared": "" };
  const box = (cell, part) => {
    const x = (cell % columns) * pitch + .5, bottom = Math.floor(cell / columns) * pitch + side + .5, high = side * part;
    return `M${x} ${(bottom - high).toFixed(2)}h${side}v${high.toFixed(2)}h${-side}z`;
  };
  for (let cell = 0; cell < drawnCells; cell += 1) {
    const block = blocks.first + cell * each;
    if (cell >= cells) { paths.free += box(cell, 1); continue; }
    const whose = cell * each < blocks.shared ? "shared" : "own";
    const full = (cell === 0 && blocks.sink) || block >= blocks.complete - blocks.recent;
    paths[`outline ${whose}`] += box(cell, 1);
    paths[`fill ${whose}`] += box(cell, full ? (block >= blocks.complete ? blocks.filled : 1) : height);
  }
  $("blocks").setAttribute("viewBox", `0 0 ${WIDTH} ${Math.ceil(drawnCells / columns) * pitch}`);
  for (const [name, path] of Object.entries(paths)) {
    $("blocks").querySelector(`.${name.replace(" ", ".")}`).setAttribute("d", path);
  }
}

// Files that go with a message: as text in its prompt, or as images.

const LARGEST = 64 * 2 ** 20; // bytes of a file that the page reads; the server has its own limits
const LARGEST_IMAGE = 4 * 2 ** 20; // characters in a request, which carries 16 MiB unless the server has another limit
const SIDES = [Infinity, 4096, 2048, 1024, 512]; // pixels of an image's longer side that are tried until it is small enough

let attachedFiles = []; // the files of the next message: { name, text, tokens, image }; text is null until it has been read
let leftOut = []; // names of files that were chosen for the next message and cannot go with it

const attachedTokens = () => attachedFiles.reduce((sum, file) => sum + file.tokens, 0);

/** A user's message as the model gets it: images, each other file as text between fences, then what the user wrote. */
function contentOf({ text, files = [] }) {
  const images = files.filter(({ image }) => image).map(imagePart);
  const writtenText = [...files.filter(({ image }) => !image).map(fencedText), text].filter(Boolean).join("\n\n");
  return images.length ? [...images, ...(writtenText ? [{ type: "text", text: writtenText }] : [])] : writtenText;
}

const imagePart = ({ image }) => ({ type: "image_url", image_url: { url: image } });

function fencedText({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)), fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** Reads files, counts their tokens, and shows them above the message. */
async function attach(files) {
  const troubles = [];
  sayAttached("");
  look(); // at whether the model loads
  await Promise.all([...files].map(async (file) => {
    const entry = { name: file.name.slice(0, 200), text: null, tokens: null };
    attachedFiles.push(entry);
    leftOut = leftOut.filter((name) => name !== entry.name);
    drawAttached();
    try {
      if (file.size > LARGEST) throw new Failure(`This file has ${size(file.size)}, and at most ${size(LARGEST)} are read.`);
      const isImage = file.type.startsWith("image/") && file.type !== "image/svg+xml";
      await (isImage ? readImage(entry, file) : readText(entry, file));
    } catch (error) {
      attachedFiles = attachedFiles.filter((other) => other !== entry);
      chatToSend = null;
      leftOut.push(entry.name);
      troubles.push(`${visible(entry.name)}: ${error instanceof Failure ? error.message : "This file cannot be read."}`);
      sayAttached(troubles.join(" "));
    }
    drawAttached();
  }));
  sendRead();
}

async function readText(entry, file) {
  const text = await textIn(file);
  const [whole, empty] = await Promise.all([fencedText({ name: entry.name, text }), "…"].map(countTokens));
  Object.assign(entry, { text, tokens: Math.max(0, whole - empty) });
}

/** Reads an image, smaller if it is larger than a request may be. Throws a Failure if the model reads none. */
async function readImage(entry, file) {
  const { modalities } = await askJson(`props?${ofModel()}`);
  if (!modalities?.vision) throw new Failure("This model reads text alone, no images.");
  for (const side of SIDES) {
    const image = await asAddress(side === Infinity ? file : await scaleDown(file, side));
    if (image.length > LARGEST_IMAGE) continue;
    try {
      const [whole, empty] = await Promise.all([[imagePart({ image })], "…"].map(countTokens));
      return Object.assign(entry, { text: "", image, tokens: Math.max(0, whole - empty) });
    } catch (error) {
      if (![0, 400, 413].includes(error.status) || side === SIDES.at(-1)) throw error; // a connection may end before a 413 comes, and a JPEG may be of a kind that the server reads
    }
  }
}

/** A picture whose longer side has at most so many pixels, as a JPEG, in which white stands behind it. */
async function scaleDown(file, side) {
  const picture = await createImageBitmap(file), scale = Math.min(1, side / Math.max(picture.width, picture.height));
  const canvas = new OffscreenCanvas(...[picture.width, picture.height].map((pixels) => Math.max(1, Math.round(scale * pixels))));
  const context = canvas.getContext("2d");
  Object.assign(context, { fillStyle: "white", imageSmoothingQuality: "high" }).fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: .9 });
}

/** A file as a data URL. */
const asAddress = (file) => new Promise((resolve, reject) => {
  const reader = Object.assign(new FileReader(), { onload: () => resolve(reader.result), onerror: () => reject(reader.error) });
  reader.readAsDataURL(file);
});

/** The text of a file. Throws a Failure. */
async function textIn(file) {
  if (/\.pdf$/i.test(file.name) || file.type === "application/pdf") {
    return (await (await ask("documents/text", { method: "POST", body: file, type: "application/pdf" })).json()).text;
  }
  let text = "\0";
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()); } catch { /* it is no text */ }
  if (text.includes("\0")) throw new Failure("This file is neither text (UTF-8) nor a PDF.");
  if (!text.trim()) throw new Failure("This file is empty.");
  return text.replaceAll("\r\n", "\n");
}

/** The tokens of a request's prompt, or of a prompt of one message. */
const tokensOf = async (request, signal) => (await askJson("v1/chat/completions/input_tokens", request, signal)).input_tokens;
const countTokens = (content) => tokensOf({ messages: [{ role: "user", content }], ...(askedModel() && { model: askedModel() }) });

const sayAttached = (sentence) => { $("attached-says").textContent = sentence; };

function drawAttached() {
  $("attached").replaceChildren(...chips(attachedFiles, (file) => {
    attachedFiles = attachedFiles.filter((other) => other !== file);
    chatToSend = null;
    tellWaiting();
    sayAttached("");
    drawAttached();
    $("attach").focus();
  }));
  const tokens = attachedTokens();
  const over = stats?.context && contextUse.tokens + tokens > stats.context;
  $("attached").classList.toggle("over", Boolean(over));
  if (over) sayAttached(`With these files the conversation has about ${count(contextUse.tokens + tokens, "token")}, and the context has ${number(stats.context)}.`);
}

/** An item for each file, with a button that removes it. */
function chips(files, drop) {
  return files.map((file) => {
    const name = visible(file.name);
    const remove = button("Remove", () => drop(file), "quiet", `Remove ${name}`);
    const tokens = file.tokens === null ? "reading …" : count(file.tokens, "token");
    return put(make("li"), ...(file.image ? [thumbnail(file)] : []), dir(make("span", "name", name)), make("span", "tokens", tokens), sign(remove, "failed"));
  });
}

const thumbnail = ({ name, image }) => Object.assign(make("img"), { src: image, alt: visible(name), title: visible(name) });

/** A file of a message that was sent: the image, or its name, and its text when it is opened. */
function shownFile({ name, text, tokens, image }) {
  if (image) return thumbnail({ name, image });
  const body = region("pre", "", "", visible(name)), element = fold("file", `${visible(name)} · ${count(tokens, "token")}`, body);
  element.addEventListener("toggle", () => { if (!body.firstChild) new Parts(body).addText(visibleCode(text)); });
  return element;
}

$("attach").addEventListener("click", () => $("attachments").click());
$("attachments").addEventListener("change", () => {
  attach($("attachments").files);
  $("attachments").value = "";
  $("message").focus();
});
$("message").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // otherwise the browser leaves the page for the file
    if (name === "drop") attach(event.dataTransfer.files);
  });
}

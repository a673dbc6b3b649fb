// Files of conversations.

/** Saves conversations, and with them prompts, as a file. */
function exportChats(list, prompts = []) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations: list, ...(prompts.length && { prompts }) }, null, 1);
  const link = make("a"), address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.href = address;
  link.download = list.length === 1 ? `${titleOf(list[0]).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json` : "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
  $("shelf-says").textContent = `${count(list.length, "conversation")} exported.`;
}

/** Adds the conversations of a file; known ones get what the file has in addition. Returns [added, known]. */
async function importChats(text) {
  let value;
  try { value = JSON.parse(text); } catch { throw new Failure("This file is not JSON."); }
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) throw new Failure("This file has no conversations of this page in it.");
  const read = value.conversations.map(readConversation).filter((chat) => chat.children.length);
  savePrompts(readPrompts(value.prompts));
  const knownCount = read.filter(({ id }) => chats.has(id)).length;
  for (const chat of read) await keepConversation(adopt(chat), true);
  return [read.length - knownCount, knownCount];
}

$("export-all").addEventListener("click", () => exportChats([...chats.values()], savedPrompts()));
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (!file) return;
  try {
    const [addedCount, knownCount] = await importChats(await file.text());
    const parts = [addedCount || !knownCount ? `${count(addedCount, "conversation")} imported.` : ""];
    if (knownCount) parts.push(`${count(knownCount, "conversation")} ${knownCount === 1 ? "was" : "were"} here already: what the file has more is added.`);
    $("shelf-says").textContent = parts.join(" ").trim();
  } catch (error) {
    $("shelf-says").textContent = error instanceof Failure ? error.message : "This file cannot be read.";
  }
  $("file").value = "";
});

// Which model answers, where the server has several.

let modelNames = []; // the names of the server's models; empty if it has one alone
let chosenModel = ""; // by the current conversation's settings; empty: whichever the server takes

/** Asks the server for its models, and shows a list to choose from if it has several. */
async function listModels() {
  const { data } = await askJson("v1/models");
  modelNames = data.filter(({ status }) => status).map(({ id }) => id); // a server of one model says nothing of its status
  $("choice").hidden = !modelNames.length;
  $("model").hidden = modelNames.length > 0;
  showChoice();
}

/** Shows the model that the conversation has chosen, or else the one that the server would take. */
function showChoice() {
  const shownName = chosenModel || stats?.model || "", names = modelNames.includes(shownName) || !shownName ? modelNames : [...modelNames, shownName];
  const options = [...$("choice").options].map(({ value }) => value);
  if (names.join("\n") !== options.join("\n")) {
    $("choice").replaceChildren(...names.map((name) => option(name, `${visible(name)}${modelNames.includes(name) ? "" : " (not here)"}`)));
  }
  $("choice").value = shownName;
}

/** The model that requests name; undefined if the server has one alone. */
const askedModel = () => (modelNames.length ? $("choice").value || undefined : undefined);

/** The query of a request for what the server tells of the model. */
const ofModel = () => (askedModel() ? `model=${encodeURIComponent(askedModel())}` : "");

$("choice").addEventListener("focus", () => listModels().catch(() => {})); // a folder may have others by now
$("choice").addEventListener("change", () => {
  chosenModel = $("choice").value;
  remember();
  look();
});

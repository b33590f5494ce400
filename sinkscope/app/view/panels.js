// The tour of a view.

const LAST_TOUR = "sinkscope view: the tour was shown";

/** The steps of the tour: what is pointed at, the switch that is pressed before, and the words, or what makes them then. */
function tourSteps(data) {
  const [made] = data.neurons.length ? data.switches : [];
  const random = data.switches.find((name) => name === data.control);
  const steps = [
    ["#strip", "intact", "Each box is a token; the model stores a vector for it, whose length is its norm. The bluer the box, the larger the norm. The framed token is the attention sink."],
    [".heads", "intact", "Each square is a head: for each token it decides which earlier tokens are read, and with which shares, its attention. Blue heads give nearly all of it to the sink."],
  ];
  if (made) steps.push([".heads", made, `The tour pressed "${made}": the neurons that give the sink its norm are set to 0. The squares lose their blue: these heads look elsewhere, and the line at the top counts them.`]);
  if (made && random) steps.push([".heads", random, `Now "${random}": other neurons are set to 0, and the squares are blue again. This is the control: not any neurons make the sink, but these.`]);
  for (const name of data.switches.filter((one) => one.startsWith("token "))) steps.push(["#strip", name, (view) => movedWords(view, name)]);
  steps.push([".circuit", "intact", "The circuit: a block for each spike, with the neurons that write the large norm and the heads that read it."]);
  if (data.purpose) steps.push([".circuit", "intact", `What the sink is for: ${data.purpose} The circuit has the other ways to take it away.`]);
  return steps;
}

/** What became of a token that is isolated, or carries the first token's id. */
function movedWords(view, name) {
  const number = Number(name.split(" ")[1]);
  const { layer } = view.data;
  const { intact, reading, text } = view.sides[0];
  const [layers, heads, length] = reading.received.shape;
  let turned = 0;
  for (let head = 0; head < layers * heads; head++) turned += reading.attention[head * length + number] > READS;
  const [before, after] = [intact, reading].map((one) => one.norm[layer][number]);
  const isolated = name.endsWith("isolated");
  const made = after >= intact.norm[layer][0] / 2;
  const done = isolated ? "now sees only itself, as the first token does" : `now carries the id of ${quoted(text.tokens[0])}`;
  const cause = isolated ? "Seeing only itself" : "This token";
  return `The tour pressed "${name}": ${quoted(text.tokens[number])} ${done}. After layer ${layer} its norm goes from ${shown(before)} to ${shown(after)}, and ${turned} heads turn to it. ${cause} ${made ? "makes" : "does not make"} a sink in this model.`;
}

/** Whether the tour was shown in this browser; from then on it was. */
function tourSeen() {
  try {
    const seen = localStorage.getItem(LAST_TOUR) !== null;
    localStorage.setItem(LAST_TOUR, "");
    return seen;
  } catch { // a browser that keeps nothing
    return true;
  }
}

/** Point at the parts of a page one after the other, and press switches; Escape or the button ends the tour. */
async function tour(view, number = 0) {
  const { root } = view;
  const steps = tourSteps(view.data);
  root.querySelectorAll(".tour").forEach((one) => one.remove());
  root.querySelectorAll(".pointed").forEach((one) => one.classList.remove("pointed"));
  if (number >= steps.length) {
    press(view, "intact");
    root.querySelector("#tour").focus();
    return;
  }
  const [place, variant, words] = steps[number];
  const last = number === steps.length - 1;
  await press(view, variant);
  const said = typeof words === "function" ? words(view) : words;
  const next = element("button", { type: "button", class: "tool", onclick: () => tour(view, number + 1) }, last ? "Done" : "Next");
  const end = () => tour(view, steps.length);
  const more = element("span", { class: "soft" }, "More: docs/index.md");
  const box = element("div", { class: "tour", role: "dialog", "aria-label": "Tour", onkeydown: (event) => event.key === "Escape" && end() },
    element("p", {}, `${number + 1} of ${steps.length}: ${said}`), next, last ? more : element("button", { type: "button", class: "tool", onclick: end }, "End the tour"));
  const pointed = root.querySelector(place);
  pointed.classList.add("pointed");
  pointed.before(box);
  next.focus({ preventScroll: true });
  box.scrollIntoView({ block: "nearest" });
}

/** Choose a variant as a click on its switch does. */
async function press(view, name) {
  const input = view.root.querySelector(`#variant-${view.variants.indexOf(name)}`);
  if (input) input.checked = true;
  await view.choose(name);
}

// Parts of a view that change little: the circuit, what the model writes, the tour.

const LAST_TOUR = "sinkscope view: the tour was shown";

/** The steps of the tour: what is pointed at, the switch that is pressed before, and the words. */
function tourSteps(data) {
  const [made] = data.neurons.length ? data.switches : [];
  const random = data.switches.find((name) => name === data.control);
  const steps = [
    ["#strip", "intact", "Each box is a token; the model stores a vector for it, whose length is its norm. The darker the box, the larger the norm. The framed token is the attention sink."],
    [".heads", "intact", "Each square is a head: for each token it decides which earlier tokens are read, and with which shares, its attention. Dark heads give nearly all of it to the sink."],
  ];
  if (made) steps.push([".heads", made, `The tour pressed "${made}": the neurons that give the sink its norm are set to 0. The squares are paler: these heads look elsewhere, and the line at the top counts them.`]);
  if (made && random) steps.push([".heads", random, `Now "${random}": as many random neurons are set to 0, and the squares are dark again. This is the control: not any neurons make the sink, but these.`]);
  steps.push([".circuit", "intact", "The circuit of each spike: what marks the place, the neurons that write the large norm, and the heads of later layers that read it."]);
  return steps;
}

const FOLDED = 12; // parts of a step that are shown at once

/** The steps of a spike's circuit, from what marks the place to the heads that read it: a title and parts. */
function circuitSteps({ place, layers, peak, ratio, marks, writers, readers, sentence }) {
  const left = (part, then) => part.left === null ? null : `${percent(Math.max(0, part.left))} left${then}`;
  const run = layers[0] === layers[1] ? `layer ${layers[0]}` : `layers ${layers[0]}-${layers[1]}`;
  const spike = { name: "spike", words: [`a large norm in ${run}:`, `${Number(ratio.toPrecision(2))} times the typical one after layer ${peak}`] };
  const heads = readers.length === 1 ? `The head that reads ${place}` : `The ${readers.length} heads that read ${place}`;
  const steps = [
    ["What marks the place; and what is left of the spike if it is replaced there", marks.map((part) => ({ name: part.name, words: [left(part, "")] }))],
    [`What writes the spike, with its share. ${sentence}`, writers.map((part) => ({ name: part.name, words: [`${percent(part.share)} of it`, left(part, " without it")] }))],
    ["", [spike]],
    [`${heads}; and the attention that it gets from each`, readers.map((part) => ({ name: part.name, words: [percent(part.share)] }))],
  ];
  return steps.filter(([, parts]) => parts.length);
}

/** Draw the circuit of a view into its panel, one spike below the other; a line leads from each step to the next. */
function drawCircuit(view, panel) {
  const children = [];
  view.data.circuit.forEach((spike, place) => {
    children.push(element("h3", {}, `Spike at ${spike.place}`));
    circuitSteps(spike).forEach(([title, parts], number) => {
      if (number) children.push(element("div", { class: "arrow", "aria-hidden": "true" }, "↓"));
      const buttons = parts.map((part) => circuitPart(view, spike, part, `part-${place}-${number}-${part.name.replaceAll(" ", "-")}`));
      const step = element("div", { class: "step", role: "group", "aria-label": title || "spike" }, title ? element("p", { class: "soft" }, title) : null, ...buttons.slice(0, FOLDED));
      if (parts.length > FOLDED) step.append(element("details", {}, element("summary", {}, `${parts.length - FOLDED} more`), ...buttons.slice(FOLDED)));
      roving(step)();
      children.push(step);
    });
  });
  panel.replaceChildren(...children, element("p", { class: "soft" }, view.data.circuit_sentence));
}

function circuitPart(view, spike, { name, words }, id) {
  const chosen = headName(view.head) === name ? " chosen" : "";
  const lines = words.filter(Boolean).map((line) => element("small", {}, line));
  return element("button", { class: `part${chosen}`, type: "button", id, onclick: () => view.pickPart(name, spike.peak) }, name, ...lines);
}

/** What a variant of the model wrote without the guard and with it, with a mark where the guard took copies back. */
function writtenSides(sides, variant) {
  const shown = sides.map(({ name, pieces, summary }) => {
    const text = element("p", { class: "written" }, pieces[0]);
    for (const piece of pieces.slice(1)) text.append(element("mark", {}, "copies taken back"), piece);
    return element("section", {}, element("h2", {}, `The model ${name}`), text, element("p", { class: "soft" }, summary));
  });
  return [element("p", {}, variant === "intact" ? "The model continues: " : `The model, ${variant}, continues: `, element("q", {}, sides[0].prompt)), element("div", { class: "sides" }, ...shown)];
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
  const next = element("button", { type: "button", class: "tool", onclick: () => tour(view, number + 1) }, last ? "Done" : "Next");
  const end = () => tour(view, steps.length);
  const more = element("span", { class: "soft" }, "More: docs/learn.md");
  const box = element("div", { class: "tour", role: "dialog", "aria-label": "Tour", onkeydown: (event) => event.key === "Escape" && end() },
    element("p", {}, `${number + 1} of ${steps.length}: ${words}`), next, last ? more : element("button", { type: "button", class: "tool", onclick: end }, "End the tour"));
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

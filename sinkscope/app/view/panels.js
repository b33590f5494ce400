// Parts of a view that change little: the circuit, what the model writes, the tour.

const LAST_TOUR = "sinkscope view: the tour was shown";
const TOUR = [
  ["#strip", "Each box is a token, and darker is a larger norm. The framed token is the sink: its norm is a spike, and heads attend to it."],
  [".switches", "Here you switch off what makes the sink, or a random part, the control. The headline says what changed."],
  [".panels", "A click on a head shows where each token looks, before and after. The circuit names who marks, makes and reads the sink."],
];

/** The parts of each step of a circuit, from the heads that mark to the heads that read. */
function circuitSteps({ circuit, layer }) {
  const of = (role) => circuit.filter((row) => row.role === role);
  const left = (row) => `${percent(row.left)} left without it${row.control === undefined ? "" : ` (${row.contrast}: ${percent(row.control)})`}`;
  const part = (row, what) => ({ name: row.subject, words: [what, left(row)] });
  const spike = of("makes");
  const others = of("carries").filter((row) => !spike.some((made) => made.subject === row.subject));
  const marks = [...of("marks"), ...others].slice(0, 4).map((row) => part(row, row.place));
  const copies = of("marks copies").slice(0, 3).map((row) => part(row, "a repetition"));
  const readers = of("reads");
  const steps = [
    ["What marks the sink or a repetition: share of the spike left without each", [...marks, ...copies]],
    ["Sink neurons", spike.map((row) => part(row, row.place))],
    ["", spike.length ? [{ name: "spike", words: [`a large norm after layer ${layer}`] }] : []],
    [`All ${readers.length} heads that read the sink: attention left without what they read`, readers.map((row) => ({ name: row.subject, words: [`${percent(row.left)} left`] }))],
  ];
  return steps.filter(([, parts]) => parts.length);
}

/** Draw the circuit of a view into its panel; a line leads from each step to the next. */
function drawCircuit(view, panel) {
  if (!view.data.circuit) {
    const words = view.ask ? "The circuit is being traced. This takes a few seconds." : "The circuit was not measured.";
    panel.replaceChildren(element("p", { class: "soft" }, words));
    return;
  }
  const children = [];
  circuitSteps(view.data).forEach(([title, parts], number) => {
    if (number) children.push(element("div", { class: "arrow", "aria-hidden": "true" }, "↓"));
    const step = element("div", { class: "step", role: "group", "aria-label": title || "spike" }, title ? element("p", { class: "soft" }, title) : null, ...parts.map((part) => circuitPart(view, part)));
    roving(step)();
    children.push(step);
  });
  panel.replaceChildren(...children, element("p", { class: "soft" }, view.data.circuit_sentence));
}

function circuitPart(view, { name, words }) {
  const chosen = headName(view.head) === name ? " chosen" : "";
  const lines = words.filter(Boolean).map((line) => element("small", {}, line));
  return element("button", { class: `part${chosen}`, type: "button", id: `part-${name}`, onclick: () => view.pickPart(name) }, name, ...lines);
}

/** What the model wrote with and without the guard, above barcodes of one head. */
async function generationSides(made) {
  const sides = [];
  for (const side of made.sides) {
    const text = element("div", { class: "written", tabindex: 0, role: "region", "aria-label": side.name });
    side.tokens.forEach((token, step) => {
      if (side.alarms.includes(step)) text.append(element("mark", {}, "⚠ alarm"));
      text.append(token);
    });
    const alarms = side.alarms.length ? `Orange: alarms (step ${side.alarms.join(", ")}).` : "";
    const values = await unpacked(side.picture);
    const sorted = Float32Array.from(values).sort();
    const [rows, columns] = side.picture.shape;
    const barcode = heatmap({
      id: `barcode-${sides.length}`, label: `Barcode of ${side.head} ${side.name}`, values, rows, columns, firstRow: side.first_step, firstColumn: side.first_position,
      high: Math.max(0.05, sorted[Math.floor(0.99 * sorted.length)]), across: "position", down: "step",
      lines: side.alarms.map((step) => step - side.first_step).filter((row) => row >= 0 && row < rows),
    });
    sides.push(element("section", {}, element("h2", {}, side.name), text,
      element("p", { class: "soft" }, `Barcode of ${side.head}: what it attends to, step by step. ${alarms}`), barcode));
  }
  return [element("p", { class: "sentence" }, made.sentence),
    element("p", { class: "soft" }, "The prompt: ", element("code", {}, made.prompt)), element("div", { class: "sides" }, ...sides)];
}

/** How far down a written text its first alarm is, with a line before it; 0 without an alarm. */
function alarmIn(text) {
  const alarm = text.querySelector("mark");
  return alarm ? alarm.offsetTop - text.offsetTop - 40 : 0;
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

/** Point at the parts of a page one after the other; Escape or the button ends the tour. */
function tour(root, number = 0) {
  root.querySelectorAll(".tour").forEach((one) => one.remove());
  root.querySelectorAll(".pointed").forEach((one) => one.classList.remove("pointed"));
  if (number >= TOUR.length) {
    root.querySelector("#tour").focus();
    return;
  }
  const [place, words] = TOUR[number];
  const last = number === TOUR.length - 1;
  const next = element("button", { type: "button", class: "tool", onclick: () => tour(root, number + 1) }, last ? "Done" : "Next");
  const end = () => tour(root, TOUR.length);
  const box = element("div", { class: "tour", role: "dialog", "aria-label": "Tour", onkeydown: (event) => event.key === "Escape" && end() },
    element("p", {}, `${number + 1} of ${TOUR.length}: ${words}`), next, last ? null : element("button", { type: "button", class: "tool", onclick: end }, "End the tour"));
  const pointed = root.querySelector(place);
  pointed.classList.add("pointed");
  pointed.before(box);
  next.focus({ preventScroll: true });
  box.scrollIntoView({ block: "nearest" });
}

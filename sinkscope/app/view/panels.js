// The circuit of a view.

/** The parts of each step of a circuit, from the heads that mark to the heads that read. */
function circuitSteps({ circuit, layer }) {
  const of = (step) => circuit.filter((edge) => edge.step === step);
  const lost = ({ necessity, necessity_control: control }) => (necessity === null ? "" : `${percent(necessity)} lost${control === null ? "" : ` (random: ${percent(control)})`}`);
  const brings = (edge) => (edge.sufficiency === null ? "" : `alone: ${percent(edge.sufficiency)}`);
  const part = (edge, what) => ({ name: edge.source, words: [what, lost(edge), brings(edge)] });
  const others = new Map(of("readers").filter((edge) => edge.source !== "spike").map((edge) => [edge.sink + edge.source, edge]));
  const marks = [...of("mark"), ...others.values()].slice(0, 4).map((edge) => part(edge, edge.sink));
  const repeated = of("repetition").slice(0, 3).map((edge) => part(edge, "a repetition"));
  const neurons = of("neurons");
  const readers = of("readers");
  const writes = neurons.length || readers.some((edge) => edge.source === "spike");
  const steps = [
    ["What marks the sink or a repetition: share of the spike lost without each, and made by it alone", [...marks, ...repeated]],
    ["What makes a norm that stands out before these neurons", of("early spike").slice(0, 3).map((edge) => part(edge, ""))],
    ["Sink neurons", neurons.map((edge) => part(edge, ""))],
    ["", writes ? [{ name: "spike", words: [`a large norm after layer ${layer}`] }] : []],
    [`All ${readers.length} heads that read the sink: attention lost without what they read`, readers.map((edge) => ({ name: edge.target, words: [lost({ ...edge, necessity_control: null })] }))],
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

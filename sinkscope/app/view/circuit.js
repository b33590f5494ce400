// The circuit of a view: a block for each spike, and a page for each neuron that writes one.

/** A bar from 0 to a share; below zero it has the other colour. */
function bar(share) {
  const made = element("span", { class: share < 0 ? "bar below" : "bar" });
  made.style.setProperty("--v", Math.min(100, Math.round(1000 * Math.abs(share)) / 10));
  return made;
}

const run = ([first, last]) => (first === last ? `layer ${first}` : `layers ${first}-${last}`);
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const times = (ratio) => `${Number(ratio.toPrecision(ratio < 100 ? 2 : 3))} times`;
const share = (value) => percent(value).replace(/^-0%/, "0%");
const SHOWN = 0.05; // share from which a component is listed

/** A part in a sentence, from its name in a result; those of a set that is judged as one are joined. */
function partName(name) {
  const one = (part) => part.replace(/^embedding$/, "the embedding").replace(/^(\w+) (\d+)$/, (_, kind, layer) => `the ${kind === "mlp" ? "MLP" : kind} of layer ${layer}`);
  return name.split(" and ").map(one).join(" and ");
}

/** The rows of a table of a spike. */
const rowsOf = ({ found: { rows } }, table) => rows.filter((row) => row.table === table);
/** The row of a name; undefined if there is none. */
const rowOf = (one, table, name) => rowsOf(one, table).find((row) => row.name === name);
/** A number of a row; undefined if it was not read. */
const numberOf = (row, name) => row?.numbers[name]?.value;
const readersOf = (one) => numberOf(rowOf(one, "spike", "read by"), "heads");
const layerOf = (name) => name.replace(/\.N\d+$/, "");

/** The neurons with pages that write a spike or that it needs, each with its share and what remains without it alone. */
function writingNeurons(view, spike) {
  return [...view.pages.keys()].map((name) => {
    const [written, alone] = [rowOf(spike, "writers", name), rowOf(spike, "alone", name)];
    const random = alone && spike.random.find((row) => layerOf(row.name) === layerOf(name));
    return { name, share: numberOf(written, "share"), left: numberOf(alone, "left"), needed: spike.found.needed.includes(name), alone, random };
  }).filter(({ share: written, alone, needed }) => written !== undefined || alone || needed);
}

/** The blocks of all spikes; that with most readers is open at first. */
class Circuit {
  constructor(view) {
    this.view = view;
    const { circuit, circuit_sentence: none } = view.data;
    const most = Math.max(...circuit.map(readersOf));
    view.unfolded ||= new Set([circuit.findIndex((spike) => readersOf(spike) === most)]);
    this.cells = [];
    const blocks = circuit.map((spike, number) => this.block(spike, number));
    this.element = element("section", {}, element("h2", {}, "Circuit"), element("div", { class: "circuit" }, ...(blocks.length ? blocks : [element("p", {}, none)])));
  }

  /** Mark the chosen head in each grid. */
  draw() {
    const chosen = headName(this.view.head);
    for (const cell of this.cells) cell.classList.toggle("chosen", cell.dataset.head === chosen);
  }

  block(one, number) {
    const { unfolded } = this.view;
    const { found: spike, card } = one;
    const component = (row) => ({ name: partName(row.name), share: numberOf(row, "share"), needed: spike.needed.includes(row.name) });
    const mark = (row) => ({ name: partName(row.name), left: numberOf(row, "left"), others: numberOf(row, "others") });
    const writers = rowsOf(one, "components").map(component).filter((part) => Math.abs(part.share) >= SHOWN || part.needed);
    const [norm, count] = [rowOf(one, "spike", "norm"), readersOf(one)];
    const heads = count ? `${counted(count, "head")} read${count === 1 ? "s" : ""} it` : "no head reads it";
    const block = element("details", { class: "spike", id: `spike-${number}`, open: unfolded.has(number), ontoggle: () => (block.open ? unfolded.add(number) : unfolded.delete(number)) },
      element("summary", {}, element("h3", {}, `${spike.place.words[0].toUpperCase()}${spike.place.words.slice(1)}, ${run(spike.layers)}`),
        element("span", { class: "soft" }, `${this.ratio(norm)}; ${heads}`)),
      element("p", { class: "soft" }, `The norm is ${shown(numberOf(norm, "norm_after"))} after layer ${spike.peak}, from ${shown(numberOf(norm, "norm_before"))}${inDimensions(spike.dims)}. `,
        element("button", { type: "button", class: "tool", onclick: () => this.view.pickLayer(spike.peak) }, "Show it on the text")),
      this.parts("Components that write it: their shares", writers),
      this.parts("Neurons that write it: their shares of it, and what remains of the spike without each alone", writingNeurons(this.view, one)),
      this.parts("What takes it away again", rowsOf(one, "erasers").map(component)),
      this.parts("What marks the place, and what remains of the spike if that is replaced there", rowsOf(one, "marks").map(mark)),
      this.card(card),
      count ? this.readers(one, number) : null);
    return block;
  }

  /** Labels with numbers, as the command prints them. */
  card({ rows }) {
    const lines = rows.map(([label, said]) => element("tr", { class: `card-${label.split(" ")[0]}` }, element("th", { scope: "row" }, `${label} `), element("td", {}, said)));
    return element("table", { class: "outcomes" }, element("tbody", {}, ...lines));
  }

  /** How far the norm stands out; twice, where dimensions that are large at all positions hide the spike. */
  ratio(norm) {
    const [ratio, beside] = [numberOf(norm, "ratio"), numberOf(norm, "ratio_beside")];
    if (ratio >= 3) return `${times(ratio)} the typical norm`;
    return `${times(ratio)} the typical norm, or ${times(beside)} without dimensions that are large at all positions`;
  }

  /** A title, and a row for each part: its name, a bar, and numbers. */
  parts(title, parts) {
    if (!parts.length) return null;
    const rows = parts.map((part) => {
      const words = [];
      if (part.share !== undefined) words.push(share(part.share));
      if (part.left !== undefined) words.push(`${share(part.left)} remains`);
      if (typeof part.others === "number") words.push(`others: ${percent(part.others)}`);
      if (part.needed) words.push("needed");
      const line = part.share ?? Math.max(0, part.left ?? 0);
      return element("li", {}, this.name(part.name), bar(line), element("span", { class: "soft" }, words.join("; ")));
    });
    return element("div", {}, element("h4", {}, title), element("ul", { class: "parts" }, ...rows));
  }

  /** A name; of a neuron it opens its page, of a head its rows. */
  name(name) {
    const head = headOf(name);
    const open = this.view.pages.has(name) ? () => this.view.openNeuron(name) : head && this.shows(head) ? () => this.view.pickHead(head) : null;
    return open ? element("button", { type: "button", class: "part", onclick: open }, name) : element("span", {}, name);
  }

  shows([layer, head]) {
    const [layers, heads] = this.view.reading.received.shape;
    return layer < layers && head < heads;
  }

  /** The heads that can read the spike, a row for each layer. */
  readers(one, number) {
    const { found: spike, attention, first_reader: first } = one;
    const width = attention[0].length;
    const grid = element("div", { class: "heads small", role: "group", "aria-label": `Heads that read ${spike.place.words}` });
    grid.style.gridTemplateColumns = `max-content repeat(${width}, minmax(0, 1.4rem))`;
    attention.forEach((shares, row) => {
      const layer = first + row;
      grid.append(element("span", { class: "label" }, `L${layer}`));
      shares.forEach((value, head) => {
        const title = `${headName([layer, head])}: ${percent(value)}`;
        const cell = element("button", { class: `head${value > READS ? " reader" : ""}`, type: "button", id: `reads-${number}-${layer}-${head}`, title, "aria-label": title, "data-head": headName([layer, head]), onclick: () => this.view.pickHead([layer, head]) });
        cell.style.setProperty("--v", Math.round(100 * value));
        this.cells.push(cell);
        grid.append(cell);
      });
    });
    roving(grid, () => width)();
    const all = attention.length * width;
    return element("div", {}, element("h4", {}, `Heads that read it: ${readersOf(one)} of ${all}`),
      element("p", { class: "soft" }, `Mean attention to the place on the typical text, one row for each layer; underlined if above ${percent(READS)}.`), grid);
  }
}

/** What measurements of other packages say of the model, a folded block each; null if none is installed. */
function otherMeasurements({ others }) {
  if (!others.length) return null;
  const blocks = others.map(({ name, sentence, columns }) => {
    const heads = Object.keys(columns).map((column) => element("th", { scope: "col" }, column.replaceAll("_", " ")));
    const rows = (Object.values(columns)[0] || []).map((_, row) => element("tr", {}, ...Object.values(columns).map((cells) => element("td", {}, cells[row]))));
    const table = element("table", { class: "outcomes" }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
    return element("details", { class: "spike" }, element("summary", {}, element("h3", {}, name), element("span", { class: "soft" }, sentence)), heads.length ? table : null);
  });
  return element("section", {}, element("h2", {}, "Other measurements"), element("div", { class: "circuit", id: "others" }, ...blocks));
}

function inDimensions(dims) {
  return dims.length ? `, mostly in dimension${dims.length > 1 ? "s" : ""} ${dims.join(" and ")}` : "";
}

/** The page of a neuron, over the page of the view: what it writes, where it fires, what its removal does. */
function neuronPage(view, name) {
  const page = view.pages.get(name);
  const spikes = view.data.circuit.map((spike) => [spike, writingNeurons(view, spike).find((one) => one.name === name)]).filter(([, one]) => one);
  const close = () => dialog.close();
  const dialog = element("dialog", { class: "neuron", "aria-label": `Neuron ${name}`, onclose: () => view.closeNeuron(dialog), onclick: (event) => event.target === dialog && close() },
    element("div", { class: "row" }, element("h2", {}, `Neuron ${name}`), view.ask ? element("button", { type: "button", class: "tool", onclick: () => (close(), view.toggle(name)) }, view.off.has(name) ? "Switch it on" : "Switch it off") : null,
      element("button", { type: "button", class: "tool", onclick: close }, "Close")),
    ...spikes.map(writesIn), onText(view, page), onTypicalText(page), withoutNeuron(name, spikes));
  return dialog;
}

function writesIn([{ found: spike }, { share: value }]) {
  const written = value === undefined ? "is needed for" : `writes ${share(value)} of`;
  return element("p", {}, `In ${run(spike.layers)}, it ${written} the spike at ${spike.place.words}${inDimensions(spike.dims)}.`);
}

/** Its activation at each token of the shown text: in the intact model, and under the switch. */
function onText(view, { name }) {
  const text = view.now;
  const place = view.data.neuron_pages.findIndex((page) => page.name === name);
  const intact = text.variants[0].activations[place];
  const top = Math.max(...intact.map(Math.abs)) || 1;
  const sentence = (values, model) => {
    const sizes = values.map(Math.abs);
    const highest = sizes.indexOf(Math.max(...sizes));
    if (!sizes[highest]) return `Its activation in the ${model} is 0 at each token.`;
    return `Its largest activation in the ${model} is ${shown(values[highest])}, at token ${highest}, ${quoted(text.tokens[highest])}.`;
  };
  const made = [element("h3", {}, `On the shown text${view.data.texts.length > 1 ? `, ${text.name}` : ""}`),
    element("p", { class: "soft" }, `${sentence(intact, "intact model")} The bluer, the larger; orange: below zero.`), activationStrip(text, intact, top)];
  if (view.variant === "intact") return element("div", {}, ...made);
  const changed = view.reading.activations[place];
  if (!changed) made.push(element("p", { class: "soft" }, "Activations of experts are shown for the intact model only."));
  else made.push(element("p", { class: "soft" }, `${sentence(changed, `model "${view.variant}"`)} The colours mean the same.`), activationStrip(text, changed, top));
  return element("div", {}, ...made);
}

/** The tokens of a text under activations, of which `top` has the full colour. */
function activationStrip(text, values, top) {
  const tokens = text.tokens.map((token, number) => {
    const value = values[number];
    const part = Math.min(1, Math.abs(value) / top);
    const classes = ["token", value < 0 ? "below" : "", part > 0.55 ? "strong" : ""].filter(Boolean).join(" ");
    const box = element("span", { class: classes, title: shown(value) }, visible(token));
    box.style.setProperty("--v", Math.round(100 * part));
    return box;
  });
  return element("div", { class: "strip" }, ...tokens);
}

/** Its largest activations on the typical text. */
function onTypicalText({ largest, median, positions }) {
  const top = Math.abs(largest[0]?.value) || 1;
  const rows = largest.map(({ value, before, token, after, texts }) => element("tr", {}, element("td", {}, shown(value)), element("td", {}, bar(value / top)),
    element("td", {}, element("span", { class: "soft" }, before), element("mark", {}, visible(token)), element("span", { class: "soft" }, after), texts > 1 ? ` (in ${texts} texts)` : "")));
  return element("div", {}, element("h3", {}, `Its ${largest.length} largest activations on the typical text`),
    element("p", { class: "soft" }, `Its median over ${positions} positions is ${shown(median)}. Texts that begin alike count once.`),
    element("table", { class: "largest" }, element("tbody", {}, ...rows)));
}

/** What remains of each spike without it, alone and with what else is needed, beside random neurons. */
function withoutNeuron(name, spikes) {
  const rows = [];
  for (const [one, { alone, random }] of spikes) {
    const { place, layers, needed: set } = one.found;
    const [start, heads] = [rows.length, readersOf(one)];
    const outcome = (words, row) => row && row.numbers.left && rows.push([words, row]);
    outcome("it alone", alone);
    outcome(`random: ${random?.name}`, random);
    if (set.includes(name) && set.length > 1) {
      outcome(set.length > 4 ? `with ${set.length - 1} other needed neurons` : `with ${set.filter((part) => part !== name).join(", ")}`, rowOf(one, "effects", "at place"));
    }
    if (set.includes(name)) outcome("the busiest others", rowOf(one, "controls", "busiest"));
    if (rows.length > start) rows.splice(start, 0, [`The spike at ${place.words}, ${run(layers)}: ${counted(heads, "head")} read${heads === 1 ? "s" : ""} it`, null]);
  }
  const title = element("h3", {}, "What its removal does");
  if (!rows.length) return element("div", {}, title, element("p", { class: "soft" }, "It was not removed."));
  const head = ["removed", "remains", "heads", "loss"].map((words) => element("th", { scope: "col" }, words));
  const lines = rows.map(([words, row]) => {
    if (!row) return element("tr", {}, element("th", { scope: "rowgroup", colspan: 4 }, words));
    const [left, attending, loss] = ["left", "heads", "loss"].map((number) => numberOf(row, number));
    const cells = [words, share(left), attending ?? 0, loss === undefined ? "not measured" : `${loss.toFixed(2)} nats`];
    return element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell))));
  });
  return element("div", {}, title, element("table", { class: "outcomes" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...lines)));
}

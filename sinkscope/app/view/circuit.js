// The circuit of a view: a block for each spike.

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
const NAMED = 0.1; // and a neuron

/** The name of a component in a sentence, from its key. */
function componentName({ kind, layer }) {
  return layer === null ? `the ${kind}` : `the ${kind === "mlp" ? "MLP" : kind} of layer ${layer}`;
}

/** The name of a neuron, from its key. */
const neuronName = ({ layer, expert, neuron }) => `L${layer}${expert === null ? "" : `.E${expert}`}.N${neuron}`;
/** Whether two keys are of one part. */
const isSame = (one, other) => JSON.stringify(one) === JSON.stringify(other);
/** A number of a row; undefined if it was not read. */
const numberOf = (row, name) => row[name]?.value;
const readersOf = ({ found: { size } }) => numberOf(size, "heads");

/** The neurons that a spike needs, or that write a tenth of it, each with its share and what remains without it alone. */
function writingNeurons({ writers }) {
  const named = writers.filter((row) => row.role === "needed" || Math.abs(numberOf(row, "share")) >= NAMED);
  return named.map((row) => ({ name: neuronName(row.key), share: numberOf(row, "share"), left: numberOf(row, "left"), needed: row.role === "needed" }));
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
    const { found: spike, lines } = one;
    const isNeeded = (key) => spike.needed.some((part) => isSame(part, key));
    const component = (row) => ({ name: componentName(row.key), share: numberOf(row, "share"), needed: isNeeded(row.key) });
    const mark = (row) => ({ name: row.key.map(componentName).join(" and "), left: numberOf(row, "left"), others: numberOf(row, "others") });
    const writers = spike.components.map(component).filter((part) => Math.abs(part.share) >= SHOWN || part.needed);
    const [size, count] = [spike.size, readersOf(one)];
    const heads = count ? `${counted(count, "head")} read${count === 1 ? "s" : ""} it` : "no head reads it";
    const block = element("details", { class: "spike", id: `spike-${number}`, open: unfolded.has(number), ontoggle: () => (block.open ? unfolded.add(number) : unfolded.delete(number)) },
      element("summary", {}, element("h3", {}, `${spike.place.words[0].toUpperCase()}${spike.place.words.slice(1)}, ${run(spike.layers)}`),
        element("span", { class: "soft" }, `${this.ratio(size)}; ${heads}`)),
      element("p", { class: "soft" }, `The norm is ${shown(numberOf(size, "norm_after"))} after layer ${spike.peak}, from ${shown(numberOf(size, "norm_before"))}${inDimensions(spike.dims)}. `,
        element("button", { type: "button", class: "tool", onclick: () => this.view.pickLayer(spike.peak) }, "Show it on the text")),
      this.parts("Components that write it: their shares", writers),
      this.parts("Neurons that write it: their shares of it, and what remains of the spike without each alone", writingNeurons(spike)),
      this.parts("What takes it away again", spike.erasers.map(component)),
      this.parts("What marks the place, and what remains of the spike if that is replaced there", spike.marks.map(mark)),
      this.outcomes(lines),
      count ? this.readers(one, number) : null);
    return block;
  }

  /** Labels with numbers, as the command prints them. */
  outcomes(lines) {
    const rows = lines.map(([label, words]) => element("tr", {}, element("th", { scope: "row" }, `${label} `), element("td", {}, words)));
    return element("table", { class: "outcomes" }, element("tbody", {}, ...rows));
  }

  /** How far the norm stands out. */
  ratio(size) {
    return `${times(numberOf(size, "ratio"))} the typical norm`;
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

  /** A name; of a head it opens its rows. */
  name(name) {
    const head = headOf(name);
    const open = () => this.view.pickHead(head);
    return head && this.shows(head) ? element("button", { type: "button", class: "part", onclick: open }, name) : element("span", {}, name);
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

/** What measurements of other packages say of the model, a line each; null if none is installed. */
function otherMeasurements({ others }) {
  const lines = Object.entries(others).map(([name, said]) => element("p", {}, `${name}: ${said}`));
  if (!lines.length) return null;
  return element("section", {}, element("h2", {}, "Other measurements"), element("div", { id: "others" }, ...lines));
}

function inDimensions(dims) {
  return dims.length ? `, mostly in dimension${dims.length > 1 ? "s" : ""} ${dims.join(" and ")}` : "";
}

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

/** The neurons that a spike needs, or that write a tenth of it, each with its share and what remains without it alone. */
function writingNeurons(spike) {
  const named = rowsOf(spike, "writers").filter((row) => row.note === "needed" || Math.abs(numberOf(row, "share")) >= NAMED);
  return named.map((row) => ({ name: row.name, share: numberOf(row, "share"), left: numberOf(rowOf(spike, "alone", row.name), "left"), needed: row.note === "needed" }));
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
      this.parts("Neurons that write it: their shares of it, and what remains of the spike without each alone", writingNeurons(one)),
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

  /** How far the norm stands out. */
  ratio(norm) {
    return `${times(numberOf(norm, "ratio"))} the typical norm`;
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

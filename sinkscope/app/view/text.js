// What a view shows of its texts: tokens, heads, and the rows of one head. Each part draws itself again when told.

/** The tokens of each shown text under the chosen colour, and what comes next. */
class Strips {
  constructor(view) {
    this.view = view;
    this.strips = element("div", { class: "strips", id: "strip" });
    this.readout = element("p", { class: "soft readout", id: "readout" });
    this.moves = element("div", { class: "row", id: "moves" });
    this.element = element("div", {}, this.strips, this.readout, this.moves);
  }

  /** What can be done to the chosen token, where Python answers. */
  offer() {
    const { view } = this;
    const token = view.picked;
    this.moves.replaceChildren();
    if (!view.ask || !token || !view.data.switches.some((name) => name.startsWith("token "))) return;
    for (const [words, what] of [["Isolate", "isolated"], ["Give the first token's id to", "with the first id"]]) {
      const id = what === "isolated" ? "isolate" : "place";
      this.moves.append(element("button", { type: "button", class: "tool", id, onclick: () => view.move(`token ${token} ${what}`) }, `${words} token ${token}`));
    }
  }

  draw() {
    const { sides, data } = this.view;
    const wanted = sides.map((side) => data.texts.indexOf(side.text)).join();
    if (this.strips.dataset.texts !== wanted) {
      this.strips.dataset.texts = wanted;
      this.strips.replaceChildren(...sides.flatMap((side, place) => this.strip(side, place)));
    }
    sides.forEach((side, place) => this.colour(side, place));
    this.tell(0, this.view.picked);
    this.offer();
  }

  strip({ text }, place) {
    const id = place ? "other" : "token";
    const buttons = text.tokens.map((token, number) => element("button", {
      class: "token", type: "button", id: `${id}-${number}`,
      onclick: () => this.view.pickToken(number), onpointerenter: () => this.point(place, number), onfocus: () => this.tell(place, number),
    }, visible(token)));
    const group = element("div", { class: "strip", role: "group", "aria-label": `Tokens of ${text.name}`, onpointerleave: () => this.view.rows.rest() }, ...buttons);
    group.mark = roving(group);
    const name = this.view.sides.length > 1 ? [element("p", { class: "soft" }, `${text.name}:`)] : [];
    return [...name, group, element("p", { class: "soft", id: place ? "following-other" : "following" })];
  }

  colour(side, place) {
    const group = this.strips.querySelectorAll(".strip")[place];
    const values = this.values(side);
    const chosen = Math.min(this.view.picked, values.length - 1);
    [...group.children].forEach((button, number) => {
      const [value, share] = values[number];
      const part = Math.max(0, Math.min(1, share));
      button.style.setProperty("--v", Math.round(100 * part));
      button.classList.toggle("strong", part > 0.55);
      button.classList.toggle("sink", side.text.spikes.includes(number));
      button.classList.toggle("chosen", number === chosen);
      button.setAttribute("aria-label", `token ${number}, ${side.text.tokens[number]}, ${shown(value)}`);
    });
    group.mark();
    const before = following(side.intact);
    const after = side.reading === side.intact ? "" : ` Now: ${following(side.reading)}.`;
    group.nextElementSibling.textContent = before ? `Next token, intact: ${before}.${after}` : "";
  }

  /** A value and a share from 0 to 1 for each token of a shown text. */
  values({ text, intact, reading, rows }) {
    const { colour, data, layer, query } = this.view;
    const length = text.tokens.length;
    if (colour === "norm") {
      const typical = data.typical_norm[layer] || 1;
      const top = Math.log(Math.max(...intact.norm[layer]) / typical) || 1;
      return reading.norm[layer].map((value) => [value, Math.log(value / typical) / Math.max(top, 1)]);
    }
    if (colour === "attention") {
      const [, heads] = reading.received.shape;
      return text.tokens.map((_, token) => {
        let sum = 0;
        for (let head = 0; head < heads; head++) sum += reading.attention[(layer * heads + head) * length + token];
        return [sum / heads, Math.sqrt(sum / heads)];
      });
    }
    const line = Math.min(query, length - 1) * length; // a row of a head
    return text.tokens.map((_, token) => {
      const value = rows ? rows[line + token] : 0;
      return [value, Math.sqrt(value)];
    });
  }

  /** The pointer is on a token: say its value, and show what it reads and who reads it. */
  point(place, number) {
    this.tell(place, number);
    this.view.rows.point(place, number);
  }

  /** Say the value of one token. */
  tell(place, number) {
    const { sides, data, colour, layer, head, query, variant } = this.view;
    const { text } = sides[place];
    const [value] = this.values(sides[place])[number];
    const words = {
      norm: `norm ${shown(value)} after layer ${layer}, ${shown(value / data.typical_norm[layer])} times the typical one`,
      attention: `${percent(value)} of the attention in layer ${layer}`,
      row: `${percent(value)} of the attention of ${headName(head)} at token ${query}`,
    }[colour];
    const where = variant === "intact" ? "" : " in the intact model";
    const sink = text.spikes.includes(number) ? `; an attention sink${where}` : "";
    this.readout.textContent = `Token ${number}, ${quoted(text.tokens[number])}: ${words}${sink}.`;
  }
}

/** The likeliest next tokens of a variant, in words. */
function following(variant) {
  return (variant.following || []).map(([token, probability]) => `${quoted(token)} ${probability < 0.005 ? "below 1%" : percent(probability)}`).join(", ");
}

/** The heads of the first text, a row for each layer, by their attention to the chosen token. */
class Heads {
  constructor(view) {
    this.view = view;
    const [layers, heads] = view.reading.received.shape;
    this.title = element("p", { class: "soft" });
    this.grid = element("div", { class: "heads", role: "group", "aria-label": "Heads" });
    this.grid.style.gridTemplateColumns = `max-content repeat(${heads}, minmax(0, 1fr))`;
    for (let layer = 0; layer < layers; layer++) {
      this.grid.append(element("span", { class: "label" }, `L${layer}`));
      for (let head = 0; head < heads; head++) {
        this.grid.append(element("button", { class: "head", type: "button", id: `head-${layer}-${head}`, onclick: () => view.pickHead([layer, head]) }));
      }
    }
    this.mark = roving(this.grid, () => heads);
    this.element = element("section", {}, element("h2", {}, "Heads"), this.title, this.grid);
  }

  draw() {
    const { reading, now, token, head: chosen, data } = this.view;
    const [, heads, length] = reading.received.shape;
    const stored = new Set(now.heads.map((head) => head.join()));
    this.title.textContent = `Mean attention to token ${token}, ${quoted(now.tokens[token])}; one row for each layer.${data.marks.length ? " Orange: heads that mark a token, so that the sink's neurons fire there." : ""} A click shows a head's rows.`;
    this.grid.querySelectorAll(".head").forEach((button, place) => {
      const head = [Math.floor(place / heads), place % heads];
      const value = reading.attention[place * length + token];
      button.style.setProperty("--v", Math.round(100 * value));
      button.classList.toggle("strong", value > 0.55);
      button.classList.toggle("chosen", head.join() === chosen.join());
      button.classList.toggle("marking", data.marks.includes(headName(head)));
      button.classList.toggle("unstored", !stored.has(head.join()));
      button.title = `${headName(head)}: ${percent(value)}`;
      button.setAttribute("aria-label", button.title);
    });
    this.mark();
  }
}

/** The rows of the chosen head in each shown text, intact and as the chosen model has them. */
class Rows {
  constructor(view) {
    this.view = view;
    this.title = element("h2", { id: "rows-title" });
    this.words = element("p", { class: "soft", id: "rows-text" });
    this.figures = element("div", { class: "pair" });
    this.read = element("p", { class: "words", id: "read-words" });
    this.cell = element("p", { class: "soft readout", id: "cell", "aria-live": "polite" });
    const saves = ["svg", "png"].map((kind) => element("button", { type: "button", class: "tool", id: `save-${kind}`, onclick: () => this.save(kind) }, `Save as ${kind.toUpperCase()}`));
    this.elements = [this.title, this.words, this.read, this.figures, this.cell, element("div", { class: "row" }, ...saves)];
  }

  draw() {
    const { sides, head } = this.view;
    const [{ rows }] = sides;
    this.title.textContent = `Rows of ${headName(head)}`;
    const focused = this.figures.contains(document.activeElement) && document.activeElement.id;
    this.figures.replaceChildren(...sides.flatMap((side, place) => this.pictures(side, place)));
    if (focused) this.figures.querySelector(`#${focused}`)?.focus();
    this.rest();
    if (rows) return;
    this.read.replaceChildren();
    this.words.textContent = "This file has no room for the rows of this head; a shorter text shows them.";
  }

  /** The pointer is on no token: show what the chosen one reads, or the last. */
  rest() {
    const { sides: [side], query } = this.view;
    this.figures.querySelectorAll(".pointer").forEach((one) => one.remove());
    if (side.rows) this.describe(side, query === null ? side.text.tokens.length - 1 : query);
  }

  /** Frame the line and the column of a token in the pictures of its text, and show what it reads on the words. */
  point(place, token) {
    const side = this.view.sides[place];
    const length = side.text.tokens.length;
    this.rest();
    for (const drawing of this.figures.querySelectorAll("svg")) {
      if (Number(drawing.dataset.side) !== place) continue;
      const cell = PLOT.width / length;
      const at = token * cell;
      drawing.append(drawn("rect", { class: "pointer", x: PLOT.left, y: PLOT.top + at, width: PLOT.width, height: cell }),
        drawn("rect", { class: "pointer", x: PLOT.left + at, y: PLOT.top, width: cell, height: PLOT.width }));
    }
    if (side.rows) this.describe(side, token);
  }

  /** Show what the chosen head reads at a token, on the words of the text. */
  describe({ text, rows }, query) {
    const length = text.tokens.length;
    const row = [...rows.slice(query * length, (query + 1) * length)];
    const best = row.map((value, key) => [value, key]).sort((one, other) => other[0] - one[0]).slice(0, 3);
    const words = best.filter(([value]) => value > 0.005).map(([value, key]) => `${percent(value)} to ${key} ${quoted(text.tokens[key])}`);
    this.read.replaceChildren(...text.tokens.slice(0, query + 1).map((token, key) => {
      const word = element("span", { class: row[key] > 0.3 ? "strong" : "", title: percent(row[key]) }, token);
      word.style.setProperty("--v", Math.round(100 * Math.sqrt(row[key])));
      return word;
    }));
    this.words.textContent = `Token ${query}, ${quoted(text.tokens[query])}, gives ${words.join(", ")}. Each line is a token, each column the token that it reads. A click or Enter shows a line on the text.`;
  }

  /** The intact rows of a text, if a switch is on, and its rows now. */
  pictures({ text, rows, rowsBefore }, place) {
    const { sides, variant } = this.view;
    const of = sides.length > 1 ? `: ${text.name}` : "";
    const end = place ? "-other" : "";
    const made = [];
    if (rowsBefore) made.push(this.picture(`rows-before${end}`, `intact${of}`, text, rowsBefore));
    if (rows) made.push(this.picture(`rows${end}`, `${variant}${of}`, text, rows));
    for (const figure of made) figure.querySelector("svg").dataset.side = place;
    return made;
  }

  /** Rows with a caption; the pointer and the arrow keys read a cell, a click or Enter chooses its line. */
  picture(id, caption, text, values) {
    const length = text.tokens.length;
    const label = `Attention of ${headName(this.view.head)} (${caption}), from each token down to each token across`;
    const drawing = heatmap({ id, label, values, rows: length, columns: length, high: 1, across: "token that is read", down: "token that reads" });
    drawing.setAttribute("tabindex", 0);
    let at = [length - 1, 0];
    const tell = (place) => {
      at = place.map((number) => Math.max(0, Math.min(length - 1, number)));
      const [query, key] = at;
      this.cell.textContent = `token ${query}, ${quoted(text.tokens[query])}, gives ${percent(values[query * length + key])} to token ${key}, ${quoted(text.tokens[key])}`;
    };
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    drawing.addEventListener("pointermove", (event) => tell(cellAt(drawing, event, length, length)));
    drawing.addEventListener("click", (event) => this.view.pickLine(cellAt(drawing, event, length, length)[0]));
    drawing.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (step) tell([at[0] + step[0], at[1] + step[1]]);
      else if (event.key === "Enter") this.view.pickLine(at[0]);
      else return;
      event.preventDefault();
    });
    return element("figure", {}, element("figcaption", {}, caption), drawing);
  }

  save(kind) {
    const figures = [...this.figures.children];
    if (figures.length) save(sheet(figures), `${headName(this.view.head)}.${kind}`);
  }
}

/** All heads of the chosen head's layer as small pictures of attention; a click chooses one. */
class Layer {
  constructor(view) {
    this.view = view;
    this.title = element("summary", {});
    this.heads = element("div", { class: "multiples", role: "group", "aria-label": "Heads of the layer" });
    this.mark = roving(this.heads);
    this.element = element("details", { id: "layer-heads", open: view.layerOpen, ontoggle: () => { view.layerOpen = this.element.open; this.draw(); } }, this.title, this.heads);
  }

  async draw() {
    const { head: [layer, chosen], sides: [side] } = this.view;
    this.title.textContent = `All heads of layer ${layer}`;
    if (!this.element.open) return;
    const stored = (side.reading.heads || side.text.heads).filter(([one]) => one === layer);
    const all = await Promise.all(stored.map((head) => this.view.rowsOf(side, side.reading, head)));
    if (side !== this.view.sides[0] || layer !== this.view.head[0]) return; // meanwhile something else was chosen
    this.heads.replaceChildren(...stored.map(([, head], number) => this.picture(layer, head, all[number], side.text.tokens.length)));
    this.heads.querySelectorAll("button")[stored.findIndex(([, head]) => head === chosen)]?.classList.add("chosen");
    this.mark();
  }

  /** The rows of a head, a pixel for each pair of tokens. */
  picture(layer, head, values, length) {
    const canvas = element("canvas", { width: length, height: length });
    const drawing = canvas.getContext("2d");
    const image = drawing.createImageData(length, length);
    const hot = getComputedStyle(this.view.root).getPropertyValue("--hot").trim();
    const colour = [1, 3, 5].map((at) => Number.parseInt(hot.slice(at, at + 2), 16));
    values.forEach((value, number) => image.data.set([...colour, Math.round(255 * Math.sqrt(value))], 4 * number));
    drawing.putImageData(image, 0, 0);
    const name = headName([layer, head]);
    return element("button", { type: "button", class: "multiple", id: `multiple-${head}`, "aria-label": `Rows of ${name}`, onclick: () => this.view.pickHead([layer, head]) }, canvas, name);
  }
}

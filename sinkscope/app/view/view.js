// Draws a view of a model: tokens, heads, circuit, switches, generation. Used by a page, a live page and a notebook.

const LEVELS = 255;
const READS = 0.3; // share of its attention that a head gives to what it reads, as the sink rate has it

/** An element with attributes and children; `on...` attributes are listeners. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** The values of a packed array, as `Packed` in Python stores them. */
async function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed.codes), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const codes = new Uint8Array(await new Response(stream).arrayBuffer());
  return Float32Array.from(codes, (code) => (code / LEVELS) ** 2);
}

function shown(value) {
  if (value === 0) return "0";
  if (Math.abs(value) < 0.0005) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

const percent = (share) => `${Math.round(100 * share)}%`;
const headName = ([layer, head]) => `L${layer}.H${head}`;
const visible = (token) => token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "·") || "∅";

/** Arrow keys move the focus among the children of a group; only one of them is in the order of the Tab key. */
function roving(group, perRow) {
  const items = () => [...group.querySelectorAll("button:not(:disabled)")];
  const mark = (wanted) => items().forEach((item) => (item.tabIndex = item === wanted ? 0 : -1));
  group.addEventListener("focusin", (event) => mark(event.target));
  group.addEventListener("keydown", (event) => {
    const all = items();
    const here = all.indexOf(document.activeElement);
    const row = perRow ? perRow() : 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -here, End: all.length - 1 - here };
    const next = all[here + steps[event.key]];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  });
  return () => mark(group.querySelector(".chosen:not(:disabled)") || items()[0]);
}

/** A picture of values from 0 to `high`, row by row, in the colour of the page. */
function paint(canvas, values, rows, columns, high) {
  const style = getComputedStyle(canvas);
  const rgb = (name) => {
    const hex = style.getPropertyValue(name).trim().replace(/^#(.)(.)(.)$/, "#$1$1$2$2$3$3");
    return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  };
  const low = rgb("--ground");
  const hot = rgb("--hot");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const picture = context.createImageData(columns, rows);
  for (let place = 0; place < rows * columns; place++) {
    const share = Math.sqrt(Math.min(1, values[place] / high));
    for (let part = 0; part < 3; part++) picture.data[4 * place + part] = low[part] + share * (hot[part] - low[part]);
    picture.data[4 * place + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
}

class View {
  /** `ask` sends a request to Python and returns the answer; null in a page that stands alone. */
  constructor(root, ask) {
    this.root = root;
    this.ask = ask;
    this.text = 0;
    this.variant = "intact";
    this.running = 0;
    this.tab = "text";
    this.colour = "norm";
    this.token = 0;
    this.query = null;
    this.head = null;
    this.off = new Set();
    this.typed = null;
    this.draft = "";
    this.generation = null;
    this.turn = Promise.resolve();
    this.linked = root.id === "view"; // a page of its own, whose address says what it shows
    if (this.linked) this.follow(new URLSearchParams(location.hash.slice(1)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      if (this.data) this.drawRows();
      if (this.data && this.tab === "generation") this.drawPictures();
    });
  }

  /** Take text, head, switch and token from the end of the address. */
  follow(link) {
    const head = /^L(\d+)\.H(\d+)$/.exec(link.get("head") || "");
    if (head) this.head = [Number(head[1]), Number(head[2])];
    this.text = Math.max(0, Number.parseInt(link.get("text") || "0", 10) || 0);
    this.token = Math.max(0, Number.parseInt(link.get("token") || "0", 10) || 0);
    this.variant = link.get("model") || "intact";
    if (this.ask && this.variant.startsWith("without ")) this.off = new Set(this.variant.slice(8).split(", "));
  }

  /** Write them there, so that a link opens the same view. */
  link() {
    if (!this.linked) return;
    const state = { text: this.text, token: this.token, head: headName(this.head), model: this.variant };
    history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  }

  /** Show a view, as `ModelView.to_dict()` has it. */
  async show(answer) {
    this.model = answer.model;
    this.data = answer.result;
    this.generation = this.data.generation || this.generation;
    this.text = Math.min(this.text, this.data.texts.length - 1);
    if (this.layer === undefined) this.layer = this.data.layer;
    const [layers, heads, length] = this.now.variants[0].received.shape;
    if (!this.head || this.head[0] >= layers || this.head[1] >= heads) this.head = this.firstHead();
    this.token = Math.min(this.token, length - 1);
    await this.read(this.now.variants[0]);
    this.build();
    await this.choose(this.variant);
  }

  firstHead() {
    const reader = (this.data.circuit || []).find((edge) => edge.step === "readers");
    const named = reader && reader.target.match(/^L(\d+)\.H(\d+)$/);
    return named ? [Number(named[1]), Number(named[2])] : this.now.heads[this.now.heads.length - 1];
  }

  get now() {
    return this.data.texts[this.text];
  }

  /** What the model can be: intact, edited by a switch, or without what is switched off. */
  get variants() {
    const own = this.off.size ? [this.ownName] : [];
    return ["intact", ...this.data.switches, ...own];
  }

  get ownName() {
    return `without ${[...this.off].join(", ")}`;
  }

  /** Show a variant of the text; Python is asked for it if the page does not have it. False if there is none. */
  async choose(name) {
    const text = this.now;
    if (!this.variants.includes(name)) name = "intact";
    const before = this.variant;
    this.variant = name;
    const chosen = await this.variantOf(text, name);
    if (!chosen) {
      this.variant = before;
      this.build();
      return false;
    }
    if (this.variant !== name || this.now !== text) return true; // meanwhile something else was chosen
    await this.read(chosen);
    this.redraw();
    return true;
  }

  /** A variant of a text, for which Python is asked if the page does not have it. */
  async variantOf(text, name) {
    const known = text.variants.find((variant) => variant.name === name);
    if (known || !this.ask) return known;
    const edit = name === this.ownName ? { off: [...this.off] } : { switch: name };
    const answer = await this.request({ ...edit, place: this.data.texts.indexOf(text) });
    if (!answer) return undefined;
    const [made] = answer.result.texts[0].variants;
    text.variants.push(Object.assign(made, { name, heads: answer.result.texts[0].heads }));
    return made;
  }

  /** Take a variant, and unpack what it needs. */
  async read(variant) {
    this.reading = variant;
    variant.attention ||= await unpacked(variant.received);
    await this.unpackHead();
  }

  async unpackHead() {
    const reading = this.reading;
    const place = (reading.heads || this.now.heads).findIndex((head) => head.join() === this.head.join());
    this.rows = place < 0 ? null : await unpacked(reading.rows[place]);
    const own = this.now.heads.findIndex((head) => head.join() === this.head.join());
    this.rowsBefore = own < 0 || reading === this.now.variants[0] ? null : await unpacked(this.now.variants[0].rows[own]);
  }

  received(layer, head, token) {
    const [, heads, length] = this.reading.received.shape;
    return this.reading.attention[(layer * heads + head) * length + token];
  }

  // The page

  build() {
    const active = document.activeElement && document.activeElement.id;
    const { family, name, n_layers: layers } = this.model;
    this.sentence = element("p", { class: "sentence", "aria-live": "polite", id: "sentence" });
    this.headline = element("p", { class: "headline", "aria-live": "polite", id: "headline" });
    this.status = element("p", { class: "soft", id: "status", "aria-live": "polite" });
    this.root.replaceChildren(
      element("h1", {}, `${name} `, element("span", { class: "soft" }, `${family}, ${layers} layers`)),
      this.headline,
      this.sentence,
      this.switches(),
      ...(this.ask ? [this.status] : []),
      this.tabs(),
      this.textPanel(),
      this.generationPanel(),
    );
    this.redraw();
    this.showRunning();
    this.selectTab(this.tab);
    const before = active && this.root.querySelector(`[id="${active}"]`);
    if (before) before.focus();
  }

  redraw() {
    this.sentence.textContent = this.reading.sentence;
    this.drawHeadline();
    const intact = this.now.variants[0];
    const own = this.reading === intact ? "" : ` Now: ${this.next(this.reading)}.`;
    this.following.textContent = this.next(intact) ? `Next token, intact: ${this.next(intact)}.${own}` : "";
    this.link();
    this.drawStrip();
    this.drawHeads();
    this.drawRows();
    this.drawCircuit();
  }

  /** The share of its attention that each head gives to the first sink, or to the first token. */
  shares(variant) {
    const [layers, heads, length] = variant.received.shape;
    const sink = this.now.spikes.length ? this.now.spikes[0] : 0;
    return Array.from({ length: layers * heads }, (_, head) => variant.attention[head * length + sink]);
  }

  /** Say how many heads read the sink, and how many look elsewhere under the switch, beside random edits. */
  async drawHeadline() {
    const intact = this.now.variants[0];
    const reading = this.reading;
    const random = this.data.switches.find((name) => name.includes("random"));
    const control = reading === intact || !random ? null : await this.variantOf(this.now, random);
    for (const variant of [intact, control]) if (variant) variant.attention ||= await unpacked(variant.received);
    if (reading !== this.reading) return; // meanwhile something else was chosen
    const before = this.shares(intact);
    const readers = before.map((share, head) => head).filter((head) => before[head] > READS);
    const gone = (variant) => {
      const after = this.shares(variant);
      return readers.filter((head) => after[head] < before[head] / 2).length;
    };
    const sink = JSON.stringify(this.now.tokens[this.now.spikes.length ? this.now.spikes[0] : 0]);
    const all = `${readers.length} of ${before.length} heads give token ${sink} more than ${percent(READS)} of their attention`;
    if (reading === intact) {
      const hint = this.data.switches.length ? " Switch its neurons off below, and see where they look then." : "";
      this.headline.textContent = `${all}.${readers.length ? hint : ""}`;
      return;
    }
    const beside = control && control !== reading ? ` (${control.name}: ${gone(control)})` : "";
    const said = `${gone(reading)} of the ${readers.length} heads that read ${sink} look elsewhere${beside}`;
    this.headline.textContent = `${said}; ${this.nextWord(intact, reading, control)}.`;
  }

  /** The likeliest next tokens of a variant, in words. */
  next(variant) {
    return (variant.following || []).map(([token, probability]) => `${JSON.stringify(token)} ${percent(probability)}`).join(", ");
  }

  /** How the likeliest next token changes under a switch, and under random edits. */
  nextWord(intact, reading, control) {
    const words = [intact, reading, control].map((one) => (one && one.following && one.following.length ? JSON.stringify(one.following[0][0]) : ""));
    if (!words[0] || !words[1]) return "next tokens were not measured";
    const change = words[0] === words[1] ? `the likeliest next token stays ${words[0]}` : `the likeliest next token changes from ${words[0]} to ${words[1]}`;
    return words[2] && control !== reading ? `${change} (${control.name}: ${words[2]})` : change;
  }

  switches() {
    const group = element("fieldset", { class: "switches" }, element("legend", {}, "The model is"));
    this.variants.forEach((name, number) => {
      const input = element("input", { type: "radio", name: "variant", id: `variant-${number}`, onchange: () => this.choose(name) });
      input.checked = name === this.variant;
      group.append(element("label", {}, input, name));
    });
    return group;
  }

  tabs() {
    const list = element("div", { role: "tablist", "aria-label": "What is shown" });
    for (const [name, words] of [["text", "Text"], ["generation", "Generation"]]) {
      const select = () => this.selectTab(name);
      list.append(element("button", { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: select }, words));
    }
    list.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
      this.selectTab(this.tab === "text" ? "generation" : "text");
      this.root.querySelector(`#tab-${this.tab}`).focus();
    });
    return list;
  }

  selectTab(name) {
    this.tab = name;
    for (const one of ["text", "generation"]) {
      const tab = this.root.querySelector(`#tab-${one}`);
      tab.setAttribute("aria-selected", one === name);
      tab.tabIndex = one === name ? 0 : -1;
      this.root.querySelector(`#panel-${one}`).hidden = one !== name;
    }
    if (name === "generation") this.drawPictures();
    else this.drawEdges();
    if (name === "generation" && this.ask && !this.generation && !this.began) {
      this.began = true; // once: if it fails, the button stays
      this.root.querySelector("#generate").click();
    }
  }

  textPanel() {
    this.strip = element("div", { class: "strip", role: "group", "aria-label": "Tokens" });
    this.stripFocus = roving(this.strip);
    this.readout = element("p", { class: "soft readout", id: "readout" });
    this.following = element("p", { class: "soft", id: "following" });
    this.heads = element("div", { class: "heads", role: "group", "aria-label": "Heads" });
    this.headsFocus = roving(this.heads, () => this.reading.received.shape[1]);
    this.headsTitle = element("p", { class: "soft" });
    this.rowsTitle = element("h2", { id: "rows-title" });
    this.rowsText = element("p", { class: "soft", id: "rows-text" });
    this.canvas = this.picture("rows");
    this.before = this.picture("rows-before");
    this.pictureWords = element("p", { class: "soft readout", id: "cell" });
    this.circuit = element("div", { class: "circuit" });
    return element("div", { role: "tabpanel", id: "panel-text", "aria-labelledby": "tab-text" },
      this.asking(), this.colours(), this.strip, this.readout, this.following,
      element("div", { class: "panels" },
        element("section", {}, element("h2", {}, "Heads"), this.headsTitle, this.heads),
        element("section", {}, this.rowsTitle, this.rowsText, element("div", { class: "pair" }, this.before.parentElement, this.canvas.parentElement), this.pictureWords, element("button", { type: "button", id: "save", onclick: () => this.save() }, "Save the picture")),
        element("section", {}, element("h2", {}, "Circuit"), this.circuit)));
  }

  /** A picture of rows with a caption and the ends of its axes; a click chooses a row, the pointer reads a cell. */
  picture(id) {
    const canvas = element("canvas", { id, role: "img" });
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      const length = this.now.tokens.length;
      const at = (share) => Math.max(0, Math.min(length - 1, Math.floor(share * length)));
      return [at((event.clientY - box.top) / box.height), at((event.clientX - box.left) / box.width)];
    };
    canvas.addEventListener("click", (event) => {
      [this.query] = place(event);
      this.pickColour("row");
    });
    canvas.addEventListener("pointermove", (event) => {
      const [query, key] = place(event);
      const values = id === "rows" ? this.rows : this.rowsBefore;
      const words = [query, key].map((token) => `token ${token}, ${JSON.stringify(this.now.tokens[token])},`);
      this.pictureWords.textContent = `${words[0]} gives ${percent(values[query * this.now.tokens.length + key])} to ${words[1].slice(0, -1)}`;
    });
    element("figure", {}, element("figcaption"), canvas, element("small", { class: "axis" }));
    return canvas;
  }

  /** Write the shown rows as a PNG, eight pixels a cell, the intact model first. */
  save() {
    const shown = [this.before, this.canvas].filter((one) => !one.parentElement.hidden);
    const sheet = element("canvas", { width: shown.length * (8 * this.canvas.width + 16), height: 8 * this.canvas.height });
    const context = sheet.getContext("2d");
    context.imageSmoothingEnabled = false;
    shown.forEach((one, number) => context.drawImage(one, number * (8 * one.width + 16), 0, 8 * one.width, 8 * one.height));
    element("a", { href: sheet.toDataURL("image/png"), download: `${headName(this.head)}.png` }).click();
  }

  colours() {
    const row = element("div", { class: "row" });
    if (this.data.texts.length > 1) {
      const texts = element("select", { id: "text", onchange: async (event) => {
        this.text = Number(event.target.value);
        this.token = 0;
        this.query = null;
        await this.read(this.now.variants[0]);
        this.redraw();
        await this.choose(this.variant);
      } });
      this.data.texts.forEach((text, number) => texts.append(element("option", { value: number }, text.name)));
      texts.value = this.text;
      row.append(element("label", {}, "Text ", texts));
    }
    this.picker = element("select", { id: "colour", onchange: () => this.pickColour(this.picker.value) });
    const choices = [["norm", "norm after the layer"], ["attention", "attention received in the layer"]];
    this.data.neurons.forEach((neuron, number) => choices.push([`neuron ${number}`, `activation of ${neuron}`]));
    choices.push(["row", "attention of the chosen token"]);
    for (const [value, words] of choices) this.picker.append(element("option", { value }, words));
    this.picker.value = this.colour;
    const layers = this.reading.norm.length;
    this.slider = element("input", { type: "range", id: "layer", min: 0, max: layers - 1, step: 1 });
    this.slider.value = this.layer;
    this.layerWords = element("output", { for: "layer" }, String(this.layer));
    this.slider.addEventListener("input", () => {
      this.layer = Number(this.slider.value);
      this.drawStrip();
    });
    row.append(element("label", {}, "Colour ", this.picker));
    row.append(element("label", {}, "Layer ", this.slider, " ", this.layerWords));
    return row;
  }

  pickColour(colour) {
    this.colour = colour;
    if (colour === "row" && this.query === null) this.query = this.now.tokens.length - 1;
    this.picker.value = colour;
    this.drawStrip();
    this.drawRows();
  }

  /** A value and a share from 0 to 1 for each token, under the chosen colour. */
  values() {
    const { norm, activation } = this.reading;
    const length = this.now.tokens.length;
    const [, heads] = this.reading.received.shape;
    if (this.colour === "norm") {
      const typical = this.data.typical_norm[this.layer] || 1;
      const top = Math.log(Math.max(...this.now.variants[0].norm[this.layer]) / typical) || 1;
      return norm[this.layer].map((value) => [value, Math.log(value / typical) / Math.max(top, 1)]);
    }
    if (this.colour === "attention") {
      return Array.from({ length }, (_, token) => {
        let sum = 0;
        for (let head = 0; head < heads; head++) sum += this.received(this.layer, head, token);
        return [sum / heads, Math.sqrt(sum / heads)];
      });
    }
    if (this.colour === "row") {
      return Array.from({ length }, (_, token) => {
        const value = this.rows ? this.rows[this.query * length + token] : 0;
        return [value, Math.sqrt(value)];
      });
    }
    const number = Number(this.colour.split(" ")[1]);
    const top = Math.max(...this.now.variants[0].activation[number].map(Math.abs)) || 1;
    return activation[number].map((value) => [value, Math.abs(value) / top]);
  }

  drawStrip() {
    const values = this.values();
    const layered = this.colour === "norm" || this.colour === "attention";
    this.slider.disabled = !layered;
    this.layerWords.textContent = String(this.layer);
    const chosen = this.colour === "row" ? this.query : this.token;
    if (this.strip.childElementCount !== this.now.tokens.length || this.strip.dataset.text !== String(this.text)) {
      this.strip.dataset.text = String(this.text);
      this.strip.replaceChildren(...this.now.tokens.map((token, number) => element("button",
        { class: "token", type: "button", id: `token-${number}`, onclick: () => this.pickToken(number), onpointerenter: () => this.tell(number), onfocus: () => this.tell(number) }, visible(token))));
    }
    [...this.strip.children].forEach((button, number) => {
      const [value, share] = values[number];
      const part = Math.max(0, Math.min(1, share));
      button.style.setProperty("--v", Math.round(100 * part));
      button.classList.toggle("strong", part > 0.55);
      button.classList.toggle("sink", this.now.spikes.includes(number));
      button.classList.toggle("chosen", number === chosen);
      button.setAttribute("aria-label", `token ${number}, ${this.now.tokens[number]}, ${shown(value)}`);
    });
    this.stripFocus();
    this.tell(chosen);
  }

  tell(number) {
    const [value] = this.values()[number];
    const token = JSON.stringify(this.now.tokens[number]);
    const typical = this.data.typical_norm[this.layer];
    const words = {
      norm: `norm ${shown(value)} after layer ${this.layer}, ${shown(value / typical)} times the typical one`,
      attention: `${percent(value)} of the attention in layer ${this.layer}`,
      row: `${percent(value)} of the attention of ${headName(this.head)} at token ${this.query}`,
    }[this.colour] || `activation ${shown(value)}`;
    const where = this.variant === "intact" ? "" : " in the intact model";
    const sink = this.now.spikes.includes(number) ? `; a sink${where}` : "";
    this.readout.textContent = `Token ${number}, ${token}: ${words}${sink}.`;
  }

  pickToken(number) {
    if (this.colour === "row") this.query = number;
    else this.token = number;
    this.link();
    this.drawStrip();
    this.drawHeads();
    this.drawRows();
  }

  drawHeads() {
    const [layers, heads] = this.reading.received.shape;
    const stored = new Set(this.now.heads.map((head) => head.join()));
    this.heads.style.gridTemplateColumns = `max-content repeat(${heads}, minmax(0, 1fr))`;
    this.headsTitle.textContent = `Mean attention to token ${this.token}, ${JSON.stringify(this.now.tokens[this.token])}; one row for each layer. A click shows a head's rows.`;
    if (this.heads.childElementCount !== layers * (heads + 1)) {
      this.heads.replaceChildren();
      for (let layer = 0; layer < layers; layer++) {
        this.heads.append(element("span", { class: "label" }, `L${layer}`));
        for (let head = 0; head < heads; head++) {
          this.heads.append(element("button", { class: "head", type: "button", id: `head-${layer}-${head}`, onclick: () => this.pickHead([layer, head]) }));
        }
      }
    }
    this.heads.querySelectorAll(".head").forEach((button, place) => {
      const head = [Math.floor(place / heads), place % heads];
      const value = this.received(...head, this.token);
      button.style.setProperty("--v", Math.round(100 * value));
      button.classList.toggle("strong", value > 0.55);
      button.classList.toggle("chosen", head.join() === this.head.join());
      button.classList.toggle("marking", this.data.marks.includes(headName(head)));
      button.classList.toggle("unstored", !stored.has(head.join()));
      button.title = `${headName(head)}: ${percent(value)}`;
      button.setAttribute("aria-label", button.title);
    });
    this.headsFocus();
  }

  async pickHead(head) {
    this.head = head;
    this.link();
    await this.unpackHead();
    this.drawHeads();
    this.drawRows();
    this.drawStrip();
    this.drawCircuit();
  }

  drawRows() {
    const length = this.now.tokens.length;
    this.rowsTitle.textContent = `Rows of ${headName(this.head)}`;
    this.canvas.parentElement.hidden = !this.rows;
    this.before.parentElement.hidden = !this.rows || !this.rowsBefore;
    if (!this.rows) {
      this.rowsText.textContent = "This file has no room for the rows of this head; a shorter text shows them.";
      return;
    }
    const pictures = [[this.canvas, this.rows, this.variant]];
    if (this.rowsBefore) pictures.push([this.before, this.rowsBefore, "intact"]);
    for (const [canvas, rows, name] of pictures) {
      paint(canvas, rows, length, length, 1);
      canvas.setAttribute("aria-label", `Attention of ${headName(this.head)} (${name}), from each query to each key`);
      canvas.previousElementSibling.textContent = name;
      canvas.nextElementSibling.textContent = `across: token read, 0 ${JSON.stringify(this.now.tokens[0])} to ${length - 1}; down: token that reads, 0 to ${length - 1}`;
    }
    const query = this.query === null ? length - 1 : this.query;
    const row = [...this.rows.slice(query * length, (query + 1) * length)];
    const best = row.map((value, key) => [value, key]).sort((one, other) => other[0] - one[0]).slice(0, 3);
    const words = best.filter(([value]) => value > 0.005).map(([value, key]) => `${percent(value)} to ${key} ${JSON.stringify(this.now.tokens[key])}`);
    this.rowsText.textContent = `Token ${query}, ${JSON.stringify(this.now.tokens[query])}, gives ${words.join(", ")}. Each line is a token, each column the token that it reads. Choose “attention of the chosen token” to see a line on the text.`;
  }

  // The circuit

  /** The parts of each step, from the heads that mark to the heads that read. */
  circuitSteps() {
    const edges = this.data.circuit;
    const of = (step) => edges.filter((edge) => edge.step === step);
    const lost = (edge) => (edge.necessity === null ? "" : `${percent(edge.necessity)} lost without it${edge.necessity_control === null ? "" : ` (random: ${percent(edge.necessity_control)})`}`);
    const brings = (edge) => (edge.sufficiency === null ? "" : `brings ${percent(edge.sufficiency)} alone`);
    const part = (edge, what) => ({ name: edge.source, words: [what, lost(edge), brings(edge)] });
    const others = new Map(of("readers").filter((edge) => edge.source !== "spike").map((edge) => [edge.sink + edge.source, edge]));
    const marks = [...of("mark"), ...others.values()].slice(0, 4).map((edge) => part(edge, edge.sink));
    const repeated = of("repetition").slice(0, 3).map((edge) => part(edge, "a repetition"));
    const neurons = of("neurons");
    const readers = of("readers");
    const steps = [
      ["What marks the sink or a repetition, most necessary first", [...marks, ...repeated]],
      ["What makes a norm that stands out before these neurons", of("early spike").slice(0, 3).map((edge) => part(edge, ""))],
      ["Sink neurons", neurons.map((edge) => part(edge, ""))],
      ["They write the spike", neurons.length || readers.some((edge) => edge.source === "spike") ? [{ name: "spike", words: [`norm after layer ${this.data.layer}`] }] : []],
      ["These heads read the sink. Below each: attention lost without what they read.", readers.map((edge) => ({ name: edge.target, words: [edge.necessity === null ? "" : `${percent(edge.necessity)} lost`] }))],
    ];
    return steps.filter(([, parts]) => parts.length);
  }

  drawCircuit() {
    if (!this.data.circuit) {
      const words = this.ask ? "The circuit is being traced. This takes a few seconds." : "The circuit was not measured.";
      this.circuit.replaceChildren(element("p", { class: "soft" }, words));
      return;
    }
    const steps = this.circuitSteps();
    this.edges = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.edges.setAttribute("aria-hidden", "true");
    const children = steps.map(([title, parts]) => element("div", { class: "step" }, element("p", { class: "soft" }, title), ...parts.map((part) => this.part(part))));
    const conclusion = element("p", { class: "soft" }, this.data.circuit_sentence);
    this.circuit.replaceChildren(this.edges, ...children, conclusion);
    this.drawEdges();
  }

  part({ name, words }) {
    const head = name.match(/^L(\d+)\.H(\d+)$/);
    const chosen = head && headName(this.head) === name;
    const pick = () => this.pickPart(name, head);
    const lines = words.filter(Boolean).map((line) => element("small", {}, line));
    return element("button", { class: `part${chosen ? " chosen" : ""}`, type: "button", id: `part-${name}`, onclick: pick }, name, ...lines);
  }

  pickPart(name, head) {
    const neuron = this.data.neurons.indexOf(name);
    if (head) this.pickHead([Number(head[1]), Number(head[2])]);
    else if (neuron >= 0) this.pickColour(`neuron ${neuron}`);
    else if (this.data.neurons.length && name !== "spike") this.pickColour("neuron 0");
    else {
      this.layer = this.data.layer;
      this.slider.value = this.layer;
      this.pickColour("norm");
    }
  }

  /** One line from each step to the next one, between the boxes, so that none crosses a part. */
  drawEdges() {
    if (!this.edges || !this.edges.isConnected) return;
    const box = this.circuit.getBoundingClientRect();
    const steps = [...this.circuit.querySelectorAll(".step")].map((step) => step.getBoundingClientRect());
    const middle = box.width / 2;
    const paths = steps.slice(1).map((step, number) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M${middle} ${steps[number].bottom - box.top} V${step.top - box.top} m-4 -6 l4 6 l4 -6`);
      return path;
    });
    this.edges.replaceChildren(...paths);
  }

  // Requests to Python

  /** Fields for another text and for neurons and heads to switch off; only where Python answers. */
  asking() {
    if (!this.ask) return null;
    const field = element("textarea", { id: "typed", "aria-label": "Another text", placeholder: "Type another text" });
    field.value = this.draft;
    field.addEventListener("input", () => (this.draft = field.value));
    const read = () => this.readText(field.value.trim() ? field.value : null);
    const names = [...new Set([...this.data.neurons, ...this.data.marks, ...this.off])];
    const boxes = names.map((name) => {
      const box = element("input", { type: "checkbox", id: `off-${name}`, onchange: () => this.toggle(name) });
      box.checked = this.off.has(name);
      return element("label", {}, box, name);
    });
    const other = element("input", { id: "other", size: 12, placeholder: "L0.H4", "aria-label": "Another neuron or head", onkeydown: (event) => {
      if (event.key === "Enter" && other.value.trim()) this.toggle(other.value.trim());
    } });
    return element("div", {}, field,
      element("div", { class: "row" }, element("button", { type: "button", class: "tool", id: "read", onclick: read }, "Read this text"),
        element("fieldset", {}, element("legend", {}, "Switch off"), ...boxes), element("label", {}, "another ", other)));
  }

  async readText(typed) {
    const answer = await this.request({ text: typed });
    if (!answer) return;
    Object.assign(this, { typed, text: 0, token: 0, query: null });
    await this.show(answer);
  }

  async toggle(name) {
    const before = this.off;
    this.off = new Set(before);
    if (!this.off.delete(name)) this.off.add(name);
    if (!(await this.choose(this.off.size ? this.ownName : "intact"))) this.off = before;
    this.build();
  }

  async traceCircuit() {
    const answer = await this.request({ circuit: true });
    if (!answer) return;
    const { circuit, circuit_sentence, marks, switches } = answer.result;
    Object.assign(this.data, { circuit, circuit_sentence, marks, switches });
    this.build();
  }

  async generate() {
    const answer = await this.request({ generation: true });
    if (answer) this.generation = answer.result.generation;
    this.build();
  }

  /** Ask Python, which answers one request after the other; null, with the reason on the page, if it cannot answer. */
  async request(wanted) {
    this.running += 1;
    this.error = null;
    this.showRunning();
    const asked = this.turn.then(() => this.ask({ text: this.typed, ...wanted }));
    this.turn = asked.catch(() => {});
    const answer = await asked;
    this.running -= 1;
    this.error = answer.error;
    this.showRunning();
    return answer.error ? null : answer;
  }

  showRunning() {
    this.root.setAttribute("aria-busy", this.running > 0);
    this.status.className = this.error ? "error" : "soft";
    this.status.textContent = this.error || (this.running ? "The model is running …" : "");
  }

  // Generation

  generationPanel() {
    const panel = element("div", { role: "tabpanel", id: "panel-generation", "aria-labelledby": "tab-generation" });
    const made = this.generation;
    if (!made) {
      const start = () => {
        panel.querySelector("button").disabled = true;
        this.generate();
      };
      panel.append(this.ask
        ? element("button", { type: "button", class: "tool", id: "generate", onclick: start }, "Continue typical text with and without the guard")
        : element("p", {}, "This page was made without a generation."));
      return panel;
    }
    const sides = made.sides.map((side, number) => {
      const text = element("div", { class: "written", tabindex: 0, role: "region", "aria-label": side.name });
      side.tokens.forEach((token, step) => {
        if (side.alarms.includes(step)) text.append(element("mark", {}, "⚠ alarm"));
        text.append(token);
      });
      const alarms = side.alarms.length ? `Orange lines: alarms at steps ${side.alarms.join(", ")}.` : "";
      return element("section", {}, element("h2", {}, side.name), text,
        element("p", { class: "soft" }, `Barcode of ${side.head}: steps from top to bottom, positions from left to right. ${alarms}`),
        element("canvas", { id: `barcode-${number}`, role: "img", "aria-label": `Barcode of ${side.head} ${side.name}` }));
    });
    panel.append(element("p", { class: "sentence" }, made.sentence),
      element("p", { class: "soft" }, "The prompt: ", element("code", {}, made.prompt)), element("div", { class: "sides" }, ...sides));
    return panel;
  }

  async drawPictures() {
    if (!this.generation) return;
    for (const [number, side] of this.generation.sides.entries()) {
      const canvas = this.root.querySelector(`#barcode-${number}`);
      const [rows, columns] = side.picture.shape;
      const values = await unpacked(side.picture);
      const sorted = Float32Array.from(values).sort();
      paint(canvas, values, rows, columns, Math.max(0.05, sorted[Math.floor(0.99 * sorted.length)]));
      const context = canvas.getContext("2d");
      context.fillStyle = getComputedStyle(canvas).getPropertyValue("--mark");
      for (const step of side.alarms) context.fillRect(0, Math.floor(step / side.steps), columns, 1);
    }
  }
}

/** Show a view in an element. */
export async function mount(root, answer, ask = null) {
  root.classList.add("sinkscope-view");
  const view = new View(root, ask);
  addEventListener("resize", () => view.drawEdges());
  await view.show(answer);
  return view;
}

/** Begin in a page: with its own data, or with what the server answers. */
export async function start(page) {
  const root = page.querySelector("#view");
  const data = JSON.parse(page.querySelector("#data").textContent);
  if (data) return mount(root, data);
  const ask = async (request) => {
    try {
      const answer = await fetch("view", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request) });
      return await answer.json();
    } catch {
      return { error: "The server does not answer. Start sinkscope view again." };
    }
  };
  const first = await ask({ at_once: true });
  if (first.error) return root.replaceChildren(element("p", { class: "error" }, first.error));
  const view = await mount(root, first, ask);
  await view.show(await view.request({}));
  if (!view.data.circuit) await view.traceCircuit();
}

/** A widget in a notebook: Python answers messages. */
export default {
  render({ model, el }) {
    const waiting = new Map();
    let number = 0;
    model.on("msg:custom", (message) => {
      waiting.get(message.number)(message.answer);
      waiting.delete(message.number);
    });
    const ask = (request) => new Promise((resolve) => {
      waiting.set(++number, resolve);
      model.send({ number, request });
    });
    const root = document.createElement("div");
    el.append(root);
    mount(root, model.get("view"), ask);
  },
};

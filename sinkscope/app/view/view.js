// A view of a model: tokens, heads, circuit, switches. Used by a page, a live page and a notebook.

const READS = 0.3; // share of its attention that a head gives to what it reads, as the sink rate has it

class View {
  /** `ask` sends a request to Python and returns the answer; null in a page that stands alone. */
  constructor(root, ask) {
    this.root = root;
    this.ask = ask;
    this.text = 0;
    this.beside = null;
    this.variant = "intact";
    this.running = 0;
    this.colour = "norm";
    this.token = 0;
    this.query = null;
    this.head = null;
    this.off = new Set();
    this.moved = null;
    this.typed = [];
    this.draft = "";
    this.turn = Promise.resolve();
    this.linked = root.id === "view"; // a page of its own, whose address says what it shows
    this.opened = new URLSearchParams(this.linked ? location.hash.slice(1) : "");
  }

  /** Take texts, head, switch and token from the end of the address with which the page was opened. */
  async follow() {
    const link = this.opened;
    if (!link.toString()) return;
    const number = (name) => Math.max(0, Number.parseInt(link.get(name) || "0", 10) || 0);
    this.text = number("text");
    this.token = number("token");
    this.beside = link.has("beside") ? number("beside") : null;
    this.head = headOf(link.get("head"));
    this.variant = link.get("model") || "intact";
    if (this.ask && this.variant.startsWith("without ")) this.off = new Set(this.variant.slice(8).split(", "));
    if (this.ask && this.variant.startsWith("token ")) this.moved = this.variant;
    if (this.ask) for (const typed of link.getAll("typed")) await this.take(typed);
  }

  /** Write them there, so that a link opens the same view. */
  link() {
    if (!this.linked) return;
    const state = new URLSearchParams({ text: this.text, token: this.token, head: headName(this.head), model: this.variant });
    if (this.beside !== null) state.set("beside", this.beside);
    for (const typed of this.typed) state.append("typed", typed);
    history.replaceState(null, "", `#${state}`);
  }

  /** Show a view, as `ModelView.to_dict()` has it, and of it what the address says. */
  async show(answer) {
    this.model = answer.model;
    this.data = answer.result;
    this.data.texts.forEach((text) => (text.asked = { text: null }));
    await this.follow();
    const last = this.data.texts.length - 1;
    this.text = Math.min(this.text, last);
    if (this.beside !== null && (this.beside > last || this.beside === this.text)) this.beside = null;
    if (this.layer === undefined) this.layer = this.data.layer;
    const [layers, heads, length] = this.now.variants[0].received.shape;
    if (this.head && (this.head[0] >= layers || this.head[1] >= heads)) this.head = null;
    this.token = Math.min(this.token, length - 1);
    await this.begin();
  }

  /** Build the page with the intact model, and then choose what is shown. */
  async begin() {
    this.sides = [await this.side(this.now, "intact")];
    this.head ||= this.firstHead();
    await this.unpackRows();
    this.build();
    await this.choose(this.variant);
  }

  /** The head with rows to show that gives the sink most of its attention. */
  firstHead() {
    const { intact } = this.sides[0];
    const heads = intact.received.shape[1];
    const shares = this.shares(intact);
    const share = ([layer, head]) => shares[layer * heads + head];
    return [...this.now.heads].sort((one, other) => share(other) - share(one))[0];
  }

  get now() {
    return this.data.texts[this.text];
  }

  /** How the chosen model reads the first of the shown texts. */
  get reading() {
    return this.sides[0].reading;
  }

  /** What the model can be: intact, edited by a switch, or without what is switched off. */
  get variants() {
    const own = this.off.size ? [this.ownName] : [];
    const moved = this.moved && !this.data.switches.includes(this.moved) ? [this.moved] : [];
    return ["intact", ...this.data.switches, ...moved, ...own];
  }

  get ownName() {
    return `without ${[...this.off].join(", ")}`;
  }

  /** Show a variant of the shown texts; Python is asked for what the page does not have. False if there is none. */
  async choose(name) {
    if (!this.variants.includes(name)) name = "intact";
    const before = this.variant;
    this.variant = name;
    const texts = this.beside === null ? [this.now] : [this.now, this.data.texts[this.beside]];
    const sides = [];
    for (const text of texts) sides.push(await this.side(text, name));
    if (sides.includes(null)) {
      this.variant = before;
      this.build();
      return false;
    }
    if (this.variant !== name || texts[0] !== this.now) return true; // meanwhile something else was chosen
    this.sides = sides;
    await this.unpackRows();
    this.redraw();
    return true;
  }

  /** A text, intact and as the chosen model reads it; null if Python has no answer. */
  async side(text, name) {
    const [intact] = text.variants;
    const reading = await this.variantOf(text, name);
    if (!reading) return null;
    for (const variant of [intact, reading]) variant.attention ||= await unpacked(variant.received);
    return { text, intact, reading };
  }

  /** A variant of a text, for which Python is asked if the page does not have it. */
  async variantOf(text, name) {
    const known = text.variants.find((variant) => variant.name === name);
    if (known || !this.ask) return known;
    const answer = await this.request({ ...text.asked, ...this.editOf(name) });
    if (!answer) return undefined;
    const [read] = answer.result.texts;
    text.variants.push(Object.assign(read.variants[0], { name, heads: read.heads }));
    return text.variants[text.variants.length - 1];
  }

  /** Unpack the rows of the chosen head in each shown text, intact and as the chosen model has them. */
  async unpackRows() {
    for (const side of this.sides) {
      side.rows = await this.rowsOf(side, side.reading);
      side.rowsBefore = side.reading === side.intact ? null : await this.rowsOf(side, side.intact);
    }
  }

  async rowsOf({ text }, variant, wanted = this.head) {
    const place = (variant.heads || text.heads).findIndex((head) => head.join() === wanted.join());
    return place < 0 ? null : unpacked(variant.rows[place] || text.variants[0].rows[place]); // a page leaves out what is as intact
  }

  // The page

  build() {
    const active = document.activeElement && document.activeElement.id;
    const { family, name, n_layers: layers } = this.model;
    this.sentence = element("p", { class: "sentence", "aria-live": "polite", id: "sentence" });
    this.headline = element("p", { class: "headline", "aria-live": "polite", id: "headline" });
    this.meaning = element("p", { class: "soft", id: "meaning" });
    this.status = element("p", { class: "soft", id: "status", "aria-live": "polite" });
    this.root.replaceChildren(
      element("div", { class: "row" }, element("h1", {}, `${name} `, element("span", { class: "soft" }, `${family}, ${layers} layers`)),
        element("button", { type: "button", class: "tool", id: "tour", onclick: () => tour(this) }, "Tour")),
      element("p", { id: "about" }, A_SINK),
      this.headline,
      this.sentence,
      this.switches(),
      this.meaning,
      ...(this.ask ? [this.status] : []),
      this.textPanel(),
    );
    this.redraw();
    this.showRunning();
    const before = active && this.root.querySelector(`[id="${active}"]`);
    if (before) before.focus();
  }

  redraw() {
    this.sentence.textContent = this.reading.sentence;
    this.meaning.textContent = this.data.meanings[this.data.switches.indexOf(this.variant)] || "";
    this.drawHeadline();
    this.draw();
  }

  /** Draw what depends on the chosen texts, token, head and colour. */
  draw() {
    this.link();
    this.slider.disabled = this.colour !== "norm" && this.colour !== "attention";
    this.layerWords.textContent = String(this.layer);
    for (const part of this.parts) part.draw();
  }

  /** The share of its attention that each head gives to the first sink, or to the first token. */
  shares(variant) {
    const [layers, heads, length] = variant.received.shape;
    const sink = this.now.spikes.length ? this.now.spikes[0] : 0;
    return Array.from({ length: layers * heads }, (_, head) => variant.attention[head * length + sink]);
  }

  /** Say how many heads read the sink, and how many look elsewhere under the switch, beside random edits. */
  async drawHeadline() {
    const { intact, reading } = this.sides[0];
    const random = this.data.switches.find((name) => name === this.data.control);
    const beside = reading === intact || !random ? null : await this.side(this.now, random);
    if (reading !== this.reading) return; // meanwhile something else was chosen
    const control = beside && beside.reading !== reading ? beside.reading : null;
    const before = this.shares(intact);
    const readers = before.map((share, head) => head).filter((head) => before[head] > READS);
    const gone = (variant) => {
      const after = this.shares(variant);
      return readers.filter((head) => after[head] < before[head] / 2).length;
    };
    const sink = quoted(this.now.tokens[this.now.spikes.length ? this.now.spikes[0] : 0]);
    const place = this.now.spikes.length ? `the attention sink, token ${sink},` : `token ${sink}`;
    const all = `On this text, ${readers.length} of ${before.length} heads give ${place} more than ${percent(READS)} of their attention`;
    if (reading === intact) {
      const hint = this.data.switches.length ? " Switch its neurons off below, and see where they look then." : "";
      this.headline.textContent = `${all}.${readers.length ? hint : ""}`;
      return;
    }
    const random_gone = control ? ` (${control.name}: ${gone(control)})` : "";
    const said = `${gone(reading)} of the ${readers.length} heads that read ${sink} look elsewhere: they give it less than half of what they gave${random_gone}`;
    this.headline.textContent = `${said}; ${this.nextWord(intact, reading, control)}.`;
  }

  /** How the likeliest next token changes under a switch, and under random edits. */
  nextWord(intact, reading, control) {
    const words = [intact, reading, control].map((one) => (one && one.following && one.following.length ? quoted(one.following[0][0]) : ""));
    if (!words[0] || !words[1]) return "next tokens were not measured";
    const change = words[0] === words[1] ? `the likeliest next token stays ${words[0]}` : `the likeliest next token changes from ${words[0]} to ${words[1]}`;
    return words[2] ? `${change} (${control.name}: ${words[2]})` : change;
  }

  /** Isolate a token, or give it the first token's id, as the switch of this name does. */
  async move(name) {
    const before = this.moved;
    this.moved = name;
    if (!(await this.choose(name))) this.moved = before;
    this.build();
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

  /** What Python is asked for a variant. */
  editOf(name) {
    if (name === "intact") return {};
    return name === this.ownName ? { off: [...this.off] } : { switch: name };
  }

  textPanel() {
    const [strips, heads, layer, circuit] = [new Strips(this), new Heads(this), new Layer(this), new Circuit(this)];
    this.rows = new Rows(this);
    this.parts = [strips, heads, this.rows, layer, circuit];
    const attention = element("section", {}, ...this.rows.elements, layer.element);
    return element("div", {}, this.asking(), this.colours(), strips.element, element("div", { class: "panels" }, heads.element, attention, circuit.element), otherMeasurements(this.data));
  }

  /** A choice among the texts; `none` is a first one that chooses none of them. */
  textChoice(id, words, chosen, none, choose) {
    const texts = element("select", { id, onchange: () => choose(texts.value === "" ? null : Number(texts.value)) });
    if (none) texts.append(element("option", { value: "" }, none));
    this.data.texts.forEach((text, number) => texts.append(element("option", { value: number }, text.name)));
    texts.value = chosen === null ? "" : chosen;
    return element("label", {}, words, texts);
  }

  colours() {
    const row = element("div", { class: "row" });
    if (this.data.texts.length > 1) {
      row.append(this.textChoice("text", "Text ", this.text, null, (number) => this.pickTexts(number, this.beside)),
        this.textChoice("beside", "beside ", this.beside, "no other", (number) => this.pickTexts(this.text, number)));
    }
    this.picker = element("select", { id: "colour", onchange: () => this.pickColour(this.picker.value) });
    const choices = [["norm", "norm after the layer"], ["attention", "attention received in the layer"]];
    choices.push(["row", "attention of the chosen token"]);
    for (const [value, words] of choices) this.picker.append(element("option", { value }, words));
    this.picker.value = this.colour;
    const layers = this.reading.norm.length;
    this.slider = element("input", { type: "range", id: "layer", min: 0, max: layers - 1, step: 1 });
    this.slider.value = this.layer;
    this.layerWords = element("output", { for: "layer" }, String(this.layer));
    this.slider.addEventListener("input", () => {
      this.layer = Number(this.slider.value);
      this.draw();
    });
    row.append(element("label", {}, "Colour ", this.picker));
    row.append(element("label", {}, "Layer ", this.slider, " ", this.layerWords));
    return row;
  }

  /** Show a text, and another one beside it. */
  async pickTexts(text, beside) {
    if (text !== this.text) Object.assign(this, { token: 0, query: null });
    Object.assign(this, { text, beside: beside === text ? null : beside });
    await this.begin();
  }

  pickColour(colour) {
    this.colour = colour;
    if (colour === "row" && this.query === null) this.query = this.now.tokens.length - 1;
    this.picker.value = colour;
    this.draw();
  }

  /** Show a line of the chosen head on the text. */
  pickLine(query) {
    this.query = query;
    this.pickColour("row");
  }

  /** The chosen token, or the one whose line is shown. */
  get picked() {
    return this.colour === "row" ? this.query : this.token;
  }

  /** Choose a token; a text that is shorter takes its last one. */
  pickToken(number) {
    const token = Math.min(number, this.now.tokens.length - 1);
    if (this.colour === "row") this.query = token;
    else this.token = token;
    this.draw();
  }

  async pickHead(head) {
    this.head = head;
    await this.unpackRows();
    this.draw();
  }

  /** Colour the tokens by the norm after a layer. */
  pickLayer(layer) {
    this.layer = layer;
    this.slider.value = layer;
    this.pickColour("norm");
  }

  // Requests to Python

  /** Fields for another text and for neurons and heads to switch off; only where Python answers. */
  asking() {
    if (!this.ask) return null;
    const field = element("textarea", { id: "typed", "aria-label": "Another text", placeholder: "Type another text" });
    field.value = this.draft;
    field.addEventListener("input", () => (this.draft = field.value));
    const read = () => this.readText(field.value.trim());
    const names = [...new Set([...this.data.neurons, ...this.data.marks, ...this.off])];
    const boxes = names.map((name) => {
      const box = element("input", { type: "checkbox", id: `off-${name}`, onchange: () => this.toggle(name) });
      box.checked = this.off.has(name);
      return element("label", {}, box, name);
    });
    const other = element("input", { id: "other", size: 12, placeholder: "L0.H4" });
    const submit = (event) => {
      event.preventDefault();
      if (other.value.trim()) this.toggle(other.value.trim().toUpperCase());
    };
    return element("div", {}, field,
      element("div", { class: "row" }, element("button", { type: "button", class: "tool", id: "read", onclick: read }, "Read this text"),
        element("fieldset", {}, element("legend", {}, "Switch off"), ...boxes),
        element("form", { onsubmit: submit }, element("label", {}, "another neuron (L1.N338) or head (L0.H4) ", other), " ", element("button", { class: "tool" }, "Switch off"))));
  }

  /** Read a typed text, and show it. */
  async readText(typed) {
    const place = typed ? await this.take(typed) : 0;
    if (place !== null) await this.pickTexts(place, this.beside);
  }

  /** Have a typed text read and put after the others; its place there, null if it cannot be read. */
  async take(typed) {
    const answer = await this.request({ text: typed });
    if (!answer) return null;
    const [text] = answer.result.texts;
    const name = typed.length > 24 ? `${typed.slice(0, 24)}…` : typed;
    this.typed.push(typed);
    return this.data.texts.push(Object.assign(text, { name, asked: { text: typed } })) - 1;
  }

  async toggle(name) {
    const before = this.off;
    this.off = new Set(before);
    if (!this.off.delete(name)) this.off.add(name);
    if (!(await this.choose(this.off.size ? this.ownName : "intact"))) this.off = before;
    this.build();
  }

  /** Ask Python, which answers one request after the other; null, with the reason on the page, if it cannot answer. */
  async request(wanted) {
    this.running += 1;
    this.error = null;
    this.showRunning();
    const asked = this.turn.then(() => this.ask(wanted));
    this.turn = asked.catch(() => {});
    const answer = await asked;
    this.running -= 1;
    this.error = answer.error;
    this.showRunning();
    return answer.error ? null : answer;
  }

  showRunning() {
    if (!this.status) return;
    this.root.setAttribute("aria-busy", this.running > 0);
    this.status.className = this.error ? "error" : "soft";
    this.status.textContent = this.error || (this.running ? "The model is running …" : "");
  }
}

// What a view draws with: elements, packed values, names, movement by keys, pictures of attention.

const A_SINK = "The attention of a head adds up to 100%. A head that has nothing to read gives it to one token, mostly the " +
  "first: the attention sink. In many models a neuron makes the sink: its output gives that token a far larger norm (the " +
  "length of its vector) than any other, which heads of later layers look for."; // what a page says first
const LEVELS = 255;
const SHADES = 24; // shades of a picture of attention
const PLOT = { left: 44, top: 6, right: 16, below: 36, width: 200 }; // a picture of attention, in units of its drawing

/** An element with attributes and children; `on...` attributes are listeners. */
function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** An element of a drawing. */
function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
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
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 8 });
}

const percent = (share) => `${Math.round(100 * share)}%`;
const quoted = (token) => JSON.stringify(token);
const headName = ([layer, head]) => `L${layer}.H${head}`;
const visible = (token) => token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "·") || "∅";

/** The layer and the number of a head from its name; null if it is no head. */
function headOf(name) {
  const found = /^L(\d+)\.H(\d+)$/.exec(name || "");
  return found && [Number(found[1]), Number(found[2])];
}

/** Arrow keys move the focus among the children of a group; only one of them is in the order of the Tab key. */
function roving(group, perRow) {
  const items = () => [...group.querySelectorAll("button:not(:disabled)")].filter((item) => item.checkVisibility());
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

/** Numbers for the ticks of an axis, at most seven. */
function ticks(count) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((one) => count / one <= 7);
  return Array.from({ length: Math.ceil(count / step) }, (_, number) => number * step);
}

/** One path for each shade, of the cells that have it; cells of shade 0 are left out. */
function shades(values, rows, columns, high) {
  const paths = Array.from({ length: SHADES + 1 }, () => "");
  for (let row = 0; row < rows; row++) {
    let begin = 0;
    let current = 0;
    for (let column = 0; column <= columns; column++) {
      const share = column < columns ? Math.sqrt(Math.min(1, values[row * columns + column] / high)) : 0;
      const shade = Math.round(SHADES * share);
      if (shade === current && column < columns) continue;
      if (current) paths[current] += `M${begin} ${row}h${column - begin}v1h${begin - column}z`;
      begin = column;
      current = shade;
    }
  }
  return paths;
}

/** A drawing of values from 0 to `high`, row by row, with axes. */
function heatmap({ id, label, values, rows, columns, high, across, down }) {
  const cell = PLOT.width / columns;
  const height = rows * cell;
  const bottom = PLOT.top + height;
  const drawing = drawn("svg", { id, class: "heat", role: "img", "aria-label": label, viewBox: `0 0 ${PLOT.left + PLOT.width + PLOT.right} ${bottom + PLOT.below}` });
  const cells = drawn("g", { class: "cells", transform: `translate(${PLOT.left} ${PLOT.top}) scale(${cell})` });
  shades(values, rows, columns, high).forEach((path, shade) => {
    if (path) cells.append(drawn("path", { d: path, "fill-opacity": shade / SHADES }));
  });
  drawing.append(drawn("rect", { class: "frame", x: PLOT.left, y: PLOT.top, width: PLOT.width, height }), cells);
  for (const tick of ticks(columns)) {
    const x = PLOT.left + (tick + 0.5) * cell;
    drawing.append(drawn("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4 }), drawn("text", { x, y: bottom + 15, "text-anchor": "middle" }, String(tick)));
  }
  for (const tick of ticks(rows)) {
    const y = PLOT.top + (tick + 0.5) * cell;
    drawing.append(drawn("line", { x1: PLOT.left - 4, x2: PLOT.left, y1: y, y2: y }), drawn("text", { x: PLOT.left - 7, y: y + 4, "text-anchor": "end" }, String(tick)));
  }
  const middle = PLOT.top + height / 2;
  drawing.append(drawn("text", { x: PLOT.left + PLOT.width / 2, y: bottom + 31, "text-anchor": "middle" }, across),
    drawn("text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, down));
  return drawing;
}

/** The cell [row, column] of a heatmap under the pointer. */
function cellAt(drawing, event, rows, columns) {
  const box = drawing.querySelector(".frame").getBoundingClientRect();
  const within = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  return [within((event.clientY - box.top) / box.height, rows), within((event.clientX - box.left) / box.width, columns)];
}

/** One drawing of several figures side by side, each below its caption, which needs no style from outside. */
function sheet(figures) {
  const made = drawn("svg", { xmlns: "http://www.w3.org/2000/svg", "font-family": "sans-serif", "font-size": 12 });
  let [right, bottom] = [0, 0];
  for (const figure of figures) {
    const own = figure.querySelector("svg");
    const copy = own.cloneNode(true);
    const parts = copy.querySelectorAll("path, text, line, rect");
    own.querySelectorAll("path, text, line, rect").forEach((part, number) => {
      const style = getComputedStyle(part);
      for (const name of ["fill", "stroke"]) parts[number].setAttribute(name, style[name]);
    });
    const { width, height } = own.viewBox.baseVal;
    for (const [name, value] of Object.entries({ x: right, y: 22, width, height })) copy.setAttribute(name, value);
    const ink = getComputedStyle(own.querySelector("text")).fill;
    made.append(drawn("text", { x: right + PLOT.left, y: 16, fill: ink, "font-weight": "bold" }, figure.querySelector("figcaption").textContent), copy);
    right += width;
    bottom = Math.max(bottom, 22 + height);
  }
  made.prepend(drawn("rect", { width: "100%", height: "100%", fill: getComputedStyle(figures[0].querySelector("svg")).backgroundColor }));
  for (const [name, value] of Object.entries({ width: right, height: bottom, viewBox: `0 0 ${right} ${bottom}` })) made.setAttribute(name, value);
  return made;
}

/** Save a drawing as a file of its name, whose end says whether it is an SVG or a PNG. */
async function save(drawing, name) {
  const text = new XMLSerializer().serializeToString(drawing);
  let address = `data:image/svg+xml,${encodeURIComponent(text)}`;
  if (name.endsWith(".png")) {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = element("canvas", { width: 3 * image.width, height: 3 * image.height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    address = canvas.toDataURL("image/png");
  }
  element("a", { href: address, download: name }).click();
}

// Figures in the colours of the page, with as many panels side by side as fit.
const dark = matchMedia("(prefers-color-scheme: dark)");
const LEAST = 330; // pixels of a panel
const BETWEEN = 95; // pixels between panels of a column: labels of an axis, and a title
const TOOLBAR = 30; // pixels above the titles of panels, for plotly's buttons
const LINE = 18; // pixels of a line of a title
const LETTER = 7.5; // pixels of a letter of it
const TURNED = 45; // more of them for labels that stand upright

const GROUND = "#24272c"; // of a figure on a dark page
const ON_DARK = { "#ffffff": GROUND, "#f7f7f7": GROUND, "#0072b2": "#56b4e9" }; // of the colours of a scale

function template(light) {
  if (!dark.matches) return light;
  const background = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: GROUND };
  const layout = { ...light.layout, ...background, font: { color: "#ddd" } };
  const lines = { gridcolor: "#41464d", linecolor: "#41464d", zerolinecolor: "#5b6068" };
  layout.xaxis = { ...layout.xaxis, ...lines };
  layout.yaxis = { ...layout.yaxis, ...lines };
  return { ...light, layout };
}

function panelsOf(layout) {
  const panels = [];
  for (const y of Object.keys(layout).filter((name) => /^yaxis\d*$/.test(name))) {
    const x = (layout[y].anchor || "x").replace("x", "xaxis");
    if (layout[x]) panels.push({ x, y, at: layout[x].domain || [0, 1], up: layout[y].domain || [0, 1] });
  }
  return panels.sort((a, b) => b.up[1] - a.up[1] || a.at[0] - b.at[0]);
}

const near = (a, b) => Math.abs(a - b) < 0.02;

// The titles of panels: annotations above their middle, and at the end of rows.
function titleOf(panel, titles) {
  const [left, right] = panel.at, [low, high] = panel.up;
  const above = titles.find((one) => !one.textangle && near(one.x, (left + right) / 2) && near(one.y, high));
  const ofColumn = above || titles.find((one) => !one.textangle && near(one.x, (left + right) / 2));
  const ofRow = titles.find((one) => one.textangle && near(one.y, (low + high) / 2));
  return [ofColumn, ofRow].filter(Boolean).map((one) => one.text).join(", ");
}

// A title in lines of so many letters, broken between words.
function broken(text, letters) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && `${lines.at(-1)} ${word}`.length > letters) lines.push(word);
    else lines.push(`${lines.pop()} ${word}`.trim());
  }
  return lines.join("<br>");
}

// Titles as wide as their panels, below the buttons.
function titled(layout, width) {
  const inside = width - layout.margin.l - layout.margin.r;
  const panels = panelsOf(layout);
  let lines = 1;
  for (const one of layout.annotations || []) {
    if (one.xref !== "paper" || one.yref !== "paper" || one.textangle) continue;
    const panel = panels.find(({ at }) => near(one.x, (at[0] + at[1]) / 2));
    if (!panel) continue;
    one.text = broken(one.text, (panel.at[1] - panel.at[0]) * inside / LETTER);
    lines = Math.max(lines, one.text.split("<br>").length);
  }
  const more = TOOLBAR + LINE * (lines - 1);
  layout.margin.t += more;
  layout.height += more;
}

function arranged(home, width) {
  const panels = panelsOf(home);
  const perRow = new Set(panels.map((one) => one.at[0].toFixed(2))).size;
  const layout = structuredClone(home);
  layout.template = template(home.template);
  const fit = Math.max(1, Math.min(perRow, Math.floor(width / LEAST)));
  const margin = home.margin, inside = home.height - margin.t - margin.b;
  const tallest = Math.min(320, Math.max(200, inside * Math.max(...panels.map((one) => one.up[1] - one.up[0]))));
  const more = fit === 1 && perRow > 1 ? TURNED : 0;
  layout.margin.b += more;
  if (fit < perRow) {
    const rows = Math.ceil(panels.length / fit), columns = Math.ceil(panels.length / rows);
    const between = BETWEEN + more;
    const whole = rows * tallest + (rows - 1) * between;
    layout.height = whole + margin.t + layout.margin.b;
    const titles = (home.annotations || []).filter((one) => one.xref === "paper" && one.yref === "paper");
    layout.annotations = (layout.annotations || []).filter((one) => one.xref !== "paper" || one.yref !== "paper");
    panels.forEach((panel, number) => {
      const row = Math.floor(number / columns), column = number % columns;
      const top = 1 - row * (tallest + between) / whole, room = columns > 1 ? 0.09 : 0;
      const left = column * (1 + room) / columns, right = left + (1 + room) / columns - room;
      const domain = [top - tallest / whole, top];
      Object.assign(layout[panel.x], { domain: [left, right], showticklabels: true });
      if ((right - left) * width < 400) layout[panel.x].tickangle = "auto"; // names would run into each other
      Object.assign(layout[panel.y], { domain, showticklabels: true });
      const text = titleOf(panel, titles);
      const place = { x: (left + right) / 2, y: top, xref: "paper", yref: "paper", xanchor: "center", yanchor: "bottom" };
      if (text) layout.annotations.push({ text, showarrow: false, font: { size: 14 }, ...place });
    });
  }
  if (home.legend && home.legend.y < 0) {
    layout.legend.y = (home.legend.y * inside - more) / (layout.height - margin.t - layout.margin.b);
  }
  for (const one of layout.annotations || []) {
    if (dark.matches && one.bgcolor) one.bgcolor = GROUND; // its letters are light then
    if (width < 600 && (one.bgcolor || (one.textangle && one.xref !== "paper"))) one.font.size = 8; // side by side
  }
  if (width < 600) Object.assign(layout.margin, { l: 52, r: 12 });
  titled(layout, width);
  return layout;
}

// A scale of colours from white is one from the ground on a dark page.
function onGround(scale) {
  if (!dark.matches || !Array.isArray(scale)) return scale;
  return scale.map(([share, colour]) => [share, ON_DARK[colour] || colour]);
}

// The scale of colours stands beside the panel whose colours it explains.
function scaled(trace, layout) {
  const [low, high] = layout[(trace.yaxis || "y").replace("y", "yaxis")]?.domain || [0, 1];
  const place = { len: high - low, y: low, yanchor: "bottom" };
  const axis = layout[trace.coloraxis];
  if (axis) Object.assign(axis, { colorbar: { ...axis.colorbar, ...place }, colorscale: onGround(axis.colorscale) });
  if (trace.type !== "heatmap" || axis) return trace;
  return { ...trace, colorbar: { ...trace.colorbar, ...place }, colorscale: onGround(trace.colorscale) };
}


const homes = new Map();
function draw(plot) {
  const width = plot.parentElement.clientWidth;
  if (!width) return; // in a closed section
  if (!homes.has(plot)) homes.set(plot, { layout: structuredClone(plot.layout), data: plot.data });
  const home = homes.get(plot);
  const layout = arranged(home.layout, width);
  plot.parentElement.style.height = `${layout.height}px`;
  Plotly.react(plot, home.data.map((one) => scaled(one, layout)), { ...layout, width });
}
const drawAll = () => document.querySelectorAll(".js-plotly-plot").forEach(draw);

// A link to a closed section opens it.
function openLinked() {
  const section = document.getElementById(location.hash.slice(1));
  const closed = section && section.querySelector(":scope > details");
  if (closed) closed.open = true;
}
addEventListener("hashchange", openLinked);
openLinked();
addEventListener("resize", drawAll);
addEventListener("toggle", drawAll, true);
dark.addEventListener("change", drawAll);
drawAll();

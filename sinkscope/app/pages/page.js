"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(hover: none)").matches; // a drag scrolls there, and no bar can come and go
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const boxes = [...document.querySelectorAll(".plot")];

  // plotly.js comes packed inside of the page, or lies beside it.
  async function library() {
    const at = document.getElementById("plotly"), script = document.createElement("script");
    if (at.dataset.src) {
      script.src = at.dataset.src;
      const loaded = new Promise((done, failed) => Object.assign(script, { onload: done, onerror: failed }));
      document.head.append(script);
      return loaded;
    }
    const bytes = Uint8Array.from(atob(at.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
  let drawing;
  const failed = () => {
    for (const box of boxes) box.textContent = "This figure needs plotly.js beside the page, and a browser of 2023 or later.";
  };

  // Figures are drawn when they come near, in the colours of the page and as wide as there is room; on a narrow screen
  // they keep a width that can be read, and scroll in their own box.
  function layout(box, figure) {
    const room = box.clientWidth, natural = figure.layout.width;
    const width = natural <= room ? natural : Math.max(room, Math.round(0.78 * natural));
    const copy = structuredClone(figure.layout), clear = "rgba(0,0,0,0)";
    for (const note of copy.annotations ?? []) // titles of panels, which would run into each other
      if (note.font?.size > 12) note.font.size = Math.max(11, (note.font.size * width) / natural);
    if (copy.title?.text) copy.title.font = { size: Math.max(11, ((copy.title.font?.size ?? 15) * width) / natural) };
    return {
      ...copy,
      template: themes[dark.matches ? "dark" : "white"],
      paper_bgcolor: clear,
      plot_bgcolor: clear,
      modebar: { bgcolor: clear },
      width,
      ...(touch ? { dragmode: false } : {}),
    };
  }
  // Black lines and texts, which the dark page would swallow.
  function coloured(data) {
    const text = JSON.stringify(data);
    return JSON.parse(dark.matches ? text.replaceAll('"#000000"', '"#ffffff"') : text);
  }
  async function draw(box) {
    await (drawing ??= library());
    const figure = (box.figure ??= JSON.parse(box.querySelector("script").textContent));
    let area = box.querySelector("div");
    if (!area) box.append((area = document.createElement("div")));
    const config = { displaylogo: false, displayModeBar: touch ? false : "hover", scrollZoom: false };
    return Plotly.react(area, coloured(figure.data), layout(box, figure), config);
  }
  const near = new IntersectionObserver(
    (seen) => {
      for (const one of seen) {
        if (!one.isIntersecting) continue;
        near.unobserve(one.target);
        draw(one.target).catch(failed);
      }
    },
    { rootMargin: "800px 0px" },
  );
  for (const box of boxes) {
    box.tabIndex = 0; // a wide figure is scrolled with the arrow keys
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "figure");
    near.observe(box);
  }
  const redraw = () => boxes.filter((box) => box.figure).forEach(draw);
  dark.addEventListener("change", redraw);
  let wait, width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar
    width = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 150);
  });
  addEventListener("beforeprint", () => boxes.forEach(draw));

  // Tables: numbers to the right, words to the left, sorted by their heads, and the long ones searched.
  const number = (text) => (/^[-+]?[\d.,]+(e[-+]?\d+)?\s*%?$/i.test(text) ? parseFloat(text.replaceAll(",", "")) : NaN);
  const few = 12;

  function enhance(table) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
    heads.forEach((head, i) => {
      const words = rows.some((row) => !/^[-–]?$/.test(row.cells[i].textContent) && isNaN(number(row.cells[i].textContent)));
      if (words) [head, ...rows.map((row) => row.cells[i])].forEach((cell) => cell.classList.add("word"));
      for (const row of rows) if (row.cells[i].textContent.length > 40) row.cells[i].classList.add("long");
      head.tabIndex = 0;
      head.addEventListener("click", () => sort(i, words));
      head.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        sort(i, words);
      });
    });
    let shown = rows, wanted = "", all = rows.length <= 2 * few;

    function sort(column, words) {
      const down = heads[column].getAttribute("aria-sort") === "ascending";
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
      const keys = new Map(rows.map((row) => {
        const text = row.cells[column].textContent;
        return [row, words ? text : number(text)];
      }));
      const sign = down ? -1 : 1;
      shown = [...rows].sort((a, b) => {
        const x = keys.get(a), y = keys.get(b);
        if (words) return sign * x.localeCompare(y);
        return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
      });
      fill();
    }
    let count, more;
    function fill() {
      const hits = wanted ? shown.filter((row) => row.textContent.toLowerCase().includes(wanted)) : shown;
      body.replaceChildren(...(all ? hits : hits.slice(0, few)));
      if (!count) return;
      count.textContent = wanted ? `${hits.length} of ${rows.length} rows` : `${rows.length} rows`;
      more.hidden = all || hits.length <= few;
      more.textContent = `show all ${hits.length}`;
    }
    if (rows.length > few) {
      const tools = document.createElement("div"), find = document.createElement("input");
      tools.className = "tools";
      find.type = "search";
      find.placeholder = "search";
      find.setAttribute("aria-label", "search this table");
      find.addEventListener("input", () => { wanted = find.value.toLowerCase(); fill(); });
      count = document.createElement("output");
      more = document.createElement("button");
      more.addEventListener("click", () => { all = true; fill(); });
      tools.append(find, count, more);
      table.before(tools);
    }
    fill();
  }
  for (const table of document.querySelectorAll("main table")) {
    const searched = table.parentElement.querySelector(":scope > p > input"); // it has a script of its own
    if (table.tHead && table.tBodies[0]?.rows.length && !searched) enhance(table);
  }
})();

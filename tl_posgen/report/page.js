// Figures, drawn when they come into view; and the panel of a head: its numbers, attention, curves and token maps.
"use strict";
const night = matchMedia("(prefers-color-scheme: dark)"), onPaper = () => document.body.classList.contains("paper");
const isDark = () => night.matches && !onPaper();
const find = (id) => document.getElementById(id);
const read = (id) => JSON.parse(find(id).textContent);
const TEMPLATES = read("templates"), HEADS = read("heads");
const CONFIG = { displaylogo: false, showSendToCloud: false, toImageButtonOptions: { format: "svg" } };
const SMALLEST = 8; // pixels of letters in cells
const HEAD = /^L\d+H\d+$/;

function layoutOf(layout) {
  const clear = "rgba(0,0,0,0)", template = TEMPLATES[isDark() ? "dark" : "light"];
  const modebar = { bgcolor: clear, color: "#9ca3af", activecolor: isDark() ? "#e5e7eb" : "#1f2937" };
  return { ...layout, template, modebar, paper_bgcolor: clear, plot_bgcolor: clear };
}

function draw(div) {
  const text = div.nextElementSibling.textContent;
  const { data, layout } = JSON.parse(isDark() ? text.replaceAll('"black"', '"#e5e7eb"') : text);
  div.dataset.drawn = "yes";
  div.dataset.width = div.clientWidth;
  layout.width = div.clientWidth;
  fitTo(layout, data, layout.width);
  div.style.height = `${layout.height}px`;
  Plotly.react(div, data, layoutOf(layout), CONFIG).then(() => {
    div.removeAllListeners("plotly_click");
    div.on("plotly_click", ({ points: [point] }) => {
      if (point.data.meta === "heads") show(point.text && HEAD.test(point.text) ? point.text : `L${point.y}H${point.x}`);
    });
    div.removeAllListeners("plotly_afterplot");
    div.on("plotly_afterplot", () => hideTiny(div));
    hideTiny(div);
    div.dataset.drawn = "whole";
  });
}

// Numbers in cells that are too small to read are hidden: hovering says them, and a zoom shows them.
function hideTiny(div) {
  for (const text of div.querySelectorAll(".heatmap-label text")) {
    text.style.visibility = parseFloat(text.style.fontSize) < SMALLEST ? "hidden" : "";
  }
}

for (const link of document.querySelectorAll("nav a")) { // to a folded section: unfold it
  link.addEventListener("click", () => {
    const details = document.querySelector(`${link.hash} > details.section`);
    if (details) details.open = true;
  });
}

const figures = [...document.querySelectorAll(".plot")];
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting && !target.dataset.drawn) draw(target);
  }
}, { rootMargin: "600px" });
figures.forEach((div) => near.observe(div));
const drawn = () => figures.filter((div) => div.dataset.drawn);
addEventListener("resize", () => {
  drawn().filter((div) => div.clientWidth !== Number(div.dataset.width)).forEach(draw);
});
addEventListener("beforeprint", () => { // paper has no scrolling and no unfolding: all figures, as wide as a sheet
  document.body.classList.add("paper");
  for (const div of figures) {
    for (let fold = div.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    draw(div);
  }
});
addEventListener("afterprint", () => {
  document.body.classList.remove("paper");
  drawn().forEach(draw);
});
night.addEventListener("change", () => {
  if (!onPaper()) drawn().forEach(draw);
  if (find("panel")?.open) show(find("head").value);
});

for (const table of document.querySelectorAll("#claims .short table")) { // a cell that stands alone says its column
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, place) => { cell.dataset.name = names[place]; });
}

// Red to blue by a head's place in its layer, so that it has one colour in every chart; the chosen one is thick.
const hue = (place, n) => `hsl(${n > 1 ? (230 * place) / (n - 1) : 210}, 65%, ${night.matches ? 62 : 45}%)`;

function drawCurve(curve, chosen) {
  const layer = HEADS.names[chosen].split("H")[0];
  const rows = HEADS.names.flatMap((name, index) =>
    name.split("H")[0] === layer ? [{ index, name, y: curve.rows[index] }] : []);
  rows.forEach((row, place) => { row.colour = hue(place, rows.length); });
  rows.sort((one, other) => (one.index === chosen) - (other.index === chosen));
  const lines = rows.map(({ index, name, y, colour }) => ({
    x: curve.x, y, name, mode: "lines", customdata: curve.x.map(() => name),
    text: curve.x.map((x) => x - (curve.ticks ? 1 : 0)), hovertemplate: `${curve.along} %{text}: %{y:.3f}`,
    line: { color: colour, width: index === chosen ? 4 : 1 }, showlegend: index === chosen, hoverlabel: { namelength: -1 },
  }));
  const grey = { color: "#9ca3af", width: 0 };
  const band = curve.null ? [{
    x: [...curve.x, ...curve.x.toReversed()], y: [...curve.null.high, ...curve.null.low.toReversed()], line: grey,
    fill: "toself", fillcolor: "rgba(156,163,175,.35)", name: "random init, all heads", hoverinfo: "skip",
  }] : [];
  const axis = { title: { text: curve.along }, type: curve.ticks ? "log" : "linear", ...curve.ticks };
  const margin = { t: 32, l: 48, r: 8, b: 40 }, legend = { x: 1, xanchor: "right", y: 1 };
  const div = find("curves").appendChild(document.createElement("figure"));
  div.innerHTML = "<figcaption></figcaption><div></div>";
  div.firstChild.textContent = `${curve.title}: all heads of layer ${layer.slice(1)}, each in one colour in every chart; ${HEADS.names[chosen]} thick`;
  const plot = div.lastChild, layout = { height: 254, margin, legend, xaxis: axis, hovermode: "closest" };
  Plotly.newPlot(plot, [...band, ...lines], layoutOf(layout), CONFIG);
  const width = ({ points: [point] }, size) => point && point.data.customdata
    && Plotly.restyle(plot, { "line.width": size }, [point.curveNumber]);
  plot.on("plotly_hover", (event) => width(event, 4));
  plot.on("plotly_unhover", (event) => width(event, event.points[0].data.customdata[0] === HEADS.names[chosen] ? 4 : 1));
  plot.on("plotly_click", ({ points: [point] }) => point.data.customdata && show(point.data.customdata[0]));
}

// The prompt once for each kind of attention, side by side: a token is coloured by the attention that the chosen query
// pays to it. A click on a token, or a move over it, chooses the query.
function drawPattern({ kinds, tokens, steps, known }, head) {
  if (!known[head]) return;
  const n = tokens.length, bytes = Uint8Array.from(atob(steps), (letter) => letter.charCodeAt(0));
  const attention = (kind, query, key) => bytes[((head * kinds.length + kind) * n + query) * n + key] / 255;
  const figure = find("patterns").appendChild(document.createElement("figure"));
  const caption = figure.appendChild(document.createElement("figcaption"));
  const texts = figure.appendChild(document.createElement("div"));
  texts.className = "beside";
  const columns = kinds.map((kind) => {
    const text = texts.appendChild(document.createElement("p"));
    text.append(Object.assign(document.createElement("b"), { textContent: `attention, ${kind}` }), document.createElement("br"));
    return tokens.map((token, place) => {
      const span = Object.assign(document.createElement("span"), { className: "token", textContent: token.replaceAll("\n", "↵") });
      for (const event of ["mouseover", "click"]) span.addEventListener(event, () => choose(place));
      return text.appendChild(span);
    });
  });
  function choose(query) {
    caption.textContent = `Attention of token ${query}, ${JSON.stringify(tokens[query])}, to the first ${n} tokens of the first prompt. Move over a token to choose it.`;
    columns.forEach((spans, kind) => spans.forEach((span, key) => {
      const share = key > query ? 0 : attention(kind, query, key);
      span.style.background = `color-mix(in srgb, var(--accent) ${Math.round(100 * Math.sqrt(share))}%, transparent)`;
      span.style.opacity = key > query ? 0.35 : 1;
      span.classList.toggle("chosen", key === query);
      span.title = key > query ? "" : share.toFixed(3);
    }));
  }
  choose(n - 1);
}

const homes = new Map(); // where a token map stands when no panel shows it
function bringBack() {
  homes.forEach((home, view) => home.replaceWith(view));
  homes.clear();
}

function show(name) {
  const index = HEADS ? HEADS.names.indexOf(name) : -1;
  if (index < 0) return;
  const panel = find("panel");
  bringBack();
  if (!panel.open) panel.show();
  find("head").value = name;
  find("which").textContent = name;
  if (location.hash !== hashOf(name)) location.hash = hashOf(name);
  find("numbers").replaceChildren(...HEADS.numbers.map(({ label, values, nulls }) => {
    const row = document.createElement("tr");
    const ranked = values.filter((value) => value > values[index]).length + 1;
    const cells = [label, values[index] ?? "-", values[index] == null ? "" : `${ranked} of ${values.length}`];
    cells.push(...nulls.map((of) => of?.[index] ?? "-"));
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  }));
  find("patterns").replaceChildren();
  HEADS.patterns.forEach((one) => drawPattern(one, index));
  find("curves").replaceChildren();
  HEADS.curves.forEach((curve) => drawCurve(curve, index));
  const views = [...document.querySelectorAll(".view")].filter((view) => view.dataset.head === name);
  for (const view of views) {
    const home = document.createElement("div");
    view.replaceWith(home);
    homes.set(view, home);
    find("maps").append(view);
    view.open = true;
  }
  find("nomaps").hidden = views.length > 0;
}

function order() {
  const by = HEADS.numbers[find("order").value];
  const places = HEADS.names.map((_, index) => index);
  if (by) places.sort((one, other) => (by.values[other] ?? -Infinity) - (by.values[one] ?? -Infinity));
  const text = (index) => HEADS.names[index] + (by ? `: ${by.values[index] ?? "-"}` : "");
  find("head").replaceChildren(...places.map((index) => new Option(text(index), HEADS.names[index])));
  return HEADS.names[places[0]];
}

// Heads in sentences and tables are links: #head=L1H3 is the address of a panel.
const hashOf = (name) => `#head=${name}`;
const fromHash = () => show(decodeURIComponent(location.hash).replace("#head=", ""));

function linked(name, text) {
  const link = Object.assign(document.createElement("a"), { href: hashOf(name), textContent: text, className: "head" });
  link.addEventListener("click", (event) => { event.preventDefault(); show(name); });
  return link;
}

function linkHeads(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const parts = text.data.split(/\b(L\d+H\d+)\b/);
    if (!parts.some((part) => HEADS.names.includes(part))) continue;
    text.replaceWith(...parts.map((part) => (HEADS.names.includes(part) ? linked(part, part) : part)));
  }
}

function linkRows(table) { // a row with a layer and a head
  const places = ["layer", "head"].map((name) => [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === name));
  if (places.includes(-1)) return;
  for (const row of table.tBodies[0].rows) {
    const [layer, head] = places.map((place) => row.cells[place]), name = `L${layer.textContent}H${head.textContent}`;
    if (HEADS.names.includes(name)) head.replaceChildren(linked(name, head.textContent));
  }
}

if (HEADS) {
  document.querySelectorAll(".findings li, main td").forEach(linkHeads);
  document.querySelectorAll("main table").forEach((table) => table.tHead && linkRows(table));
  HEADS.numbers.forEach(({ label }, number) => find("order").add(new Option(label, number)));
  order();
  find("head").value = HEADS.first;
  find("order").addEventListener("change", () => show(order()));
  find("head").addEventListener("change", () => show(find("head").value));
  find("open").addEventListener("click", () => show(find("head").value));
  find("close").addEventListener("click", () => { bringBack(); find("panel").close(); location.hash = hashOf(""); });
  addEventListener("hashchange", fromHash);
  fromHash();
}

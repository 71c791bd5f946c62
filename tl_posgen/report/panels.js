// Lays a figure's panels out in the width that there is: rows of panels are broken like lines of text, titles are
// wrapped, and a legend that does not fit beside the panels goes below them.
"use strict";
const LEAST = 185, BARE = 150, BESIDE = 900; // pixels: a panel, one without numbers; where a legend fits beside them
const TOOLBAR = 32, GAP = 64, TITLE = 22, LINE = 15, LETTER = 0.56, LEGEND_LINE = 20;
const near0 = (one, other) => Math.abs(one - other) < 1e-6;
const different = (values) => values.filter((value, place) => values.findIndex((one) => near0(one, value)) === place);

// Each panel with a title or a trace: its domains, its axes, and the annotation above it that is its title.
function panelsOf(layout, data) {
  const axes = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key) && layout[key].domain);
  const square = axes.map((key) => {
    const x = layout[key], y = layout[(x.anchor || "y").replace("y", "yaxis")];
    return y?.domain && { key: key.replace("axis", ""), x, y, across: x.domain, up: y.domain };
  });
  const polar = Object.keys(layout).filter((key) => /^polar\d*$/.test(key) && layout[key].domain)
    .map((key) => ({ polar: layout[key], across: layout[key].domain.x, up: layout[key].domain.y }));
  const panels = [...square, ...polar].filter(Boolean);
  for (const panel of panels) {
    const middle = (panel.across[0] + panel.across[1]) / 2;
    panel.title = (layout.annotations || []).find(({ xref, yref, x, y, yanchor }) =>
      xref === "paper" && yref === "paper" && yanchor === "bottom" && near0(x, middle) && near0(y, panel.up[1]));
  }
  return panels.filter(({ key, polar, title }) => polar || title || data.some(({ xaxis }) => (xaxis || "x") === key));
}

function wrapped(text, width) {
  return text.split("<br>").flatMap((part) => part.split(" ").reduce((lines, word) => {
    const last = lines.length - 1, longer = lines[last] ? `${lines[last]} ${word}` : word;
    return last < 0 || longer.length > width ? [...lines, word] : [...lines.slice(0, last), longer];
  }, [])).join("<br>");
}

const linesOf = (panel) => (panel.title ? panel.title.text.split("<br>").length : 0);
const above = (panel) => LINE * linesOf(panel) + (panel.title?.yshift || 0); // pixels of a title above its panel

// Pixels of the words below a row's axes.
function wordsBelow(row) {
  const lines = Math.max(...row.map(({ x }) => (x?.title?.text ? x.title.text.split("<br>").length : 0)));
  return lines ? TITLE + LINE * (lines - 1) : 0;
}

// Rows of panels as drawn, cut into rows of as many as fit.
function rowsOf(panels, room) {
  const least = panels.every(({ y }) => y?.showticklabels === false) ? BARE : LEAST;
  const tops = different(panels.map(({ up }) => up[1])).sort((one, other) => other - one);
  const rows = tops.map((top) => panels.filter(({ up }) => near0(up[1], top))
    .sort((one, other) => one.across[0] - other.across[0]));
  const most = Math.max(...rows.map((row) => row.length));
  const lines = Math.ceil(most / Math.max(1, Math.floor(room / least))), fit = Math.ceil(most / lines);
  const cut = rows.flatMap((row) => Array.from({ length: Math.ceil(row.length / fit) }, (_, place) => {
    const part = row.slice(place * fit, (place + 1) * fit);
    if (place && row[0].y) { // a row that begins here has the words and numbers of the row's own axis
      part[0].y.title = row[0].y.title;
      part[0].y.showticklabels = row[0].y.showticklabels;
    }
    return part;
  }));
  if (lines > 1 && panels.some(({ x }) => x && x.showticklabels !== false)) {
    panels.filter(({ x }) => x).forEach(({ x }) => { x.showticklabels = true; });
  }
  return { rows: cut, fit, broken: lines > 1 };
}

// The names in the legend, in lines; plotly shows a single one only where a trace asks for it.
function namesOf(layout, data) {
  const named = data.filter(({ name, type, showlegend }) => name && type !== "heatmap" && showlegend !== false);
  const isShown = layout.showlegend !== false && (named.length > 1 || named[0]?.showlegend);
  return isShown ? named.map(({ name }) => name.split("<br>")) : [];
}

function legendBelow(layout, data, width) {
  const names = namesOf(layout, data);
  if (layout.legend || !names.length) return 0;
  const { t, b } = layout.margin, high = names.length * LEGEND_LINE > layout.height - t - b;
  if (width >= BESIDE && !high) return 0;
  const longest = Math.max(...names.flat().map((part) => part.length)) * 7 + 50;
  const lines = Math.ceil(names.length / Math.max(1, Math.floor((width - 40) / longest)));
  layout.legend = { orientation: "h", x: 0, xanchor: "left", y: 0, yref: "container", yanchor: "bottom" };
  return lines * LEGEND_LINE * Math.max(...names.map((parts) => parts.length)) + 12;
}

// Change the layout for a width; its height is what the panels then take.
function fitTo(layout, data, width) {
  const below = legendBelow(layout, data, width), panels = panelsOf(layout, data), { l, r, t, b } = layout.margin;
  const inside = layout.height - t - b, bar = layout.coloraxis && layout.coloraxis.showscale !== false ? 50 : 0;
  const names = layout.legend ? [] : namesOf(layout, data).flat();
  const legend = names.length ? 60 + 6.5 * Math.max(...names.map((part) => part.length)) : 0;
  const room = width - l - r - bar - legend;
  let top = TOOLBAR, bottom = b, height = inside; // the toolbar stands above every title
  if (panels.length > 1) {
    const { rows, fit, broken } = rowsOf(panels, room);
    const titled = rows.some((row) => row.slice(1).some(({ y }) => y?.title?.text)); // axes inside the figure
    const gap = (titled ? 80 : 52) / room;
    for (const row of rows) row.forEach((panel, place) => {
      const wide = (1 - (fit - 1) * gap) / fit, start = place * (wide + gap);
      panel.high = (panel.up[1] - panel.up[0]) * inside;
      panel.to = broken || (titled && width < BESIDE) ? [start, start + wide] : panel.across;
      if (panel.title) {
        const letters = (panel.to[1] - panel.to[0] + 0.8 * gap) * room / ((panel.title.font?.size || 12) * LETTER);
        panel.title.text = wrapped(panel.title.text, Math.max(14, letters));
      }
      if (panel.x?.title?.text) {
        panel.x.title.text = wrapped(panel.x.title.text, Math.max(12, (panel.to[1] - panel.to[0]) * room / (14 * LETTER)));
      }
    });
    const places = [];
    let down = 0;
    rows.forEach((row, place) => {
      if (place) {
        const before = rows[place - 1], named = wordsBelow(before);
        const was = Math.min(...before.map(({ up }) => up[0])) - Math.max(...row.map(({ up }) => up[1]));
        down += Math.max(was > 0 ? was * inside : 0, GAP - LINE + LINE * Math.max(...row.map(linesOf)) + named);
      }
      places.push(down);
      down += Math.max(...row.map(({ high }) => high));
    });
    height = down;
    rows.forEach((row, place) => row.forEach((panel) => {
      const ends = [1 - (places[place] + panel.high) / height, 1 - places[place] / height];
      if (panel.polar) panel.polar.domain = { x: panel.to, y: ends };
      else [panel.x.domain, panel.y.domain] = [panel.to, ends];
      if (panel.title) Object.assign(panel.title, { x: (panel.to[0] + panel.to[1]) / 2, y: ends[1] });
    }));
    top += Math.max(...rows[0].map(above));
    bottom = Math.max(b, TOOLBAR + wordsBelow(rows.at(-1)));
  } else if (panels.length) top += above(panels[0]);
  else if (!panels.length) top = Math.max(top, t);
  layout.margin = { ...layout.margin, t: top, b: bottom + below };
  layout.height = top + height + bottom + below;
}

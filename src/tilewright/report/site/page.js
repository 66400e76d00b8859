"use strict";
const DARK = matchMedia("(prefers-color-scheme: dark)");
const DATA = JSON.parse(document.getElementById("data").textContent);
// Light and dark theme; distinguishable with colour-vision deficiency, and by symbol as well.
const COLOURS = [
  ["#0072b2", "#56b4e9"], ["#d55e00", "#ff9a52"], ["#008060", "#2fc796"], ["#b0418a", "#e79ac6"],
  ["#8a6d00", "#e6c84f"], ["#5146a8", "#aba0f5"], ["#8c3b2a", "#e08b7a"], ["#1b8a9e", "#7fdbe8"],
];
const GREYS = [["#5f6670", "#a9b0ba"], ["#8b929c", "#7d8590"]];
const DASHES = ["dash", "dot", "dashdot", "longdash"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "hexagram", "cross", "star"];
const SHORT = {
  "tensor.bfloat16": "bf16", "tensor.float16": "fp16", "tensor.tf32": "tf32", "tensor.int8": "int8",
  "tensor.float8_e4m3fn": "fp8",
};
const MANY = 2000; // points; more take seconds to draw
// An explicit list, because the default buttons include one that uploads the data.
const CONFIG = {
  displaylogo: false, plotlyServerURL: "", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour({ baseline, slot }) {
  const grey = GREYS[Math.floor(slot / DASHES.length) % GREYS.length];
  return (baseline ? grey : COLOURS[slot % COLOURS.length])[Number(DARK.matches)];
}

function symbol({ baseline, slot }) {
  const at = slot % SYMBOLS.length;
  return SYMBOLS.at(baseline ? -1 - at : at);
}

function line(style) {
  return { color: colour(style), width: 2, dash: style.baseline ? DASHES[style.slot % DASHES.length] : "solid" };
}

// Plotly renders markup in names.
function escaped(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// Short enough for a tick: 64 Mi for 67108864, and a flag by its name if it is set.
function short(name, value) {
  if (typeof value === "boolean") return value ? name : "";
  return value >= 2 ** 20 && value % 2 ** 20 === 0 ? `${value / 2 ** 20} Mi` : String(value ?? "");
}

function distinct(values) {
  return [...new Set(values)];
}

function bars(values, intervals) {
  const known = intervals.some((interval) => interval);
  return {
    type: "data", symmetric: false, visible: known, thickness: 1.5, width: 4,
    array: values.map((value, k) => (intervals[k] ? intervals[k][1] - value : 0)),
    arrayminus: values.map((value, k) => (intervals[k] ? value - intervals[k][0] : 0)),
  };
}

function axis(more) {
  return {
    automargin: true, zeroline: false, ticks: "outside", exponentformat: "SI", minexponent: 5,
    gridcolor: themed("--rule"), linecolor: themed("--muted"), tickcolor: themed("--rule"),
    ...(more.type === "log" && !more.tickvals ? { dtick: "D2" } : {}), // 1, 2 and 5 of each decade
    ...more, title: { text: more.title, standoff: 12 },
  };
}

function layout(more) {
  return {
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: themed("--ink") },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    paper_bgcolor: themed("--card"), plot_bgcolor: themed("--card"), hovermode: "closest",
    hoverlabel: { bgcolor: themed("--page"), bordercolor: themed("--muted"), font: { color: themed("--ink") }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: themed("--muted"), activecolor: themed("--ink") },
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" },
    margin: { l: 16, r: 16, t: 36, b: 16 }, ...more,
  };
}

function show(element, height, traces, more) {
  element.style.height = `${height}px`;
  return Plotly.react(element, traces, layout({ width: element.clientWidth, height, ...more }), CONFIG);
}

// Charts side by side if they fit, else stacked over a shared axis.
function panels(element, titles, across) {
  const count = titles.length;
  const beside = element.clientWidth >= 340 * count;
  const gap = beside ? 100 / element.clientWidth : 0.04;
  const part = (1 - gap * (count - 1)) / count;
  const axes = {};
  titles.forEach(({ title, ...more }, k) => {
    const from = (beside ? k : count - 1 - k) * (part + gap);
    const last = beside || k === count - 1;
    const [x, y] = beside ? [[from, from + part], [0, 1]] : [[0, 1], [from, from + part]];
    const shared = { ...across, ...(last ? {} : { title: "", showticklabels: false }), ...(k ? { matches: "x" } : {}) };
    axes[`xaxis${k + 1}`] = axis({ ...shared, domain: x, anchor: `y${k + 1}` });
    axes[`yaxis${k + 1}`] = axis({ ...more, title, domain: y, anchor: `x${k + 1}` });
  });
  return { axes, beside };
}

// A tick per size if there are few, horizontal if they fit. `notes` has what else changes at a size.
function sizes(values, width, notes = {}) {
  const text = values.map((value) => (typeof value === "number" ? value.toLocaleString("en") : value) + (notes[value] ?? ""));
  const room = Math.max(...text.map((one) => one.length)) * 9 < width / values.length / 1.5;
  return values.length > 24 ? {} : { tickvals: values, ticktext: text, tickangle: room ? 0 : -45 };
}

function options(select, values, names, chosen) {
  select.replaceChildren(...values.map((value, k) => new Option(names[k], value, false, value === chosen)));
}

function op(element, form) {
  const { rows, kernels, gpus } = DATA;
  const filters = ["op", "gpu", "direction", "dtype"].filter((name) => form[name]);
  const most = {};
  for (const row of rows) {
    const key = filters.map((name) => row[name]).join("\n");
    (most[key] ??= []).push(row);
  }
  const [first] = Object.values(most).reduce((a, b) => (b.length > a.length ? b : a));
  for (const name of filters) {
    const values = distinct(rows.map((row) => row[name]));
    options(form[name], values, values.map((value) => (name === "gpu" ? gpus[value] : value)), first[name]);
  }
  const shown = () => rows.filter((row) => filters.every((name) => row[name] === form[name].value));
  const label = (row, names) =>
    escaped(names.map((name) => short(name, row.parameters[name])).filter((text) => text).join(", ") || "none");

  function axes(chosen) {
    const names = distinct(chosen.flatMap((row) => Object.keys(row.parameters)));
    const values = (name) => distinct(chosen.map((row) => row.parameters[name]));
    const varying = names.filter((name) => values(name).length > 1);
    const numeric = varying.filter((name) => values(name).every((value) => typeof value === "number"));
    const byCount = (a, b) => values(b).length - values(a).length;
    const [widest] = numeric.toSorted(byCount);
    return { varying: varying.length ? varying : names, numeric, widest };
  }

  function isUnique(chosen, at) {
    return distinct(chosen.map((row) => `${row.kernel} ${at(row)}`)).length === chosen.length;
  }

  function offer() {
    const chosen = shown();
    const { numeric, widest } = axes(chosen);
    const usual = widest && isUnique(chosen, (row) => row.parameters[widest]) ? `size ${widest}` : "case";
    const values = [...numeric.map((name) => `size ${name}`), "bytes", "case"];
    const selected = values.includes(form.x.value) && form.x.dataset.chosen ? form.x.value : usual;
    options(form.x, values, [...numeric, "minimum bytes", "case"], selected);
  }

  function draw() {
    const chosen = shown();
    const { varying } = axes(chosen);
    const by = form.x.value;
    const name = by.startsWith("size ") ? by.slice(5) : "";
    const at = (row) => (name ? row.parameters[name] : by === "bytes" ? row.bytes : label(row, varying));
    const unique = isUnique(chosen, at);
    const traces = kernels.flatMap((style, number) => {
      const mine = chosen.filter((row) => row.kernel === number);
      if (by !== "case") mine.sort((a, b) => at(a) - at(b));
      if (!mine.length) return [];
      const us = mine.map((row) => row.us);
      const common = {
        type: "scatter", mode: unique ? "lines+markers" : "markers", name: escaped(style.name), legendgroup: style.name,
        x: mine.map(at), text: mine.map((row) => row.text), hovertemplate: "%{text}<extra></extra>", line: line(style),
        marker: {
          color: colour(style), size: 9,
          symbol: mine.map((row) => symbol(style) + (row.stale ? "-open" : "")),
        },
      };
      const shares = mine.map((row) => row.share);
      const ofShares = mine.map(({ interval, share, us }) => interval && [share * us / interval[1], share * us / interval[0]]);
      return [
        { ...common, y: us, error_y: bars(us, mine.map((row) => row.interval)) },
        { ...common, y: shares, error_y: bars(shares, ofShares), xaxis: "x2", yaxis: "y2", showlegend: false },
      ];
    });
    const values = distinct(chosen.map(at));
    // A size along the axis is misleading if another one changes with it, so the tick names that one too.
    const others = varying.filter((other) => other !== name);
    const note = (row) => ` (${others.map((other) => `${escaped(other)}=${escaped(row.parameters[other])}`).join(", ")})`;
    const notes = name && unique && others.length ? Object.fromEntries(chosen.map((row) => [at(row), note(row)])) : {};
    const width = element.clientWidth / (element.clientWidth < 680 ? 1 : 2);
    const named = by === "bytes" ? {} : sizes(values, width, notes);
    const across = by === "case"
      ? { type: "category", categoryarray: values, title: escaped(varying.join(", ")), ...named }
      : { type: values.every((v) => v > 0) && Math.max(...values) > 4 * Math.min(...values) ? "log" : "linear",
          title: name ? escaped(name) : "Minimum bytes moved", ...named };
    const best = Math.max(1, ...chosen.map((row) => row.share));
    const { axes: drawn, beside } = panels(element, [
      { title: "Time, µs", type: "log" },
      { title: "Share of the ceiling", tickformat: ".0%", range: [0, 1.05 * best] },
    ], across);
    const nothing = { text: "No timings for this selection.", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 };
    show(element, beside ? 540 : 860, traces, {
      ...drawn,
      shapes: [{ type: "line", xref: "x2 domain", yref: "y2", x0: 0, x1: 1, y0: 1, y1: 1,
        line: { color: themed("--muted"), width: 1, dash: "dot" } }],
      annotations: chosen.length ? [] : [nothing],
    });
  }

  form.addEventListener("change", (event) => {
    if (event.target === form.x) form.x.dataset.chosen = "yes";
    else offer();
    draw();
  });
  offer();
  return draw;
}

function roofline(element, form) {
  const { points, gpus, measured, datasheet } = DATA;
  const ops = distinct(points.map((point) => point.op));
  options(form.gpu, Object.keys(gpus), Object.values(gpus), Object.keys(gpus)[0]);
  const first = points.length > MANY ? `op ${ops[0]}` : "";
  options(form.op, ["", ...ops.map((op) => `op ${op}`)], ["all", ...ops], first);
  form.addEventListener("change", () => draw());

  const units = (rates) => Object.keys(rates ?? {}).filter((unit) => unit !== "copy");

  function ceilings(rates, [low, high], style) {
    if (!rates?.copy || !units(rates).length) return [];
    const top = Math.max(...units(rates).map((unit) => rates[unit]));
    const ceiling = (text, x, y) => ({
      type: "scatter", mode: "lines", x, y, line: style, showlegend: false,
      hovertemplate: `${escaped(text)}<extra></extra>`,
    });
    const slope = [`copy, ${rates.copy.toFixed(2)} TB/s`, [low, top / rates.copy], [low * rates.copy, top]];
    const flat = (unit) => [
      `${unit}, ${rates[unit].toFixed(1)} T/s`, [rates[unit] / rates.copy, high], [rates[unit], rates[unit]],
    ];
    return [slope, ...units(rates).map(flat)].map((one) => ceiling(...one));
  }

  // Ceilings close to each other share a label.
  function labels(rates, high, narrow) {
    const together = [];
    for (const unit of units(rates).toSorted((a, b) => rates[a] - rates[b])) {
      const last = together.at(-1);
      if (last && rates[unit] < 1.5 * rates[last[0]]) last.push(unit);
      else together.push([unit]);
    }
    const text = (x, y, words, more) => ({
      x: Math.log10(x), y: Math.log10(y), text: escaped(words), xanchor: "right", showarrow: false,
      yanchor: "bottom", font: { size: narrow ? 10 : 12, color: themed("--muted") }, ...more,
    });
    if (!rates?.copy || !together.length) return [];
    const free = rates[together.at(-1)[0]] / 6; // the area left of the slope is empty
    const slope = text(free / rates.copy, free, `copy, ${rates.copy.toFixed(2)} TB/s `);
    const flat = together.map((near) => {
      const names = near.map((unit) => SHORT[unit] ?? unit).join(", ");
      const tensor = near[0].startsWith("tensor.") && !narrow ? "tensor " : "";
      return text(high, rates[near.at(-1)], tensor + names, { yanchor: "middle", bgcolor: themed("--card") });
    });
    return [slope, ...flat];
  }

  function draw() {
    const gpu = form.gpu.value;
    const chosen = points.filter((point) => point.gpu === gpu && (!form.op.value || form.op.value === `op ${point.op}`));
    const rates = measured[gpu];
    const xs = chosen.map((point) => point.x);
    const cross = Math.max(1, ...units(rates).map((unit) => rates[unit] / (rates.copy ?? Infinity)));
    const span = [Math.min(0.1, ...xs) / 2, Math.max(10 * cross, ...xs) * 20];
    const marks = ops.flatMap((op, slot) => [false, true].flatMap((baseline) => {
      const mine = chosen.filter((point) => point.op === op && point.baseline === baseline);
      const isNamed = !baseline || !chosen.some((point) => point.op === op && !point.baseline);
      return mine.length ? [{
        type: "scatter", mode: "markers", name: escaped(op), legendgroup: op, showlegend: isNamed,
        x: mine.map((point) => point.x), y: mine.map((point) => point.y), text: mine.map((point) => point.text),
        hovertemplate: "%{text}<extra></extra>",
        marker: { color: colour({ slot }), symbol: symbol({ slot }) + (baseline ? "-open" : ""), size: 8, opacity: 0.85 },
      }] : [];
    }));
    const narrow = element.clientWidth < 680;
    show(element, narrow ? 560 : 640, [
      ...ceilings(datasheet[gpu], span, { color: themed("--muted"), width: 1, dash: "dot" }),
      ...ceilings(rates, span, { color: themed("--ink"), width: 2 }),
      ...marks,
    ], {
      xaxis: axis({ type: "log", title: "Arithmetic intensity, FLOP/byte", range: span.map(Math.log10), dtick: 1 }),
      yaxis: axis({ type: "log", title: "TFLOP/s", dtick: 1 }),
      annotations: labels(units(rates).length ? rates : datasheet[gpu], span[1], narrow),
    });
  }
  return draw;
}

function sweep(element) {
  const charts = [["us", "Time, µs"], ["gigabytes", "GB/s"], ["teraflops", "TFLOP/s"]];
  return () => {
    const traces = DATA.sweeps.flatMap((sweep, slot) =>
      charts.map(([key], k) => ({
        type: "scatter", mode: "lines+markers", x: sweep.k, y: sweep[key], line: line({ slot }),
        marker: { color: colour({ slot }), symbol: symbol({ slot }), size: 8 },
        name: escaped(`${sweep.kernel}, ${DATA.gpus[sweep.gpu]}`), legendgroup: String(slot), showlegend: k === 0,
        xaxis: `x${k + 1}`, yaxis: `y${k + 1}`, error_y: key === "us" ? bars(sweep.us, sweep.interval) : {},
        hovertemplate: `k = %{x}: %{y:.4~g} ${charts[k][1].replace("Time, ", "")}`,
      })),
    );
    const values = distinct(DATA.sweeps.flatMap((sweep) => sweep.k));
    const across = { type: "log", title: "k", ...sizes(values, element.clientWidth / 3) };
    const { axes, beside } = panels(element, charts.map(([, title]) => ({ title, type: "log" })), across);
    show(element, beside ? 440 : 960, traces, axes);
  };
}

// The records of a single-file page.
const lines = document.getElementById("lines");
if (lines) {
  const blob = new Blob([lines.textContent], { type: "application/jsonl" });
  document.querySelector("#raw a").href = URL.createObjectURL(blob);
}

const [chart, below] = ["chart", "sweep-chart"].map((id) => document.getElementById(id));
const form = document.querySelector(".choices");
const draws = [];
if (chart) draws.push((DATA.page === "op" ? op : roofline)(chart, form));
if (below) draws.push(sweep(below));
const drawAll = () => draws.forEach((draw) => draw());
DARK.addEventListener("change", drawAll);
let width = 0;
new ResizeObserver(() => {
  if (width && document.body.clientWidth !== width) drawAll();
  width = document.body.clientWidth;
}).observe(document.body);
drawAll();

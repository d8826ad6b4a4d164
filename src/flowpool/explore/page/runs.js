// Runs: what finished evaluations have found.

import { ask, asker, say } from "./api.js";
import { byId, html, svg } from "./draw.js";

let number = String; // how a score is written

const send = asker("run", draw);

export async function show() {
  try {
    const { folder, runs } = await ask("runs");
    const before = byId("runs-name").value;
    byId("runs-none").hidden = runs.length > 0;
    byId("runs-folder").textContent = folder;
    byId("runs-some").hidden = runs.length === 0;
    byId("runs-name").replaceChildren(...runs.map((name) => html("option", {}, name)));
    if (runs.includes(before)) byId("runs-name").value = before;
    if (runs.length) refresh();
  } catch (error) {
    say(error.message);
  }
}

export function hide() {}

function refresh() {
  send({ run: byId("runs-name").value });
}

function draw(given, asked) {
  byId("runs-dataset").textContent = `Pooling on ${given.dataset}`;
  byId("runs-about").textContent = given.about;
  byId("runs-minus").textContent = `Minus ${given.reference}`;
  byId("runs-report").hidden = !given.report;
  byId("runs-report").href = `report/${encodeURIComponent(asked.run)}`;
  const { title, percent, lower_is_better: lower } = given.metric;
  number = (value) => (percent ? (100 * value).toFixed(1) : value.toFixed(3));
  byId("runs-metric").textContent = title[0].toUpperCase() + title.slice(1) + (lower ? " (lower is better)" : "");
  const folds = given.rows.flatMap((row) => row.folds);
  const unit = percent ? 10 : 100;
  const [low, high] = [Math.floor(unit * Math.min(...folds)) / unit, Math.ceil(unit * Math.max(...folds)) / unit];
  const place = (value) => `${2 + (96 * (value - low)) / (high - low || 1)}%`;
  byId("runs-rows").replaceChildren(...given.rows.map((row) => tableRow(row, given.reference, place)), axis(low, high, place));
}

function tableRow(row, reference, place) {
  const dots = row.folds.map((value, fold) => svg("circle", { cx: place(value), cy: `${32 + 12 * (fold % 4)}%`, r: 4.5 }));
  const strip = svg("svg", { role: "img", "aria-label": `Folds: ${row.folds.map(number).join(", ")}` },
    svg("line", { class: "rule", x1: "0%", x2: "100%", y1: "50%", y2: "50%" }), ...dots,
    svg("line", { class: "mean", x1: place(row.mean), x2: place(row.mean), y1: "8%", y2: "92%" }));
  const difference = "difference" in row ? `${row.difference < 0 ? "−" : "+"}${number(Math.abs(row.difference))} (${number(row.error)})` : "";
  return html("tr", {},
    html("th", { scope: "row" }, row.pool),
    html("td", { class: "strip" }, strip),
    html("td", {}, `${number(row.mean)} ± ${number(row.deviation)}`),
    html("td", { "data-name": `minus ${reference}` }, difference),
    html("td", { "data-name": "p" }, "p" in row && row.p !== null ? row.p.toFixed(2) : ""));
}

function axis(low, high, place) {
  const marks = [low, (low + high) / 2, high];
  const anchors = ["start", "middle", "end"];
  const scale = svg("svg", { "aria-hidden": true },
    ...marks.map((value, mark) => svg("text", { x: place(value), y: 12, "text-anchor": anchors[mark] }, number(value))));
  return html("tr", { class: "axis-row" }, html("td"), html("td", { class: "strip" }, scale), html("td"), html("td"), html("td"));
}

export function start() {
  byId("runs-name").addEventListener("change", refresh);
}

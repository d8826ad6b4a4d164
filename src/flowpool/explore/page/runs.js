// Runs: what finished evaluations have found.

import { ask, asker, say } from "./api.js";
import { byId, html, svg } from "./draw.js";

const percent = (value) => (100 * value).toFixed(1);

const send = asker("run", draw);

export async function show() {
  try {
    const { folder, runs } = await ask("runs");
    const before = byId("runs-name").value;
    byId("runs-none").hidden = runs.length > 0;
    byId("runs-none").textContent = `No results in ${folder} yet. The command “flowpool evaluate MUTAG” writes some; open this view again then.`;
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
  const folds = given.rows.flatMap((row) => row.folds);
  const [low, high] = [Math.floor(10 * Math.min(...folds)) / 10, Math.ceil(10 * Math.max(...folds)) / 10];
  const place = (value) => `${2 + (96 * (value - low)) / (high - low || 1)}%`;
  byId("runs-rows").replaceChildren(...given.rows.map((row) => tableRow(row, given.reference, place)), axis(low, high, place));
}

function tableRow(row, reference, place) {
  const dots = row.folds.map((value, fold) => svg("circle", { cx: place(value), cy: `${32 + 12 * (fold % 4)}%`, r: 4.5 }));
  const strip = svg("svg", { role: "img", "aria-label": `Folds: ${row.folds.map(percent).join(", ")}` },
    svg("line", { class: "rule", x1: "0%", x2: "100%", y1: "50%", y2: "50%" }), ...dots,
    svg("line", { class: "mean", x1: place(row.mean), x2: place(row.mean), y1: "8%", y2: "92%" }));
  const difference = "difference" in row ? `${row.difference < 0 ? "−" : "+"}${percent(Math.abs(row.difference))} (${percent(row.error)})` : "";
  return html("tr", {},
    html("th", { scope: "row" }, row.pool),
    html("td", { class: "strip" }, strip),
    html("td", {}, `${percent(row.mean)} ± ${percent(row.deviation)}`),
    html("td", { "data-name": `minus ${reference}` }, difference),
    html("td", { "data-name": "p" }, "p" in row && row.p !== null ? row.p.toFixed(2) : ""));
}

function axis(low, high, place) {
  const marks = [low, (low + high) / 2, high];
  const anchors = ["start", "middle", "end"];
  const scale = svg("svg", { "aria-hidden": true },
    ...marks.map((value, number) => svg("text", { x: place(value), y: 12, "text-anchor": anchors[number] }, `${percent(value)} %`)));
  return html("tr", { class: "axis-row" }, html("td"), html("td", { class: "strip" }, scale), html("td"), html("td"), html("td"));
}

export function start() {
  byId("runs-name").addEventListener("change", refresh);
}

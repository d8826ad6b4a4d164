// Graphs: a graph of a dataset, its nodes in shares of the pooled points, and the plane of its features.

import { ask, asker, say } from "./api.js";
import { byId, colour, converged, drawPlan, drawPoints, fillReadout, fromLogarithm, html, Plane, slider, svg } from "./draw.js";

const MEMBERS = 12; // nodes named in the sentence about a point
const KINDS = 3; // of nodes named beside a point
const PASTED = "pasted table";
const FIRST = { dataset: "MUTAG", graph: 53 }; // two rings with a nitro group and two chlorine atoms

let active = false;
let answer = null;
let asked = null;
let chosen = -1; // point

const settings = {
  points: slider("graphs-points"),
  epsilon: slider("graphs-epsilon", fromLogarithm),
  seed: slider("graphs-seed"),
  hops: slider("graphs-hops"),
};
const picture = new Plane(byId("graphs-graph"), draw);
const plane = new Plane(byId("graphs-plane"), draw);
const layers = { plan: svg("g", { class: "plan" }), spots: svg("g"), points: svg("g") };
plane.element.append(layers.plan, layers.spots, layers.points);

const send = asker("graph", (given, question) => {
  answer = given;
  asked = question;
  if (chosen >= given.points.length) chosen = -1;
  byId("graphs-number").max = given.graphs - 1;
  draw();
});

export async function show() {
  active = true;
  if (!byId("graphs-dataset").options.length) {
    try {
      const { datasets, own } = await ask("datasets");
      byId("graphs-dataset").replaceChildren(...datasets.map((name) => html("option", {}, name)));
      if (own === null && datasets.includes(FIRST.dataset)) {
        byId("graphs-dataset").value = FIRST.dataset;
        byId("graphs-number").value = FIRST.graph;
      }
    } catch (error) {
      return say(error.message);
    }
  }
  refresh();
}

export function hide() {
  active = false;
}

function refresh() {
  const pastes = byId("graphs-dataset").value === PASTED;
  byId("graphs-paste").hidden = !pastes;
  if (pastes && !byId("graphs-table").value.trim()) return byId("graphs-table").focus();
  const graph = byId("graphs-number").valueAsNumber;
  if (!Number.isInteger(graph)) return say("The number of the graph must be a whole number.");
  const { points, epsilon, seed, hops } = settings;
  send({
    dataset: byId("graphs-dataset").value, table: pastes ? byId("graphs-table").value : "", graph, points: points.value, epsilon: epsilon.value, seed: seed.value, hops: hops.value,
  });
}

function go(graph) {
  byId("graphs-number").value = graph;
  refresh();
}

function draw() {
  if (!active || !answer || !picture.width || !plane.width) return;
  fillReadout(byId("graphs-readout"), answer, converged(answer.status));
  byId("graphs-advice").hidden = answer.status === "OK";
  byId("graphs-advice").textContent = answer.advice;
  drawGraph();
  drawFeatures();
  drawLegend();
  const count = answer.nodes.length;
  byId("graphs-about").textContent =
    `${asked.dataset}, graph ${asked.graph} of 0 to ${answer.graphs - 1}: ${count} nodes, ${answer.edges.length} edges${answer.label}. ` +
    "A node is divided among the points that its mass flows to.";
  byId("graphs-share").textContent =
    `The same nodes by their features${answer.edges.length ? `, averaged over ${asked.hops} hops` : ""}: the two principal axes hold ${Math.round(100 * answer.share)} % of the variance. ` +
    "Nodes with equal features lie on one another.";
}

function drawGraph() {
  const { places, edges, shares, names } = answer;
  picture.fit(places, 1.2);
  const spots = places.map((place) => picture.toPixels(place));
  const lengths = edges.map(([from, to]) => Math.hypot(spots[from][0] - spots[to][0], spots[from][1] - spots[to][1]));
  const shortest = lengths.length ? Math.min(...lengths) : 0.5 * Math.sqrt((picture.width * picture.height) / spots.length);
  const radius = Math.min(15, Math.max(3, 0.36 * shortest));
  picture.element.replaceChildren(
    ...edges.map(([from, to]) => svg("line", { class: "edge", x1: spots[from][0], y1: spots[from][1], x2: spots[to][0], y2: spots[to][1] })),
    ...spots.map(([x, y], node) => {
      const faint = chosen >= 0 && shares[node][chosen] < 0.5 / shares[node].length;
      const label = radius > 7 ? [svg("text", {}, names[node])] : [];
      const title = svg("title", {}, `Node ${node} ${names[node]}: ${listShares(shares[node])}`);
      return svg("g", { class: faint ? "atom faint" : "atom", transform: `translate(${x} ${y})` },
        svg("circle", { class: "rim", r: radius + 1 }), ...wedges(shares[node], radius), ...label, title);
    }),
  );
}

function listShares(shares) {
  const named = shares.map((share, point) => [Math.round(100 * share), point + 1]).filter(([percent]) => percent > 0);
  return named.sort((one, other) => other[0] - one[0]).map(([percent, point]) => `point ${point} ${percent} %`).join(", ");
}

// A pie, clockwise from the top.
function wedges(shares, radius) {
  const whole = shares.findIndex((share) => share > 0.999);
  if (whole >= 0) return [svg("circle", { class: `full ${colour(whole)}`, r: radius })];
  const rim = (turn) => [radius * Math.sin(2 * Math.PI * turn), -radius * Math.cos(2 * Math.PI * turn)].map((value) => value.toFixed(2));
  let turn = 0;
  return shares.map((share, point) => {
    const [from, to] = [turn, turn + share];
    turn = to;
    return svg("path", { class: colour(point), d: `M0 0L${rim(from)}A${radius} ${radius} 0 ${share > 0.5 ? 1 : 0} 1 ${rim(to)}Z` });
  });
}

function drawFeatures() {
  const { nodes, points, shares } = answer;
  plane.fit([...nodes, ...points], 1.25);
  const rows = points.map((_, point) => shares.map((row) => (chosen < 0 || chosen === point ? row[point] : 0)));
  drawPlan(layers.plan, plane, points, nodes, rows);
  layers.spots.replaceChildren(...nodes.map((node) => {
    const [cx, cy] = plane.toPixels(node);
    return svg("circle", { class: "spot", cx, cy, r: 5 });
  }));
  drawPoints(layers.points, plane, points);
  [...layers.points.children].forEach((mark, point) => {
    mark.classList.toggle("chosen", point === chosen);
    mark.classList.toggle("faint", chosen >= 0 && point !== chosen);
  });
}

// What a point is made of: its share of every kind of node, the most frequent first.
function contents(point) {
  const kinds = new Map();
  answer.shares.forEach((row, node) => kinds.set(answer.names[node], (kinds.get(answer.names[node]) ?? 0) + row[point]));
  const listed = [...kinds].filter(([, count]) => count >= 0.05).sort((one, other) => other[1] - one[1]).slice(0, KINDS);
  return listed.map(([name, count]) => `${count.toFixed(1)} ${name || "nodes"}`).join(" · ");
}

function drawLegend() {
  const legend = byId("graphs-legend");
  const focused = [...legend.children].indexOf(document.activeElement);
  legend.replaceChildren(...answer.points.map((_, point) => {
    const button = html("button", { type: "button", "aria-pressed": point === chosen },
      html("span", { class: `mark ${colour(point)}` }, String(point + 1)), contents(point));
    button.addEventListener("click", () => choose(point));
    return button;
  }));
  legend.children[focused]?.focus();
  byId("graphs-members").textContent = chosen < 0
    ? "Choose a point, here or in the plane, to see its nodes."
    : `Point ${chosen + 1} holds ${members(chosen)}.`;
}

function members(point) {
  const held = answer.shares.map((row, node) => [Math.round(100 * row[point]), node]).filter(([percent]) => percent > 0);
  held.sort((one, other) => other[0] - one[0]);
  const named = held.slice(0, MEMBERS).map(([percent, node]) => `${percent} % of node ${node} ${answer.names[node]}`.trim());
  const rest = held.length - named.length;
  return named.join(", ") + (rest > 0 ? ` and parts of ${rest} more` : "");
}

function choose(point) {
  chosen = chosen === point ? -1 : point;
  draw();
}

export function start() {
  byId("graphs-form").addEventListener("submit", (event) => event.preventDefault());
  byId("graphs-dataset").addEventListener("change", () => go(0));
  byId("graphs-apply").addEventListener("click", () => go(0));
  byId("graphs-number").addEventListener("change", refresh);
  for (const { input } of Object.values(settings)) input.addEventListener("input", refresh);
  const count = () => answer?.graphs ?? 1;
  const number = () => byId("graphs-number").valueAsNumber || 0;
  byId("graphs-before").addEventListener("click", () => go((number() + count() - 1) % count()));
  byId("graphs-after").addEventListener("click", () => go((number() + 1) % count()));
  byId("graphs-random").addEventListener("click", () => go(Math.floor(Math.random() * count())));
  layers.points.addEventListener("click", (event) => {
    const mark = event.target.closest(".point");
    if (mark) choose([...layers.points.children].indexOf(mark));
  });
}

// Compare: one cloud, six pools.

import { asker } from "./api.js";
import { cloud, drawNodes, fitToCloud, makeNodeLayer, onChange, question } from "./cloud.js";
import { byId, drawPoints, html, Plane, set, svg } from "./draw.js";

const POOLS = {
  flow: "The points nearest to the cloud in Sinkhorn divergence: FlowPool.",
  step: "One transport from the shared reference: what FlowReadout reads.",
  wegl: "The exact transport from the same reference.",
  "k-means": "Centres of clusters of this cloud alone, in no shared order.",
  sort: "The M nodes that lie highest.",
  mean: "One point. Its loss is R by definition.",
};

let active = false;
let version = -1;
let answer = null;
const panels = {};

const send = asker("compare", (given) => {
  answer = given;
  draw();
});

export function show() {
  active = true;
  refresh();
}

export function hide() {
  active = false;
}

function refresh() {
  if (!active) return;
  draw();
  const { nodes, ...rest } = question();
  send({ nodes, ...rest });
}

function makePanel(name) {
  const element = svg("svg", { class: "plane", role: "group", "aria-label": `The cloud under ${name}` });
  const plane = new Plane(element, () => { version = -1; draw(); });
  const [nodes, points] = [makeNodeLayer(plane), svg("g")];
  element.append(nodes, points);
  const value = html("b");
  const also = html("p");
  const bar = svg("rect", { height: "100%" });
  const figure = html("figure", { id: `pool-${name}` }, element, html("figcaption", {},
    html("h3", {}, html("span", {}, name), value), svg("svg", { class: "track", "aria-hidden": true }, bar), also));
  panels[name] = { figure, plane, nodes, points, value, also, bar };
  return figure;
}

function draw() {
  if (!active) return;
  const least = Math.min(...(answer?.pools ?? []).map((pool) => pool.lost));
  const most = Math.max(1, ...(answer?.pools ?? []).map((pool) => pool.lost));
  for (const [name, panel] of Object.entries(panels)) {
    if (!panel.plane.width) continue;
    if (version !== cloud.version) fitToCloud(panel.plane);
    drawNodes(panel.nodes, panel.plane);
    const found = answer?.pools.find((pool) => pool.name === name);
    if (!found) continue;
    const radii = found.masses?.map((mass) => Math.max(7, 9 * Math.sqrt(mass * found.masses.length)));
    drawPoints(panel.points, panel.plane, found.points, radii);
    panel.value.textContent = found.lost.toFixed(3);
    set(panel.bar, { width: `${(100 * found.lost) / most}%` });
    const weighed = found.masses ? ` Weighed like their clusters: ${found.lost_with_masses.toFixed(3)}.` : "";
    panel.also.textContent = POOLS[name] + weighed;
    panel.figure.classList.toggle("best", found.lost === least);
  }
  version = cloud.version;
}

export function start() {
  byId("compare-panels").append(...Object.keys(POOLS).map(makePanel));
  onChange(refresh);
}

// The cloud that Play and Compare share, and the panel beside them.

import { say } from "./api.js";
import { byId, children, colour, fromLogarithm, html, set, short, slider, svg } from "./draw.js";

const MOST_NODES = 200;
const FARTHEST = 1e6;

const SHAPES = {
  "Crescent": (random, share) => share < 0.75
    ? turned(1, 0.1 * random(), 4.9 * share - 0.3, 0.12, random)
    : [0.14 * random(), -0.5 + 0.14 * random()],
  "Two moons": (random, share) => share < 0.5
    ? turned(1, 0, 6.28 * share, 0.09, random)
    : [1 - Math.cos(6.28 * (share - 0.5)) + 0.09 * random(), 0.45 - Math.sin(6.28 * (share - 0.5)) + 0.09 * random()],
  "Ring": (random, share) => turned(1, 0, 6.283 * share, 0.08, random),
  "Four clusters": (random, share) => {
    const corner = Math.floor(4 * share);
    return [(corner % 2 ? 1 : -1) + 0.2 * random(), (corner > 1 ? 0.8 : -0.8) + 0.2 * random()];
  },
  "Spiral": (random, share) => turned(0.15 + share, 0, 11 * share, 0.04, random),
  "Random": (random) => [0.8 * random(), 0.6 * random()],
};

export const cloud = { nodes: makeShape("Crescent"), selected: 0, version: 0 };

const listeners = [];
const settings = {
  points: slider("points"),
  epsilon: slider("epsilon", fromLogarithm),
  seed: slider("seed"),
};

export const onChange = (listener) => listeners.push(listener);

export function question() {
  const { points, epsilon, seed } = settings;
  return {
    nodes: cloud.nodes, points: points.value, epsilon: epsilon.value, seed: seed.value, debias: byId("debias").checked,
  };
}

export const shown = (layer) => byId(`show-${layer}`).checked;

function changed() {
  cloud.selected = Math.max(0, Math.min(cloud.selected, cloud.nodes.length - 1));
  fillNode();
  listeners.forEach((listener) => listener());
}

function replace(nodes) {
  cloud.nodes = nodes;
  cloud.version += 1; // planes look where it lies
  changed();
}

function turned(radius, extra, angle, noise, random) {
  return [(radius + extra) * Math.cos(angle) + noise * random(), radius * Math.sin(angle) + noise * random()];
}

// The same cloud every time: mulberry32 behind a normal distribution by Box and Muller.
function makeShape(name, count = 40) {
  let state = 7;
  const uniform = () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  const random = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  return Array.from({ length: count }, (_, node) => [...SHAPES[name](random, node / count), 1]);
}

// --- what can be done to nodes

export function moveNode(node, [x, y]) {
  cloud.nodes[node] = [clamped(x), clamped(y), cloud.nodes[node][2]];
  changed();
}

export function selectNode(node) {
  cloud.selected = node;
  changed();
}

export function addNode(place) {
  if (cloud.nodes.length >= MOST_NODES) return say(`The page takes at most ${MOST_NODES} nodes.`);
  cloud.nodes.push([...place, 1]);
  selectNode(cloud.nodes.length - 1);
}

export function removeNode(node) {
  cloud.nodes.splice(node, 1);
  changed();
}

export function weighNode(node, mass) {
  cloud.nodes[node][2] = Math.min(Math.max(mass, 0), FARTHEST);
  changed();
}

const clamped = (value) => Math.min(Math.max(value, -FARTHEST), FARTHEST);

// --- nodes in a plane, to be dragged or moved by keys

export function makeNodeLayer(plane) {
  const layer = svg("g", { class: "nodes" });
  // The areas that can be hit overlap, so the nearest node is meant, whichever lies on top.
  const nodeAt = (event) => {
    if (!event.target.closest(".node")) return -1;
    const [x, y] = plane.toFeatures(event);
    const gaps = cloud.nodes.map((node) => Math.hypot(node[0] - x, node[1] - y));
    return gaps.indexOf(Math.min(...gaps));
  };
  let dragged = -1;
  let offset = [0, 0];
  plane.element.addEventListener("pointerdown", (event) => {
    dragged = nodeAt(event);
    if (dragged < 0) return;
    event.preventDefault(); // no selection of text; the focus is set by hand
    plane.element.setPointerCapture(event.pointerId);
    const [x, y] = plane.toFeatures(event);
    offset = [cloud.nodes[dragged][0] - x, cloud.nodes[dragged][1] - y];
    selectNode(dragged);
    layer.children[dragged].focus({ focusVisible: false, preventScroll: true });
  });
  plane.element.addEventListener("pointermove", (event) => {
    if (dragged < 0) return;
    const [x, y] = plane.toFeatures(event);
    moveNode(dragged, [x + offset[0], y + offset[1]]);
  });
  for (const end of ["pointerup", "pointercancel"]) plane.element.addEventListener(end, () => { dragged = -1; });
  plane.element.addEventListener("dblclick", (event) => nodeAt(event) < 0 && addNode(plane.toFeatures(event)));
  layer.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (act(event, [...layer.children].indexOf(event.target), plane.reach)) {
      event.preventDefault();
      layer.children[cloud.selected]?.focus();
    }
  });
  return layer;
}

function act(event, node, reach) {
  const [x, y, mass] = cloud.nodes[node];
  const far = (event.shiftKey ? 0.1 : 0.02) * reach;
  const last = cloud.nodes.length - 1;
  const actions = {
    ArrowLeft: () => moveNode(node, [x - far, y]),
    ArrowRight: () => moveNode(node, [x + far, y]),
    ArrowUp: () => moveNode(node, [x, y + far]),
    ArrowDown: () => moveNode(node, [x, y - far]),
    "+": () => weighNode(node, mass + 0.25),
    "-": () => weighNode(node, mass - 0.25),
    Delete: () => removeNode(node),
    Backspace: () => removeNode(node),
    PageUp: () => selectNode(node > 0 ? node - 1 : last),
    PageDown: () => selectNode(node < last ? node + 1 : 0),
  };
  actions[event.key]?.();
  return event.key in actions;
}

// Nodes as circles whose area is their mass; tinted by the point that holds most of them, where shares are given.
export function drawNodes(layer, plane, shares = []) {
  const total = cloud.nodes.reduce((sum, node) => sum + node[2], 0);
  const make = () => svg("g", { role: "button" }, svg("circle", { class: "hit" }), svg("circle", { class: "dot" }), svg("circle"));
  children(layer, cloud.nodes.length, make).forEach((mark, node) => {
    const [x, y, mass] = cloud.nodes[node];
    const [left, top] = plane.toPixels([x, y]);
    const radius = Math.min(18, Math.max(2, 4.5 * Math.sqrt((mass * cloud.nodes.length) / total || 0)));
    const selected = node === cloud.selected;
    set(mark, {
      class: selected ? "node selected" : "node",
      transform: `translate(${left} ${top})`,
      tabindex: selected ? 0 : -1,
      "aria-pressed": selected,
      "aria-label": `Node ${node + 1} of ${cloud.nodes.length} at ${short(x)}, ${short(y)}, mass ${short(mass)}`,
    });
    const [hit, dot, tint] = mark.children;
    set(hit, { r: Math.max(14, radius + 5) });
    set(dot, { r: radius });
    const held = shares.map((row) => row[node] ?? 0);
    const most = Math.max(0, ...held);
    set(tint, { class: `tint ${colour(held.indexOf(most))}`, r: radius, "fill-opacity": (0.85 * most).toFixed(2) });
  });
}

// Where a plane has to look to see the nodes and some air around them.
export function fitToCloud(plane) {
  if (cloud.nodes.length) plane.fit(cloud.nodes, 1.4);
}

// --- the panel

function fillNode() {
  const node = cloud.nodes[cloud.selected];
  byId("node-name").textContent = node ? `${cloud.selected + 1} of ${cloud.nodes.length}` : "";
  for (const [place, name] of ["x", "y", "mass"].entries()) {
    const input = byId(`node-${name}`);
    input.disabled = !node;
    if (document.activeElement !== input) input.value = node ? Number(node[place].toFixed(2)) : "";
  }
  for (const name of ["before", "after", "remove"]) byId(`node-${name}`).disabled = !node;
  if (document.activeElement !== byId("text")) byId("text").value = toText(cloud.nodes);
}

function toText(nodes) {
  const lines = nodes.map(([x, y, mass]) => [x, y].map((value) => value.toFixed(3)).join(" ") + (mass === 1 ? "" : ` ${mass}`));
  return lines.join("\n");
}

// Nodes from lines of two or three numbers; throws with one sentence that names the line.
export function fromText(text) {
  const nodes = [];
  for (const [number, line] of text.split("\n").entries()) {
    const words = line.trim().split(/[\s,;]+/).filter(Boolean);
    if (!words.length) continue;
    if (words.length !== 2 && words.length !== 3) {
      throw new Error(`Line ${number + 1} has ${words.length} numbers; write x y, or x y mass.`);
    }
    const values = words.map(Number);
    const wrong = values.findIndex((value) => !(Math.abs(value) <= FARTHEST));
    if (wrong >= 0) throw new Error(`Line ${number + 1}: “${words[wrong].slice(0, 20)}” is not a finite number up to a million.`);
    if (values[2] < 0) throw new Error(`Line ${number + 1}: the mass is ${values[2]}; masses must not be negative.`);
    nodes.push([values[0], values[1], values[2] ?? 1]);
  }
  if (nodes.length > MOST_NODES) throw new Error(`The text has ${nodes.length} nodes; the page takes at most ${MOST_NODES}.`);
  return nodes;
}

export function startPanel() {
  byId("shape").append(...Object.keys(SHAPES).map((name) => html("option", {}, name)));
  byId("shape").addEventListener("change", (event) => replace(makeShape(event.target.value)));
  for (const id of ["points", "epsilon", "seed", "debias", "show-plan", "show-path"]) byId(id).addEventListener("input", changed);
  byId("text-apply").addEventListener("click", () => {
    try {
      replace(fromText(byId("text").value));
    } catch (error) {
      say(error.message);
    }
  });
  for (const [place, name] of ["x", "y", "mass"].entries()) {
    byId(`node-${name}`).addEventListener("input", (event) => {
      const value = event.target.valueAsNumber;
      if (!(Math.abs(value) <= FARTHEST) || (name === "mass" && value < 0)) {
        return say(`${name} of node ${cloud.selected + 1} must be a number${name === "mass" ? " that is not negative" : ""}.`);
      }
      cloud.nodes[cloud.selected][place] = value;
      changed();
    });
  }
  byId("node-before").addEventListener("click", () => selectNode((cloud.selected || cloud.nodes.length) - 1));
  byId("node-after").addEventListener("click", () => selectNode((cloud.selected + 1) % cloud.nodes.length));
  byId("node-add").addEventListener("click", () => addNode(nearby()));
  byId("node-remove").addEventListener("click", () => removeNode(cloud.selected));
  fillNode();
}

// Beside the selected node, where the new one can be seen and dragged away.
function nearby() {
  const [x, y] = cloud.nodes[cloud.selected] ?? [0, 0];
  return [x + 0.15, y + 0.15];
}

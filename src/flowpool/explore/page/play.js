// Play: the cloud, its pooled points, their paths, the plan, and the flow as a film.

import { asker } from "./api.js";
import { cloud, drawNodes, fitToCloud, makeNodeLayer, onChange, question, shown } from "./cloud.js";
import { byId, children, colour, converged, drawPlan, drawPoints, fillReadout, Plane, set, sharesOf, short, svg } from "./draw.js";

const SECONDS = 3; // of the film

let active = false;
let answer = null;
let version = -1; // of the cloud that the plane looks at
let position = 1; // of the film: 0 is X^(0), 1 is X*
let playing = null;

const plane = new Plane(byId("play-plane"), () => { version = -1; draw(); });
const layers = { plan: svg("g", { class: "plan" }), paths: svg("g", { class: "paths" }), nodes: makeNodeLayer(plane), points: svg("g") };
plane.element.append(layers.plan, layers.paths, layers.nodes, layers.points);

const send = asker("play", (given, asked, milliseconds) => {
  answer = given;
  byId("play-time").textContent = `Last answer: ${given.steps} steps, round trip ${milliseconds.toFixed(0)} ms.`;
  stop(1);
});
const sendMeasured = asker("play", (given) => {
  answer = given;
  draw();
});

export function show() {
  active = true;
  refresh();
}

export function hide() {
  active = false;
  stop(1);
}

function refresh() {
  if (!active) return;
  draw(); // the node that is dragged stays under the finger, whatever the server does
  send({ ...question(), measured: false });
}

// The points at the film's position: between two frames of the path they move in a straight line.
function pointsNow() {
  const frames = answer.path;
  if (position >= 1 || frames.length < 2) return answer.points;
  const place = position * (frames.length - 1);
  const [before, part] = [Math.floor(place), place % 1];
  return frames[before].map((point, number) => point.map((value, axis) => value + part * (frames[before + 1][number][axis] - value)));
}

function draw() {
  if (!active || !plane.width) return;
  if (version !== cloud.version) {
    fitToCloud(plane);
    version = cloud.version;
  }
  const fits = answer && (answer.plan[0]?.length ?? 0) === cloud.nodes.length;
  const shares = fits ? sharesOf(answer.plan) : [];
  const points = answer ? pointsNow() : [];
  drawNodes(layers.nodes, plane, position >= 1 ? shares : []);
  drawPlan(layers.plan, plane, points, cloud.nodes, shown("plan") && position >= 1 ? shares : []);
  drawPaths(shown("path") && answer ? answer.path : []);
  drawPoints(layers.points, plane, points);
  if (answer) fill();
}

function drawPaths(frames) {
  const count = frames.length > 1 ? frames[0].length : 0;
  children(layers.paths, count, () => svg("g", {}, svg("polyline"), svg("circle", { r: 3.5 }))).forEach((mark, point) => {
    const places = frames.map((frame) => plane.toPixels(frame[point]));
    set(mark, { class: colour(point) });
    set(mark.firstChild, { points: places.map((place) => place.map((value) => value.toFixed(1)).join()).join(" ") });
    set(mark.lastChild, { cx: places[0][0], cy: places[0][1] });
  });
}

function fill() {
  const last = answer.path.length - 1;
  const frame = Math.min(last, Math.round(position * last));
  const under = position < 1 && answer.path_lost;
  const values = under
    ? { divergence: answer.path_divergence[frame], lost: answer.path_lost[frame], residual: null, status: "on the way" }
    : answer;
  fillReadout(byId("play-readout"), values, under ? undefined : converged(answer.status));
  byId("play-advice").textContent = answer.status === "OK" ? "" : answer.advice;
  byId("play-step").value = position;
  const text = position >= 1 ? "end" : `${answer.path_steps[frame]} of ${answer.path_steps[last]}`;
  byId("play-step-value").textContent = text;
  byId("play-step").setAttribute("aria-valuetext", position >= 1 ? "end of the flow" : `step ${text}`);
  drawEnergy(frame);
}

// The divergence of every frame, on a logarithmic scale, and a dot at the frame that is shown.
function drawEnergy(frame) {
  const chart = byId("play-energy");
  const values = answer.path_divergence;
  chart.toggleAttribute("hidden", !values);
  if (!values) return;
  const [width, height] = [chart.clientWidth, chart.clientHeight];
  const logs = values.map((value) => Math.log10(Math.max(value ?? 0, 1e-9)));
  const [low, high] = [Math.min(...logs), Math.max(...logs)];
  const place = (number) => [
    8 + ((width - 16) * number) / (values.length - 1),
    22 + (height - 30) * (1 - (logs[number] - low) / (high - low || 1)),
  ];
  const [x, y] = place(frame);
  const curve = values.map((_, number) => place(number).map((value) => value.toFixed(1)).join()).join(" ");
  chart.replaceChildren(
    svg("text", { x: 8, y: 12 }, `Divergence along the flow: from ${short(values[0])} to ${short(values.at(-1))}`),
    svg("line", { class: "axis", x1: 8, x2: width - 8, y1: height - 4, y2: height - 4 }),
    svg("polyline", { class: "curve", points: curve }),
    svg("circle", { class: "now", cx: x, cy: y, r: 5 }),
  );
}

// --- the film

async function go(to) {
  if (!answer?.path_lost) await sendMeasured({ ...question(), measured: true });
  position = to;
  draw();
}

async function animate() {
  if (playing) return stop(position);
  await go(position < 1 ? position : 0);
  if (!answer || answer.path.length < 2) return stop(1);
  byId("play-animate").textContent = "❚❚ Pause";
  let before = null;
  const tick = (now) => {
    position = Math.min(1, position + (now - (before ?? now)) / 1000 / SECONDS);
    before = now;
    draw();
    if (position < 1) playing = requestAnimationFrame(tick);
    else stop(1);
  };
  playing = requestAnimationFrame(tick);
}

function stop(at) {
  cancelAnimationFrame(playing);
  playing = null;
  position = at;
  byId("play-animate").textContent = "▶ Animate the flow";
  draw();
}

export function start() {
  onChange(refresh);
  byId("play-animate").addEventListener("click", animate);
  byId("play-step").addEventListener("input", (event) => {
    const to = Number(event.target.value);
    stop(position);
    go(to);
  });
}

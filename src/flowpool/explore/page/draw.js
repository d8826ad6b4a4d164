// Elements, the plane, and what is drawn in more than one view.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const FAINTEST = 0.03; // share of a node below which a line of the plan is left out

export const byId = (id) => document.getElementById(id);
export const colour = (point) => `c${point % COLOURS}`;

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  element.append(...children);
  return element;
}

export function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  set(element, attributes);
  element.append(...children);
  return element;
}

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Makes `parent` hold exactly `count` children, and gives them; those that are there stay.
export function children(parent, count, make) {
  while (parent.childElementCount > count) parent.lastElementChild.remove();
  while (parent.childElementCount < count) parent.append(make());
  return [...parent.children];
}

// A number in three digits, for a person.
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e4 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

// Features to pixels and back. One unit is equally long in both directions, and y points upwards.
export class Plane {
  constructor(element, redraw) {
    this.element = element;
    this.centre = [0, 0];
    this.reach = 1; // features from the centre to the nearer edge
    new ResizeObserver(() => {
      this.width = element.clientWidth;
      this.height = element.clientHeight;
      if (this.width) redraw();
    }).observe(element);
  }

  get scale() {
    return Math.min(this.width, this.height) / 2 / this.reach;
  }

  // Shows all these places, with a margin.
  fit(places, margin = 1.15) {
    const columns = [0, 1].map((axis) => places.map((place) => place[axis]));
    const [x, y] = columns.map((values) => [Math.min(...values), Math.max(...values)]);
    this.centre = [(x[0] + x[1]) / 2, (y[0] + y[1]) / 2];
    const wide = Math.max(1, this.width / this.height) || 1;
    const tall = Math.max(1, this.height / this.width) || 1;
    this.reach = (margin / 2) * Math.max((x[1] - x[0]) / wide, (y[1] - y[0]) / tall) || 1;
  }

  toPixels([x, y]) {
    return [this.width / 2 + (x - this.centre[0]) * this.scale, this.height / 2 - (y - this.centre[1]) * this.scale];
  }

  toFeatures(event) {
    const box = this.element.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    return [this.centre[0] + (x - this.width / 2) / this.scale, this.centre[1] - (y - this.height / 2) / this.scale];
  }
}

// What each point gives of each node, (M, N), as shares of the node.
export function sharesOf(plan) {
  const totals = plan.length ? plan[0].map((_, node) => plan.reduce((sum, row) => sum + row[node], 0)) : [];
  return plan.map((row) => row.map((mass, node) => (totals[node] > 0 ? mass / totals[node] : 0)));
}

export function drawPlan(group, plane, points, nodes, shares) {
  const pairs = [];
  shares.forEach((row, point) =>
    row.forEach((share, node) => share > FAINTEST && pairs.push([point, node, share])));
  children(group, pairs.length, () => svg("line")).forEach((line, place) => {
    const [point, node, share] = pairs[place];
    const [x1, y1] = plane.toPixels(points[point]);
    const [x2, y2] = plane.toPixels(nodes[node]);
    set(line, { class: colour(point), x1, y1, x2, y2, "stroke-opacity": (0.8 * share).toFixed(2) });
  });
}

export function drawPoints(group, plane, points, radii = []) {
  children(group, points.length, () => svg("g", {}, svg("circle"), svg("text"))).forEach((mark, point) => {
    const [x, y] = plane.toPixels(points[point]);
    set(mark, { class: `point ${colour(point)}`, transform: `translate(${x} ${y})` });
    set(mark.firstChild, { r: radii[point] ?? 9 });
    mark.lastChild.textContent = point + 1;
  });
}

// Fills the list of divergence, W_2, residual and status.
export function fillReadout(list, { divergence, lost, residual, status }, good) {
  const values = { divergence: short(divergence), lost: short(lost), residual: short(residual), status };
  for (const cell of list.querySelectorAll("dd")) cell.textContent = values[cell.dataset.value];
  const cell = list.querySelector("[data-value=status]");
  cell.classList.toggle("good", good === true);
  cell.classList.toggle("bad", good === false);
}

export const converged = (status) => ["OK", "SINGULAR", "EMPTY"].includes(status);

// A slider whose output shows its value; `read` turns its position into the value.
export function slider(id, read = Number, show = String) {
  const input = byId(id);
  const output = document.querySelector(`output[for=${id}]`);
  const refresh = () => {
    output.textContent = show(read(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", refresh);
  refresh();
  return { input, get value() { return read(input.value); } };
}

export const fromLogarithm = (position) => Number((10 ** Number(position)).toPrecision(2));

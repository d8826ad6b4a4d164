// The four views, one at a time; the address says which.

import { say } from "./api.js";
import { startPanel } from "./cloud.js";
import { byId } from "./draw.js";
import * as compare from "./compare.js";
import * as graphs from "./graphs.js";
import * as play from "./play.js";
import * as runs from "./runs.js";

const views = { play, graphs, compare, runs };
const panelled = ["play", "compare"];
let current = null;

function route() {
  const name = location.hash.slice(2) || "play";
  if (!(name in views) || name === current) return;
  views[current]?.hide();
  current = name;
  say("");
  for (const view of Object.keys(views)) byId(view).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("panel").hidden = !panelled.includes(name);
  byId("layers").hidden = name !== "play";
  byId("main").classList.toggle("panelled", panelled.includes(name));
  views[name].show();
}

startPanel();
for (const view of Object.values(views)) view.start();
window.addEventListener("hashchange", route);
route();

"use strict";

// A line through all charts at the update under the pointer, with its values.
const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");
const numbers = text => text.split(" ").map(Number);
const inView = new Set();
const watcher = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) isIntersecting ? inView.add(target) : inView.delete(target);
});
const read = new WeakMap();

function chartOf(svg) {
  if (!read.has(svg)) {
    const [x0, x1, y0, y1] = numbers(svg.dataset.domain);
    const [left, right, bottom, top] = numbers(svg.dataset.frame);
    const curves = [...svg.querySelectorAll("path[data-x]")].map(path => ({
      label: path.dataset.label,
      colour: [...path.classList].find(name => /^k\d$/.test(name)),
      thinned: path.hasAttribute("data-thinned"),
      x: numbers(path.dataset.x),
      y: numbers(path.dataset.y),
    }));
    const marks = [...svg.querySelectorAll(".mark")].map(mark => ({ label: mark.dataset.label, x: Number(mark.dataset.x) }));
    read.set(svg, {
      curves, marks, left, right, bottom, top,
      x: value => left + (value - x0) / (x1 - x0) * (right - left),
      y: value => bottom + (value - y0) / (y1 - y0) * (top - bottom),
      update: at => x0 + (at - left) / (right - left) * (x1 - x0),
    });
  }
  return read.get(svg);
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, at) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = at; });
  return best;
}

// The update nearest to `wanted` at which a curve has a point, or a mark is.
function updateAt({ curves, marks }, wanted) {
  const all = [...curves, ...marks].flatMap(({ x }) => x);
  return all[nearest(all, wanted)];
}

// The points of the curves that have one at this update. A thinned curve has its nearest one, within its own updates.
function pointsAt({ curves }, update) {
  return curves.flatMap(({ label, colour, thinned, x, y }) => {
    const at = nearest(x, update);
    const isThere = x[at] === update || thinned && x[0] < update && update < x[x.length - 1];
    return isThere ? [{ label, colour, update: x[at], value: y[at] }] : [];
  });
}

function element(parent, name, attributes) {
  const node = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
}

function point(svg, update) {
  const chart = chartOf(svg);
  svg.querySelector(".cursor")?.remove();
  const cursor = document.createElementNS(SVG, "g");
  cursor.classList.add("cursor");
  const x = chart.x(update);
  if (x < chart.left - 1 || x > chart.right + 1) return [];
  element(cursor, "line", { x1: x, x2: x, y1: chart.top, y2: chart.bottom });
  const points = pointsAt(chart, update);
  for (const { colour, update, value } of points) {
    if (Number.isFinite(value)) element(cursor, "circle", { class: colour, cx: chart.x(update), cy: chart.y(value), r: 3.5 });
  }
  svg.appendChild(cursor);
  return points;
}

function show(event) {
  const svg = event.currentTarget;
  const box = svg.getBoundingClientRect();
  const chart = chartOf(svg);
  const wanted = chart.update((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
  const update = updateAt(chart, wanted);
  for (const other of inView) if (other !== svg) point(other, update);
  const points = point(svg, update);
  tip.replaceChildren(`update ${update}`, ...points.map(({ label, colour, update: own, value }) => {
    const row = document.createElement("div");
    const text = (Number.isFinite(value) ? String(value) : "not finite") + (own === update ? "" : ` at update ${own}`);
    row.className = "key " + colour;
    row.append(document.createElement("i"), label ? `${label} ${text}` : text);
    return row;
  }), ...chart.marks.filter(mark => mark.x === update).map(({ label, x }) => {
    const row = document.createElement("div");
    row.className = "bad";
    row.append(`! ${label} at update ${x}`);
    return row;
  }));
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
}

function hide() {
  tip.hidden = true;
  document.querySelectorAll(".cursor").forEach(cursor => cursor.remove());
}

// Elements that have their listeners.
const ready = new WeakSet();

function setUpCharts() {
  const smoothing = document.getElementById("smoothing");
  if (smoothing) smoothing.hidden = !document.querySelector("path.smooth");
  for (const svg of document.querySelectorAll("svg.chart")) {
    // Its values may have changed since they were read.
    read.delete(svg);
    if (ready.has(svg)) continue;
    ready.add(svg);
    watcher.observe(svg);
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerleave", hide);
  }
}

// Order and choice of the samples. Those without a number come last.
const number = text => text === "" ? -Infinity : Number(text);
const ranks = {
  "": () => 0,
  changed: article => number(article.dataset.change),
  worst: article => article.dataset.score === "" ? -Infinity : -Number(article.dataset.score),
  best: article => number(article.dataset.score),
};

// Whether there are different numbers, 0 among them, or some without one.
function differ(texts) {
  return new Set(texts).size > 1;
}

function arrange() {
  const [order, source, search, found] = ["order", "source", "search", "found"].map(id => document.getElementById(id));
  const words = search.value.toLowerCase();
  let [count, all] = [0, 0];
  for (const article of document.querySelectorAll("article")) {
    article.hidden = source.value !== "" && article.dataset.source !== source.value
      || words !== "" && !article.textContent.toLowerCase().includes(words);
    count += article.hidden ? 0 : 1;
    all += 1;
  }
  const text = `${count} of ${all}`;
  if (found.textContent !== text) found.textContent = text;
  const rank = ranks[order.value], listed = article => Number(article.id.split("-")[1]);
  for (const list of document.querySelectorAll(".prompts")) {
    const sorted = [...list.children].sort((a, b) => rank(b) - rank(a) || listed(a) - listed(b));
    if (sorted.some((article, at) => article !== list.children[at])) list.append(...sorted);
  }
}

function setUpSamples() {
  const browse = document.getElementById("browse");
  if (!browse) return;
  const source = document.getElementById("source"), known = new Set([...source.options].map(option => option.text));
  for (const { dataset } of document.querySelectorAll("article")) {
    if (known.has(dataset.source)) continue;
    known.add(dataset.source);
    source.add(new Option(dataset.source));
  }
  // An order or a source that changes nothing is not offered.
  source.parentElement.hidden = known.size < 3;
  const orders = { changed: "change", worst: "score", best: "score" };
  for (const option of document.getElementById("order").options) {
    const field = orders[option.value];
    option.disabled = field !== undefined && !differ([...document.querySelectorAll("article")].map(({ dataset }) => dataset[field]));
  }
  if (!ready.has(browse)) {
    ready.add(browse);
    for (const control of browse.querySelectorAll("select, input")) control.addEventListener("input", arrange);
    browse.hidden = false;
  }
  arrange();
}

function setUp() {
  setUpCharts();
  setUpSamples();
}
setUp();

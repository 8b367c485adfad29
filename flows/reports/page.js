"use strict";
const graph = JSON.parse(document.getElementById("data").textContent);
const [svg, scene, panel, search, found] = ["graph", "scene", "panel", "search", "found"].map((id) => document.getElementById(id));
const nodes = new Map(graph.nodes.map((node) => [node.id, node]));
const kindOf = (node) => node.artifact_kind ?? "artifact";
const idOf = (box) => graph.nodes[box.dataset.node].id;
const boxes = new Map([...svg.querySelectorAll(".node")].map((box) => [idOf(box), box]));
const wires = [...svg.querySelectorAll(".edge")];
const MOST = 300; // rows of one table; the rest is in the manifest
let selected = graph.root;

// ---- the panel; all text goes in as text nodes ----
function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function copyable(text, letters = text.length) {
  const button = element("button", { className: "copy", title: text }, text.slice(0, letters));
  button.onclick = async () => {
    button.textContent = text; // all of it, where a browser lets no page write to the clipboard
    await navigator.clipboard.writeText(text);
    button.classList.add("done");
  };
  return button;
}

const link = (id) => element("button", { className: "go", onclick: () => select(id) }, `${nodes.get(id).name} ${nodes.get(id).fingerprint.slice(0, 8)}`);
const date = (seconds) => `${new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
const digest = (text) => text && copyable(text, 16);
const measured = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(5))) : value);

function shown(value) {
  if (value instanceof Node) return value;
  if (Array.isArray(value) && value.length && value.every((each) => typeof each !== "object")) return value.join(", ");
  return typeof value === "object" ? JSON.stringify(value, null, 1) : String(value);
}

/** Name and value of each leaf that says something; nested fields as adapter.rank. */
function leaves(fields, path = "") {
  return Object.entries(fields ?? {}).flatMap(([name, value]) => {
    if (value === null || value === undefined) return [];
    const isGroup = typeof value === "object" && !Array.isArray(value) && !(value instanceof Node);
    return isGroup ? leaves(value, `${path}${name}.`) : [[path + name, value]];
  });
}

function section(title, rows) {
  if (!rows.length) return [];
  const list = element("dl", {});
  for (const [name, value] of rows.slice(0, MOST)) list.append(element("dt", {}, name), element("dd", {}, shown(value)));
  if (rows.length > MOST) list.append(element("dt", {}, `and ${rows.length - MOST} more`));
  return [element("h3", {}, title), list];
}

const mapped = (fields, change) => Object.entries(fields ?? {}).map(([name, value]) => [name, change(value)]);

function sourceSections({ source, digest: bytes, rows }) {
  const { files, labels, ...record } = source ?? {};
  return [...section("Source", leaves({ ...record, rows, digest: digest(bytes) })), ...section("Files, SHA-256", mapped(files, digest))];
}

function stageSections(node) {
  const { start, end, libraries, resources, git_commit: commit, git_dirty: dirty, code_digest: code, ...ran } = node.provenance ?? {};
  const made = start && { started: date(start), took: `${(end - start).toFixed(1)} s` };
  const git = commit && element("span", {}, digest(commit), dirty ? " with changes not committed" : "");
  return [
    ...section("Made", leaves({ pipeline: node.pipeline, stage: node.stage, method: node.method, ...made })),
    ...section("Recipe", leaves(node.recipe)),
    ...section("Metrics", mapped(node.metrics, measured)),
    ...section("Output", leaves({ path: node.path && copyable(node.path), digest: digest(node.output_digest), "MLflow run": digest(node.mlflow_run_id) })),
    ...section("Files, SHA-256", mapped(node.files, digest)),
    ...section("Code and environment", leaves({ "git commit": git, "method's code": digest(code), ...ran, libraries, resources })),
  ];
}

function details(node) {
  const pills = [["missing", node.state === "missing" ? ["missing"] : []], ["alias", node.aliases], ["label", node.labels]];
  return [
    element("h2", {}, node.name),
    element("p", {}, kindOf(node).replaceAll("_", " ")),
    ...pills.flatMap(([style, words]) => words.map((word) => element("span", { className: `pill ${style}` }, word))),
    element("h3", {}, "Fingerprint"),
    copyable(node.fingerprint),
    ...section("Made from", graph.edges.filter((edge) => edge.to === node.id).map((edge) => [edge.slot, link(edge.from)])),
    ...section("Goes into", graph.edges.filter((edge) => edge.from === node.id).map((edge) => [`as ${edge.slot}`, link(edge.to)])),
    ...(node.kind === "source" ? sourceSections(node) : stageSections(node)),
  ];
}

// ---- choosing a node ----
function select(id, focus = true) {
  selected = id;
  const up = new Set([id]); // it and its ancestors; grows while it is walked
  for (const each of up) for (const edge of graph.edges) if (edge.to === each) up.add(edge.from);
  for (const [name, box] of boxes) {
    box.classList.toggle("selected", name === id);
    box.classList.toggle("up", up.has(name));
    box.setAttribute("aria-pressed", name === id);
    box.setAttribute("tabindex", name === id ? 0 : -1);
  }
  svg.classList.toggle("all", up.size === boxes.size);
  for (const wire of wires) wire.classList.toggle("up", up.has(graph.edges[wire.dataset.edge].to));
  panel.replaceChildren(...details(nodes.get(id)));
  panel.dataset.kind = kindOf(nodes.get(id));
  panel.scrollTop = 0;
  if (focus) boxes.get(id).focus({ preventScroll: true });
  reveal(id);
}

const place = (id) => boxes.get(id).transform.baseVal[0].matrix; // e: x, f: y
const distance = (id) => Math.abs(place(id).f - place(selected).f);
const nearest = (ids) => ids.sort((one, other) => distance(one) - distance(other))[0];
const inColumn = (side) => nearest([...boxes.keys()].filter((id) => place(id).e === place(selected).e && side * (place(id).f - place(selected).f) > 0));
const moves = {
  ArrowLeft: () => nearest(graph.edges.filter((edge) => edge.to === selected).map((edge) => edge.from)),
  ArrowRight: () => nearest(graph.edges.filter((edge) => edge.from === selected).map((edge) => edge.to)),
  ArrowUp: () => inColumn(-1),
  ArrowDown: () => inColumn(1),
  Enter: () => idOf(document.activeElement),
  " ": () => idOf(document.activeElement),
};

svg.addEventListener("keydown", (event) => {
  const id = moves[event.key]?.();
  if (id) event.preventDefault(), select(id);
});
for (const [id, box] of boxes) box.addEventListener("click", () => select(id));

// ---- searching ----
const texts = new Map(graph.nodes.map((node) => [node.id, JSON.stringify(node).toLowerCase()]));
let matches = [];

search.addEventListener("input", () => {
  const wanted = search.value.trim().toLowerCase();
  matches = wanted ? [...boxes.keys()].filter((id) => texts.get(id).includes(wanted)) : [];
  svg.classList.toggle("searching", wanted !== "");
  for (const [id, box] of boxes) box.classList.toggle("match", matches.includes(id));
  found.textContent = wanted && `${matches.length} of ${boxes.size}`;
});
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && matches.length) select(matches[(matches.indexOf(selected) + 1) % matches.length], false);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || document.activeElement === search) return;
  event.preventDefault();
  search.focus();
});

// ---- moving and zooming ----
const view = { x: 0, y: 0, scale: 1 };
const [x0, y0, wide, high] = svg.getAttribute("viewBox").split(" ").map(Number);
svg.removeAttribute("viewBox");

function show(x, y, scale) {
  Object.assign(view, { x, y, scale });
  scene.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
}

function fit(least) {
  const { width, height } = svg.getBoundingClientRect();
  const scale = Math.max(least, Math.min(1.15, width / wide, height / high));
  show(width / 2 - (x0 + wide / 2) * scale, height / 2 - (y0 + high / 2) * scale, scale);
  if (least) reveal(selected);
}

function zoom(factor, x, y) {
  const scale = Math.min(4, Math.max(0.05, view.scale * factor));
  show(x - (x - view.x) * (scale / view.scale), y - (y - view.y) * (scale / view.scale), scale);
}

/** Moves the drawing just far enough that a node is in sight. */
function reveal(id) {
  const seen = svg.getBoundingClientRect();
  const box = boxes.get(id).getBoundingClientRect();
  const shift = (low, high, least, most) => (low < least + 24 ? least + 24 - low : Math.min(0, most - 24 - high));
  show(view.x + shift(box.left, box.right, seen.left, seen.right), view.y + shift(box.top, box.bottom, seen.top, seen.bottom), view.scale);
}

svg.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { x, y } = svg.getBoundingClientRect();
  zoom(Math.exp(-Math.sign(event.deltaY) * Math.min(0.25, Math.abs(event.deltaY) * 0.002)), event.clientX - x, event.clientY - y);
}, { passive: false });
svg.addEventListener("pointermove", (event) => {
  if (!(event.buttons & 1)) return svg.classList.remove("dragged");
  if (Math.abs(event.movementX) + Math.abs(event.movementY) < 3 && !svg.classList.contains("dragged")) return; // a click
  svg.classList.add("dragged");
  svg.setPointerCapture(event.pointerId);
  show(view.x + event.movementX, view.y + event.movementY, view.scale);
});
document.getElementById("zoom").addEventListener("click", ({ target }) => {
  const { width, height } = svg.getBoundingClientRect();
  if (target.dataset.zoom === "fit") fit(0);
  else if (target.dataset.zoom) zoom(Number(target.dataset.zoom), width / 2, height / 2);
});

select(graph.root, false);
fit(0.5);

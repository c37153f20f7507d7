// Live: the panels that show what the server does.
import { make } from "./dom.js";
import { bytes, count, digits, duration, t } from "./language.js";
import { Chart, DASHES, forgetColours, milliseconds } from "./charts.js";
import { Feed } from "./feed.js";
import { KVMap } from "./kvmap.js";
import { ask, askForKey } from "./server.js";

const WINDOWS = [[300, () => t("minutes", { count: 5 })], [900, () => t("minutes", { count: 15 })], [3600, () => t("hour")]];
const SMOOTHED = 10, BATCHES_MS = 2000;
let feed, panels, view, seconds = 300;

const line = (label, colour, dash = 0, thin = false) => ({ label: t(label), colour, dash: DASHES[dash], thin });

function panel(id, title, note, ...content) {
  return make("section", { className: "panel", id: "panel-" + id, ariaLabel: t(title) },
    make("header", {}, make("h2", {}, t(title)), note), ...content);
}

// Figures ------------------------------------------------------------------------------------------

const FIGURES = {
  running: () => count(feed.totals.running),
  waiting_requests: () => count(feed.totals.waiting),
  generated_rate: () => digits(mean("generated", 5) ?? 0),
  first_p50: () => last("first_p50", milliseconds),
  gap_p50: () => last("gap_p50", milliseconds),
  hit_rate: () => feed.totals.prompt ? digits(100 * feed.totals.cached / feed.totals.prompt) + " %" : "–",
  kv_used: () => feed.kv ? digits(100 * feed.kv.cells[1] / feed.kv.cells[0]) + " %" : "–",
  finished: () => count(feed.totals.finished),
  generated: () => count(feed.totals.generated),
};

function last(name, format) {
  const value = feed.rows.at(-1)?.[feed.columns[name]];
  return value === null || value === undefined ? "–" : format(value);
}

function mean(name, length) {
  const values = feed.rows.slice(-length).map(row => row[feed.columns[name]]);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function makeFigures() {
  const values = Object.fromEntries(Object.keys(FIGURES).map(name => [name, make("b", { id: "figure-" + name }, "–")]));
  const node = make("div", { className: "figures" }, ...Object.entries(values).map(([name, value]) =>
    make("div", { className: "figure" }, make("span", {}, t(name)), value)));
  return { node, update() { for (const [name, read] of Object.entries(FIGURES)) values[name].textContent = read(); } };
}

// Charts -------------------------------------------------------------------------------------------

// The columns of the time window, the time first.
function columns(...names) {
  const rows = feed.rows.slice(-seconds);
  const found = ["t", ...names].map(name => typeof name === "function" ? rows.map(name) : rows.map(row => row[feed.columns[name]]));
  for (let at = 1; at < rows.length; at++)  // no line across a time that was not sampled
    if (found[0][at] - found[0][at - 1] > 3) for (const column of found.slice(1)) column[at] = null;
  return found;
}

// A column as the mean of the last seconds: what a request counts at its end is otherwise a single peak.
const smooth = name => (row, index, rows) => {
  let sum = 0;
  const begin = Math.max(0, index - SMOOTHED + 1);
  for (let at = begin; at <= index; at++) sum += rows[at][feed.columns[name]];
  return sum / (index - begin + 1);
};

function makeNumbers() {
  const format = milliseconds;
  const series = [line("mean", "s1"), line("maximum", "s4", 2, true)];
  const charts = ["first", "gap"].map(() => new Chart(series, { time: false, height: 170, format }));
  const notes = charts.map(() => make("span", { className: "dim" }));
  const half = (index, title) => make("div", { className: "half" }, make("h3", {}, t(title), " ", notes[index]), charts[index].node);
  const node = panel("number", "panel_number", make("span", { className: "dim" }, t("panel_number_note")),
    make("div", { className: "halves" }, half(0, "number_first"), half(1, "number_gap")));
  return { node, update() {
    const { width, count: total, points } = feed.curve;
    const numbers = points.map((_, index) => Math.min(index * width + (width + 1) / 2, total));
    charts.forEach((chart, index) => {
      chart.set([numbers, points.map(point => point[2 * index]), points.map(point => point[2 * index + 1])]);
      notes[index].textContent = drift(points.map(point => point[2 * index]), total);
    });
  } };
}

function drift(values, total) {
  const known = values.filter(value => value !== null), quarter = Math.floor(known.length / 4);
  if (quarter < 5) return t("drift_none", { count: count(total) });
  const average = part => part.reduce((sum, value) => sum + value, 0) / part.length;
  const change = 100 * (average(known.slice(-quarter)) / average(known.slice(0, quarter)) - 1);
  return t("drift", { value: (change < 0 ? "−" : "+") + digits(Math.abs(change), 2) + " %" });
}

function makeChart(id, title, unit, series, names, options = {}) {
  const chart = new Chart(series, options);
  const node = panel(id, title, unit ? make("span", { className: "dim" }, t(unit)) : null, chart.node);
  return { node, update() { chart.set(columns(...names)); } };
}

const share = (...names) => row => 100 * Math.max(0, names.reduce((sum, name) => sum + row[feed.columns[name]], 0));
const python = row => 100 * Math.max(0, row[feed.columns.step_s] - ["compute_s", "sample_s", "transfer_s"].reduce((sum, name) => sum + row[feed.columns[name]], 0));

function makeCharts() {
  return {
    throughput: makeChart("throughput", "panel_throughput", "unit_tokens",
      [line("s_generated", "s1"), line("s_prompt", "s2", 1), line("s_cached", "s3", 2), line("s_drafted", "s4", 3)],
      ["generated", "prompt", "cached", "drafted"].map(smooth)),
    latency: makeChart("latency", "panel_latency", "unit_ms",
      [line("s_first50", "s1"), line("s_first99", "s1", 1, true), line("s_gap50", "s3"), line("s_gap99", "s3", 1, true), line("s_queue99", "s4", 2)],
      ["first_p50", "first_p99", "gap_p50", "gap_p99", "queue_p99"], { format: milliseconds }),
    load: makeChart("load", "panel_load", "",
      [line("s_running", "s1"), line("s_waiting", "s2", 1), line("s_preempted", "s3", 2), line("s_refused", "s4", 3)],
      ["running", "waiting", "preempted", "refused"]),
    step: makeChart("step", "panel_step", "unit_share",
      [line("s_python", "s4"), line("s_transfer", "s3"), line("s_sample", "s2"), line("s_compute", "s1")],
      [python, share("transfer_s"), share("sample_s"), share("compute_s")], { stacked: true, max: 100, format: value => digits(value, 2) }),
  };
}

// Bars and tables ----------------------------------------------------------------------------------

function meter(name, value, part, note) {
  const fill = make("i", {});
  fill.style.width = Math.min(100, 100 * part) + "%";
  return make("div", { className: "meter" }, make("span", {}, name), make("b", {}, value), make("div", { className: "track" }, fill), note ? make("small", { className: "dim" }, note) : null);
}

function makeTiers() {
  const body = make("div", {});
  return { node: panel("tiers", "panel_tiers", null, body), update() {
    const { totals, sources, memory } = feed;
    const cells = feed.kv?.cells[0] || 0, limit = memory.ram_tier_limit || 0;
    const hits = name => t("tier_hits", { tokens: count(Object.entries(sources).reduce((sum, [source, value]) => sum + (source.startsWith(name) ? value : 0), 0)) });
    const inSlots = totals.cells_cached;
    body.replaceChildren(
      meter(t("tier_device"), cells ? t("tier_of", { used: count(inSlots), limit: count(cells) }) : count(inSlots), cells ? inSlots / cells : 0, hits("device")),
      meter(t("tier_ram"), t("tier_of", { used: bytes(totals.ram_bytes), limit: bytes(limit) }), limit ? totals.ram_bytes / limit : 0, hits("ram")),
      meter(t("tier_disk"), bytes(totals.disk_bytes), 0, hits("disk")),
      meter(t("tier_swap"), bytes(totals.swapped_bytes), limit ? totals.swapped_bytes / limit : 0, ""));
  } };
}

function makeMemory() {
  const body = make("div", {}), total = make("span", { className: "dim" });
  return { node: panel("memory", "panel_memory", total, body), update() {
    const parts = Object.entries(feed.memory).filter(([part, size]) => size && !part.endsWith("_limit")).sort((one, other) => other[1] - one[1]);
    const sum = parts.reduce((all, [, size]) => all + size, 0);
    total.textContent = bytes(sum);
    body.replaceChildren(...parts.map(([part, size]) => meter(name("part_", part), bytes(size), size / parts[0][1])));
  } };
}

function name(prefix, part) {
  try { return t(prefix + part); } catch { return part.replaceAll("_", " "); }
}

function makeTenants() {
  const body = make("div", {});
  return { node: panel("tenants", "panel_tenants", null, body), update() {
    const sum = feed.tenants.reduce((all, tenant) => all + tenant[3], 0);
    body.replaceChildren(...(feed.tenants.length ? feed.tenants.map(([tenant, running, waiting, tokens]) =>
      meter(tenant || t("tenant_none"), t("tokens", { count: count(tokens) }), sum ? tokens / sum : 0, `${count(running)} ${t("s_running")} · ${count(waiting)} ${t("s_waiting")}`))
      : [make("p", { className: "dim" }, t("none_yet"))]));
  } };
}

// Batches of the visitor's key; the panel is there while one is not older than those listed.
function makeBatches() {
  const body = make("div", {}), node = panel("batches", "panel_batches", null, body), active = ["in_progress", "cancelling"];
  let asked = 0;
  const cancel = id => ask(`v1/batches/${id}/cancel`, { method: "POST", body: {}, quiet: true }).then(() => { asked = 0; }, () => {});
  const row = ({ id, status, created_at: begun, usage, request_counts: { total, completed, failed } }) => {
    const done = completed + failed, left_s = (Date.now() / 1000 - begun) * (total - done) / done;
    const left = done && status === "in_progress" ? t("batch_left", { time: duration(left_s) }) : name("batch_", status);
    const line = meter(id.slice(0, 14), `${count(done)} / ${count(total)}`, total ? done / total : 0, `${left} · ${t("tokens", { count: count(usage?.total_tokens || 0) })}`);
    if (status === "in_progress") line.append(make("button", { type: "button", className: "quiet", onclick: () => cancel(id) }, t("cancel")));
    return line;
  };
  node.hidden = true;
  return { node, async update() {
    if (Date.now() - asked < BATCHES_MS) return;
    asked = Date.now();
    const { data } = await ask("v1/batches?limit=10", { quiet: true }).then(answer => answer.json(), () => ({ data: [] }));
    node.hidden = !data.length;
    body.replaceChildren(...data.sort((one, other) => active.includes(other.status) - active.includes(one.status)).map(row));
  } };
}

const COLUMNS = ["number", "id", "tenant", "outcome", "ended", "queue", "first", "gap", "total", "prompt", "cached", "generated"];

function makeRequests() {
  const rows = make("tbody", {}), none = make("p", { className: "dim" }, t("none_yet"));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...COLUMNS.map(column => make("th", { scope: "col", className: column }, t("col_" + column))))), rows);
  const wrap = make("div", { className: "scroll", tabIndex: 0 }, table);
  const time = value => value === null ? "–" : milliseconds(value);
  const row = ([number, id, tenant, outcome, ended, queue, first, gap, total, prompt, cached, generated]) => {
    const cells = [count(number), id, tenant || "–", outcome, new Date(ended * 1000).toTimeString().slice(0, 8), time(queue), time(first), time(gap), time(total), count(prompt), count(cached), count(generated)];
    return make("tr", {}, ...cells.map((text, index) => make("td", { className: COLUMNS[index] + (index === 3 && !["stop", "length"].includes(text) ? " odd" : "") }, text)));
  };
  return { node: panel("requests", "panel_requests", null, none, wrap), update(event, first) {
    none.hidden = feed.requests.length > 0;
    wrap.hidden = !none.hidden;
    if (first) rows.replaceChildren(...feed.requests.map(row));
    else if (event.requests.length) {
      rows.prepend(...event.requests.map(row));
      while (rows.childElementCount > 100) rows.lastChild.remove();
    }
  } };
}

// The view -----------------------------------------------------------------------------------------

function build() {
  const map = new KVMap(), charts = makeCharts();
  const kv = { node: panel("kv", "panel_kv", map.note, map.node), update: () => map.set(feed), redraw: () => map.draw() };
  panels = [makeFigures(), makeNumbers(), charts.throughput, charts.latency, kv, charts.load, charts.step, makeTiers(), makeMemory(), makeTenants(), makeBatches(), makeRequests()];
  const state = make("span", { id: "live-state", className: "state", role: "status" });
  const key = make("button", { type: "button", className: "quiet", hidden: true, onclick: async () => { if (await askForKey(t("key_admin"))) feed.start(); } }, t("key_button"));
  const choices = make("div", { className: "segmented", role: "group", ariaLabel: t("window") }, ...WINDOWS.map(([length, label]) =>
    make("button", { type: "button", ariaPressed: String(length === seconds), onclick: event => {
      seconds = length;
      for (const each of choices.children) each.ariaPressed = String(each === event.currentTarget);
      if (feed.columns) for (const chart of Object.values(charts)) chart.update();
    } }, label())));
  const grid = make("div", { className: "grid" }, ...panels.slice(1).map(each => each.node));
  view.append(make("div", { className: "lead" }, state, key, make("span", { className: "space" }), choices), panels[0].node, grid);
  feed = new Feed((event, first) => { for (const each of panels) each.update(event, first); }, () => panels[0].update(), (status, text) => {
    if (state.dataset.state !== status || state.textContent !== text) { state.dataset.state = status; state.textContent = text; }
    key.hidden = status !== "forbidden";
  });
  view.feed = feed;
  document.addEventListener("visibilitychange", () => { if (!view.hidden) document.hidden ? feed.stop() : feed.start(); });
  addEventListener("theme", () => { forgetColours(); if (feed.columns) for (const each of panels) each.redraw ? each.redraw() : each.update({ requests: [] }); });
}

export function openLive(section) {
  view = section;
  if (!feed) build();
  feed.start();
}

export const closeLive = () => feed?.stop();

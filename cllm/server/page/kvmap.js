// KV map: one lane a slot, what its cells hold, and the requests that are preempted below.
import { button, confirm, make } from "./dom.js";
import { count, duration, t } from "./language.js";
import { colour } from "./charts.js";
import { ask } from "./server.js";

const LANE = 14, GAP = 5, LABEL = 26, AXIS = 18, TICKS = 4;
const FULLEST = 1 / 8;  // of a lane that is magnified: so far the longest one must reach
const KINDS = ["prompt", "cache", "answer", "idle", "preempted"];

export class KVMap {
  constructor() {
    this.canvas = make("canvas", { tabIndex: 0, role: "img", ariaLabel: t("panel_kv") });
    this.detail = make("div", { className: "detail" });
    this.legend = make("div", { className: "legend" }, ...KINDS.map(kind => {
      const key = make("canvas", { className: "swatch", width: 40, height: 20 });
      key.dataset.kind = kind;
      return make("span", {}, key, t("kv_" + kind));
    }));
    this.note = make("span", { className: "dim" });
    this.words = make("span", { className: "scale" });
    this.legend.append(this.words);
    this.node = make("div", { className: "kvmap" }, this.legend, this.canvas, this.detail);
    this.lanes = [];  // as drawn: { lane, y, segments: [[kind, from, to]] } in tokens
    this.canvas.lanes = () => ({ snapshot: this.feed?.kv?.snapshot, lanes: this.lanes, scale: this.scale });
    this.canvas.onpointermove = event => this.point(event, false);
    this.canvas.onpointerleave = () => { this.hovered = null; this.describe(); this.draw(); };
    this.canvas.onclick = event => this.point(event, true);
    this.canvas.onkeydown = event => this.step(event);
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentNode);
    this.describe();
  }

  set(feed) {
    this.feed = feed;
    const kv = feed.kv;
    if (!kv) return;
    const [total, used, cached] = kv.cells;
    this.note.textContent = t("kv_note", { used: count(used), total: count(total), cached: count(cached) });
    const slots = Math.min(kv.slots, 96);
    const found = Array.from({ length: slots }, (_, slot) => feed.lanes.get(slot) || { slot, state: "empty", computed: 0, tokens: 0, prompt: 0, cached: 0, age: 0, id: "" });
    const longest = Math.max(64, ...[...found, ...kv.preempted].map(lane => lane.tokens));
    this.whole = this.scale = Math.max(kv.slot_tokens, longest);
    while (longest < FULLEST * this.scale) this.scale /= 2;
    this.words.textContent = t(this.scale < this.whole ? "kv_part" : "kv_whole", { shown: count(this.scale), slot: count(this.whole) });
    this.lanes = [...found, ...kv.preempted].map((lane, index) => ({ lane, y: AXIS + index * (LANE + GAP) + (lane.slot < 0 ? GAP * 2 : 0), segments: cut(lane) }));
    this.draw();
    this.describe();
  }

  draw() {
    const width = this.canvas.parentNode.clientWidth, ratio = devicePixelRatio || 1;
    const height = Math.max(40, (this.lanes.at(-1)?.y ?? 0) + LANE + 2);
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = height + "px";
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px " + getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    const span = width - LABEL - 2;
    const ground = this.drawScale(pen, span, height);
    for (const each of this.lanes) {
      const { lane, y, segments } = each;
      const chosen = this.same(lane, this.selected) || this.same(lane, this.hovered);
      pen.fillStyle = colour(chosen ? "ink" : "dim");
      pen.textAlign = "right";
      pen.fillText(lane.slot < 0 ? "–" : lane.slot, LABEL - 8, y + LANE / 2 + 0.5);
      pen.fillStyle = ground;
      round(pen, LABEL, y, span, LANE);
      pen.fill();
      for (const [kind, from, to] of segments) {
        const left = LABEL + span * from / this.scale, right = LABEL + span * to / this.scale;
        paint(pen, kind, left, y, Math.max(1, right - left), LANE);
      }
      if (chosen) {
        pen.strokeStyle = colour("accent");
        pen.lineWidth = 1.5;
        round(pen, LABEL - 0.5, y - 1, span + 1.5, LANE + 2);
        pen.stroke();
      }
    }
    for (const key of this.legend.querySelectorAll("canvas")) {
      const small = key.getContext("2d");
      small.setTransform(2, 0, 0, 2, 0, 0);
      small.clearRect(0, 0, 20, 10);
      paint(small, key.dataset.kind, 3, 0, 14, 10);
    }
  }

  // Ticks in tokens; a lane that goes on beyond the last one fades. Returns the ground of a lane.
  drawScale(pen, span, height) {
    const magnified = this.scale < this.whole;
    pen.lineWidth = 1;
    for (let tick = 0; this.scale && tick <= TICKS; tick++) {
      const x = LABEL + span * tick / TICKS;
      pen.strokeStyle = colour("line");
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillStyle = colour("dim");
      pen.textAlign = tick === 0 ? "left" : tick === TICKS ? "right" : "center";
      pen.fillText(count(this.scale * tick / TICKS) + (magnified && tick === TICKS ? " …" : ""), x, AXIS / 2 - 2);
    }
    const ground = pen.createLinearGradient(LABEL + span * 0.9, 0, LABEL + span, 0);
    ground.addColorStop(0, colour("lane"));
    ground.addColorStop(1, colour(magnified ? "ground" : "lane"));
    return ground;
  }

  same(lane, other) { return Boolean(other) && lane.slot === other.slot && (lane.slot >= 0 || lane.id === other.id); }

  point(event, select) {
    const y = event.offsetY;
    const found = this.lanes.find(each => y >= each.y - GAP / 2 && y < each.y + LANE + GAP / 2)?.lane || null;
    this.hovered = found;
    if (select) this.selected = this.same(found || {}, this.selected) ? null : found;
    this.describe();
    this.draw();
  }

  step(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !this.lanes.length) return;
    event.preventDefault();
    const place = this.lanes.findIndex(({ lane }) => this.same(lane, this.selected));
    this.selected = this.lanes[(place + step + this.lanes.length) % this.lanes.length].lane;
    this.describe();
    this.draw();
  }

  // The lane that is pointed at or selected, in words.
  describe() {
    const wanted = this.hovered || this.selected;
    const lane = wanted && this.lanes.find(each => this.same(each.lane, wanted))?.lane;
    if (!lane) {
      this.detail.replaceChildren(make("span", { className: "dim" }, this.feed?.kv ? "" : t("kv_wait")));
      return;
    }
    const words = [lane.slot < 0 ? t("kv_preempted") : t("kv_slot", { slot: lane.slot })];
    if (lane.state === "cached") words.push(t("kv_cells", { tokens: count(lane.computed) }));
    else if (lane.state === "empty") words.push(t("kv_empty"));
    else {
      const answer = Math.max(0, lane.tokens - lane.prompt);
      words.push(t("kv_tokens", { tokens: count(lane.tokens), prompt: count(lane.prompt), cached: count(lane.cached), answer: count(answer) }));
      if (lane.age) words.push(t("kv_age", { value: duration(lane.age) }));
    }
    const parts = [make("span", {}, words.join(" · "))];
    if (lane.id) parts.push(make("code", {}, lane.id));
    if (lane.id && this.same(lane, this.selected)) parts.push(this.cancelButton(lane.id));
    const text = parts.map(part => part.textContent).join("|");
    if (this.detail.dataset.text === text && parts.length === this.detail.childElementCount) return;
    this.detail.dataset.text = text;
    this.detail.replaceChildren(...parts);
  }

  cancelButton(id) {
    const control = button("stop", t("kv_cancel"), async () => {
      if (!await confirm(t("kv_cancel_ask", { id: id.slice(-8) }), t("kv_cancel"))) return;
      try {
        await ask(`admin/requests/${encodeURIComponent(id)}/cancel`, { method: "POST", body: {} });
        this.detail.replaceChildren(make("span", {}, t("kv_cancelled")));
      } catch (error) { this.detail.replaceChildren(make("span", { className: "wrong" }, error.message)); }
      this.selected = null;
    }, "chip cancel");
    control.append(t("kv_cancel"));
    return control;
  }
}

// What the cells of a lane hold: [kind, from, to] in tokens.
function cut({ state, computed, tokens, prompt, cached }) {
  if (state === "cached") return computed ? [["idle", 0, computed]] : [];
  if (state === "preempted") return [["preempted", 0, tokens]];
  const parts = [["cache", 0, Math.min(cached, computed)], ["prompt", cached, Math.min(prompt, computed)], ["answer", prompt, computed]];
  return parts.filter(([, from, to]) => to > from);
}

function round(pen, x, y, width, height) {
  pen.beginPath();
  pen.roundRect(x, y, width, height, 3);
}

// Kinds differ by pattern too: plain, stripes, bright, dots, crosses.
function paint(pen, kind, x, y, width, height) {
  pen.save();
  round(pen, x, y, width, height);
  pen.clip();
  pen.fillStyle = colour("kv-" + kind);
  pen.fillRect(x, y, width, height);
  pen.strokeStyle = pen.fillStyle = colour("kv-mark");
  pen.lineWidth = 1;
  pen.beginPath();
  const lines = (slope, distance) => {
    const begin = Math.floor((x - height) / distance) * distance;
    for (let at = begin; at < x + width + height; at += distance) {
      pen.moveTo(at, y + (slope > 0 ? 0 : height));
      pen.lineTo(at + height, y + (slope > 0 ? height : 0));
    }
  };
  if (kind === "cache") lines(-1, 5);
  if (kind === "preempted") { lines(-1, 7); lines(1, 7); }
  pen.stroke();
  if (kind === "idle") for (let at = Math.ceil(x / 6) * 6; at < x + width; at += 6) pen.fillRect(at, y + height / 2 - 0.75, 1.5, 1.5);
  pen.restore();
}

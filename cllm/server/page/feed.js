// Feed: the events of /live while the view is open, put together to the present state.
import { t } from "./language.js";
import { ask, readEvents } from "./server.js";

const HOUR = 3600, MAX_REQUESTS = 100, DELAYS_MS = [1000, 2000, 5000, 10000];

export class Feed {
  constructor(changed, counted, said) {
    this.changed = changed;  // called after every event, with what it brought
    this.counted = counted;  // called when only the totals have changed
    this.said = said;  // called with the state of the connection: its name and a text
    this.rows = [];
    this.requests = [];  // newest first
    this.curve = { width: 1, count: 0, points: [] };
    this.lanes = new Map();  // by slot
    this.kv = null;
  }

  start() {
    if (this.abort) return;
    this.abort = new AbortController();
    this.run(this.abort.signal);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
    this.said("paused", t("live_paused"));
  }

  async run(signal) {
    for (let tries = 0; !signal.aborted; tries++) {
      if (!tries) this.said("connecting", t("live_connecting"));
      try {
        for await (const { name, data } of readEvents(await ask("live", { signal }))) {
          if (signal.aborted) return;
          tries = 0;
          if (name === "totals") { this.takeTotals(JSON.parse(data)); this.counted(); }
          else this.take(JSON.parse(data), name === "first");
          this.said("on", t("live_on"));
        }
        if (!signal.aborted) this.said("lost", t("live_lost"));
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 403 || error.status === 401) { this.said("forbidden", t("live_forbidden")); this.abort = null; return; }
        this.said("lost", error.code === "too_many_listeners" ? t("live_full") : t("live_lost"));
      }
      await new Promise(done => setTimeout(done, DELAYS_MS[Math.min(tries, DELAYS_MS.length - 1)]));
    }
  }

  take(event, first) {
    if (first) {
      this.names = event.columns;
      this.columns = Object.fromEntries(event.columns.map((name, index) => [name, index]));
      this.rows = event.rows;
      this.requests = event.requests.reverse();
      this.lanes = new Map(event.lanes.map(lane => [lane[0], readLane(lane)]));
      this.curve = { width: 1, count: 0, points: [] };
    } else {
      this.rows.push(event.row);
      if (this.rows.length > HOUR) this.rows.shift();
      this.requests = [...event.requests.reverse(), ...this.requests].slice(0, MAX_REQUESTS);
    }
    this.takeCurve(event.latency);
    if (event.kv) this.takeLanes(event.kv);
    for (const name of ["health", "sources", "memory", "tenants"]) this[name] = event[name];
    this.takeTotals(event.totals);
    this.changed(event, first);
  }

  takeTotals(totals) {
    this.totals = Object.fromEntries(totals.map((value, index) => [this.names[index + 1], value]));
  }

  // Points are merged by the server when there are too many. Until it has sent the merged ones, ours stand for them.
  takeCurve({ width, count, begin, points }) {
    const curve = this.curve;
    for (; curve.width < width; curve.width *= 2)
      curve.points = curve.points.filter((_, index) => index % 2 === 0);
    curve.points.splice(begin, points.length, ...points);
    curve.count = count;
  }

  takeLanes(kv) {
    const lanes = new Map();
    for (const sent of kv.lanes) {
      const lane = readLane(sent);
      if (lane.id === undefined && lane.state === "running") lane.id = this.lanes.get(lane.slot)?.id ?? "";
      lanes.set(lane.slot, lane);
    }
    this.lanes = lanes;
    this.kv = { ...kv, preempted: kv.preempted.map(lane => ({ ...readLane(lane), state: "preempted" })) };
  }
}

function readLane(lane) {
  const [slot, computed, tokens = computed, prompt = 0, cached = 0, age = 0, id] = lane;
  return { slot, state: lane.length > 2 ? "running" : "cached", computed, tokens, prompt, cached, age, id };
}

// Charts: lines over time or over request numbers. Series differ by dash and brightness, not by hue alone.
import { make } from "./dom.js";
import { digits, duration } from "./language.js";

const { uPlot } = window;
export const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const SECONDS = [1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800];
const SPACE = "http://www.w3.org/2000/svg";
let colours = new Map();

// A colour of the stylesheet, as the theme has it now.
export function colour(name) {
  if (!colours.has(name)) {
    const probe = make("i", { className: "probe" });
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}
export const forgetColours = () => { colours = new Map(); };

export function swatch(name, dash, filled) {
  const svg = document.createElementNS(SPACE, "svg");
  svg.setAttribute("viewBox", "0 0 20 10");
  svg.setAttribute("class", "swatch " + name);
  svg.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS(SPACE, filled ? "rect" : "path");
  if (filled) for (const [key, value] of [["x", 3], ["width", 14], ["height", 10], ["rx", 2]]) shape.setAttribute(key, value);
  else {
    shape.setAttribute("d", "M0 5h20");
    if (dash.length) shape.setAttribute("stroke-dasharray", dash.join(" "));
  }
  svg.append(shape);
  return svg;
}

// `series`: [{ label, colour, dash, thin }]; `read(row index) → values` gives the columns. Stacked ones are filled.
export class Chart {
  constructor(series, { height = 150, stacked = false, time = true, format = value => digits(value), max } = {}) {
    this.series = series;
    this.format = format;
    this.stacked = stacked;
    this.values = series.map(() => make("b", {}));
    this.legend = make("div", { className: "legend" }, ...series.map((each, index) =>
      make("span", {}, swatch(each.colour, each.dash || [], stacked), each.label, " ", this.values[index])));
    this.plot = make("div", { className: "plot" });
    this.node = make("div", { className: "chart" }, this.legend, this.plot);
    const line = each => ({
      label: each.label, scale: "y", width: each.thin ? 1 : 1.75, dash: stacked ? [] : each.dash, spanGaps: false,
      stroke: () => colour(each.colour), fill: stacked ? () => colour(each.colour) : undefined, points: { show: (u, i) => !stacked && u.data[0].length < 3 },
    });
    const font = "11px " + getComputedStyle(document.body).fontFamily;
    const axis = { stroke: () => colour("dim"), font, ticks: { show: false }, gap: 6 };
    this.u = new uPlot({
      width: 300, height, legend: { show: false }, padding: [8, 22, 0, 0], pxAlign: 0,
      scales: { x: { time }, y: { range: (u, low, high) => [0, max || nice(high)] } },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: !stacked, size: 5 } },
      axes: [
        { ...axis, size: 26, space: 70, grid: { show: false }, incrs: time ? SECONDS : undefined, values: time ? (u, splits, axis, space, step) => splits.map(at => clock(at, step)) : undefined },
        { ...axis, size: 48, space: 34, grid: { stroke: () => colour("line"), width: 1 }, values: (u, splits) => splits.map(format) },
      ],
      series: [{}, ...series.map(line)],
      hooks: { setCursor: [() => this.showValues()] },
    }, [[], ...series.map(() => [])], this.plot);
    new ResizeObserver(() => {
      const width = Math.floor(this.plot.clientWidth);
      if (width && width !== this.u.width) this.u.setSize({ width, height });
    }).observe(this.plot);
  }

  set(columns, shown) {
    this.columns = columns;
    this.shown = shown;
    this.u.setData(this.stacked ? stack(columns) : columns);
    this.showValues();
  }

  showValues() {
    if (!this.columns) return;
    const place = this.u.cursor.idx ?? -1;
    this.series.forEach((_, index) => {
      const value = this.columns[index + 1].at(place) ?? null;
      this.values[index].textContent = value === null ? "–" : this.format(this.shown && place < 0 ? this.shown[index] ?? value : value);
    });
  }
}

// The first series lies on top: it is drawn first, and the sums below it cover its lower part.
function stack([x, ...columns]) {
  const sums = columns.map(() => new Array(x.length));
  for (let row = 0; row < x.length; row++) {
    let sum = 0;
    for (let index = columns.length - 1; index >= 0; index--) sums[index][row] = sum += columns[index][row] || 0;
  }
  return [x, ...sums];
}

const clock = (seconds, step) => new Date(seconds * 1000).toTimeString().slice(0, step < 60 ? 8 : 5);

function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value * 1.05));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find(step => step * power >= value * 1.05) * power;
}

export const milliseconds = value => value === 0 ? "0" : duration(value / 1000);

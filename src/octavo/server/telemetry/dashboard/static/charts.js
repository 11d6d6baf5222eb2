// Lines over time, drawn by uPlot.

import { color, onTheme } from "./theme.js";

const KEPT = 600; // seconds
const HEIGHT = 160;

/** A chart of some columns of the rows that the feed sends. */
export class Chart {
  /** lines: [{label, column, scale (of the values), style ("first" or "second")}]. */
  constructor(element, lines) {
    this.element = element;
    this.lines = lines;
    this.data = [[], ...lines.map(() => [])];
    this.draw();
    onTheme(() => this.draw());
    new ResizeObserver(() => this.resize()).observe(element);
  }

  size() {
    return { width: Math.max(this.element.clientWidth, 100), height: HEIGHT };
  }

  resize() {
    this.plot.setSize(this.size());
  }

  draw() {
    this.plot?.destroy();
    const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false } };
    const value = (_, v) => (v === null || v === undefined ? "–" : v.toLocaleString("en", { maximumFractionDigits: 1 }));
    const values = (_, splits) => splits.map((v) => v.toLocaleString("en"));
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [8, 26, 0, 0],
        scales: { x: { time: true }, y: { range: (_, __, max) => [0, max > 0 ? max * 1.08 : 1] } },
        axes: [{ ...axis, space: 80, size: 32, values: "{HH}:{mm}:{ss}" }, { ...axis, size: 52, values }],
        series: [
          { label: "at", value: "{HH}:{mm}:{ss}" },
          ...this.lines.map((line) => ({
            label: line.label,
            stroke: color(line.style),
            width: 1.6,
            points: { show: false },
            spanGaps: true,
            value,
          })),
        ],
        cursor: { sync: { key: "octavo" }, drag: { x: false, y: false } },
        legend: { live: true },
      },
      this.data,
      this.element,
    );
  }

  clear() {
    for (const column of this.data) column.length = 0;
  }

  /** Add rows, and replace rows of the same second. offset: wall-clock time minus the engine's clock, in seconds. */
  add(rows, offset) {
    for (const row of rows) {
      const time = row[0] + offset;
      const [times] = this.data;
      let place = times.length; // almost always the end
      while (place > 0 && times[place - 1] > time - 0.5) place -= 1;
      const isThere = place < times.length && Math.abs(times[place] - time) < 0.5;
      const values = this.lines.map(({ column, scale }) => (row[column] === null ? null : row[column] * (scale ?? 1)));
      [time, ...values].forEach((value, i) => this.data[i].splice(place, isThere ? 1 : 0, value));
    }
    for (const column of this.data) column.splice(0, Math.max(column.length - KEPT, 0));
    if (rows.length) this.plot.setData(this.data);
  }
}

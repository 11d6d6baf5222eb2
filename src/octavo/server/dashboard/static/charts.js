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

  /** Add rows; offset: what makes wall-clock seconds of the engine's. */
  add(rows, offset) {
    for (const row of rows) {
      this.data[0].push(row[0] + offset);
      this.lines.forEach((line, i) => {
        const value = row[line.column];
        this.data[i + 1].push(value === null ? null : value * (line.scale ?? 1));
      });
    }
    for (const column of this.data) column.splice(0, Math.max(column.length - KEPT, 0));
    if (rows.length) this.plot.setData(this.data);
  }
}

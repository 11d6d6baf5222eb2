// The map of experts, with a row for each layer with experts, and figures of the last seconds.

import { prepare, tellOnHover } from "./canvas.js";
import { bytes } from "./format.js";
import { color, onTheme } from "./theme.js";

const DARKEST = 400; // percent of the layer's mean
const MAX_HEIGHT = 320;

export class ExpertPanel {
  /** figures: the elements for tokens per read, bytes of a step and imbalance. */
  constructor(panel, canvas, figures) {
    this.panel = panel;
    this.canvas = canvas;
    this.figures = figures;
    this.layers = [];
    tellOnHover(canvas, (x, y) => this.tell(x, y));
    onTheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  /** layers: each expert's tokens in percent of its layer's mean, or null if nothing changed. */
  update(layers, moment) {
    if (layers !== null) this.layers = layers;
    this.panel.hidden = this.layers.length === 0;
    const texts = moment === null ? ["–", "–", "–"] : [moment.tokens_per_read, bytes(moment.step_bytes), moment.imbalance];
    texts.forEach((text, i) => {
      this.figures[i].textContent = text;
    });
    if (layers !== null) this.draw();
  }

  size() {
    const height = Math.max(Math.min(Math.floor(MAX_HEIGHT / this.layers.length), 14), 2);
    return { width: this.canvas.clientWidth / this.layers[0].length, height };
  }

  draw() {
    if (this.panel.hidden || this.layers.length === 0) return;
    const { width, height } = this.size();
    this.canvas.style.height = `${this.layers.length * height}px`;
    const { context } = prepare(this.canvas);
    const gap = Math.min(width, height) > 4 ? 1 : 0;
    this.layers.forEach((layer, row) =>
      layer.forEach((percent, column) => {
        const place = [column * width, row * height, width - gap, height - gap];
        context.fillStyle = color("free");
        context.fillRect(...place);
        context.globalAlpha = Math.min(percent / DARKEST, 1);
        context.fillStyle = color("accent");
        context.fillRect(...place);
        context.globalAlpha = 1;
      }),
    );
    this.canvas.dataset.layers = this.layers.length;
  }

  tell(x, y) {
    const { width, height } = this.size();
    const [row, column] = [Math.floor(y / height), Math.floor(x / width)];
    const percent = this.layers[row]?.[column];
    if (percent === undefined) return null;
    return `layer ${row} of those with experts, expert ${column}: ${percent} % of the mean of its layer`;
  }
}

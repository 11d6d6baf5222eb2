// Cached tokens that are computed again, and the slots of recurrent states. Each line is shown if it has figures.

import { count } from "./format.js";

export class PrefixLines {
  constructor(unusable, states) {
    this.unusable = unusable;
    this.states = states;
  }

  update({ unusable, states }) {
    show(this.unusable, unusable.window + unusable.checkpoint ? unusable : null);
    show(this.states, states);
  }
}

/** Fill a line's elements, whose data-figure is a name in `figures`. Hide the line if `figures` is null. */
function show(line, figures) {
  line.hidden = figures === null;
  if (line.hidden) return;
  for (const element of line.querySelectorAll("[data-figure]")) {
    const text = count(figures[element.dataset.figure]);
    if (element.textContent !== text) element.textContent = text;
  }
}

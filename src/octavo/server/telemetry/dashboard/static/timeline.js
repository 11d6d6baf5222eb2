// The batches of the last steps, with a column for each step and a row for each request. Below: the tokens of a step.
// Accepted drafts are green.

import { prepare, tellOnHover } from "./canvas.js";
import { duration } from "./format.js";
import { color, onTheme, requestColor } from "./theme.js";

const COLUMN = 7;
const FOOT = 46;
const MOST_SHOWN = 8; // accepted drafts of a request in a step; more are drawn equally

export class Timeline {
  /** name(number): the id of a request. ended(number): true if the request has ended. */
  constructor(canvas, name, ended) {
    this.canvas = canvas;
    this.name = name;
    this.ended = ended;
    this.clear();
    tellOnHover(canvas, (x, y) => this.tell(x, y));
    onTheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  clear() {
    this.steps = [];
    this.leftOut = new Map();
    this.lanes = new Map();
  }

  /**
   * Add steps: [number, start, seconds, [[request, tokens, is of a prompt], ...], [[request, drafted, accepted], ...]].
   * numLeftOut: the number of steps that are missing before these steps.
   */
  add(steps, numLeftOut) {
    if (steps.length) this.leftOut.set(steps[0][0], numLeftOut);
    this.steps.push(...steps);
    for (const step of this.steps.splice(0, Math.max(this.steps.length - 400, 0))) this.leftOut.delete(step[0]);
  }

  visible() {
    return this.steps.slice(-Math.floor(this.canvas.clientWidth / COLUMN));
  }

  /** Assign rows. A request keeps its row while the request is open or visible. */
  assign(steps) {
    const seen = new Set(steps.flatMap((step) => step[3].map((part) => part[0])));
    for (const number of this.lanes.keys()) {
      if (!seen.has(number) && this.ended(number)) this.lanes.delete(number);
    }
    const taken = new Set(this.lanes.values());
    let next = 0;
    for (const number of seen) {
      if (this.lanes.has(number)) continue;
      while (taken.has(next)) next += 1;
      this.lanes.set(number, next);
      taken.add(next);
    }
    return Math.max(...taken, 7) + 1;
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    const steps = this.visible();
    const lanes = this.assign(steps);
    const room = height - FOOT;
    const lane = room / lanes;
    const most = Math.max(1, ...steps.map((step) => step[3].reduce((sum, part) => sum + part[1], 0)));
    const left = width - steps.length * COLUMN;
    steps.forEach((step, i) => {
      const x = left + i * COLUMN;
      const numRight = new Map(step[4].map((draft) => [draft[0], draft[2]]));
      let tokens = 0;
      for (const [number, count, isPrompt] of step[3]) {
        tokens += count;
        const y = this.lanes.get(number) * lane;
        const thick = Math.max(lane - 1, 1);
        context.fillStyle = requestColor(number);
        if (isPrompt) context.fillRect(x, y, COLUMN - 1, thick);
        else {
          const thin = Math.max(thick * 0.3, 1);
          context.fillRect(x, y + thick - thin, COLUMN - 1, thin);
          const right = (thick - thin) * Math.min((numRight.get(number) ?? 0) / MOST_SHOWN, 1);
          context.fillStyle = color("good");
          context.fillRect(x, y + thick - thin - right, COLUMN - 1, right);
        }
      }
      context.fillStyle = color("cached");
      const tall = Math.max((tokens / most) * (FOOT - 18), 1);
      context.fillRect(x, height - 12 - tall, COLUMN - 1, tall);
      const right = step[4].reduce((sum, draft) => sum + draft[2], 0);
      context.fillStyle = color("good");
      context.fillRect(x, height - 12 - tall, COLUMN - 1, (tall * right) / Math.max(tokens, 1));
    });
    context.fillStyle = color("quiet");
    context.font = "11px system-ui, sans-serif";
    if (steps.length) {
      context.textAlign = "right";
      context.fillText(`step ${steps.at(-1)[0]}`, width, height - 1);
      context.textAlign = "left";
      const numLeftOut = steps.slice(1).reduce((sum, step) => sum + (this.leftOut.get(step[0]) ?? 0), 0);
      const whole = numLeftOut ? ` of ${steps.length + numLeftOut}` : "";
      const seconds = duration(steps.at(-1)[1] + steps.at(-1)[2] - steps[0][1]);
      context.fillText(`${steps.length}${whole} steps in ${seconds}`, 0, height - 1);
    } else {
      context.textAlign = "center";
      context.fillText("no step in the last minutes", width / 2, room / 2);
    }
    this.canvas.dataset.steps = steps.length;
    this.geometry = { left, lane, room, steps };
  }

  tell(x, y) {
    const { left, lane, room, steps } = this.geometry;
    const step = steps[Math.floor((x - left) / COLUMN)];
    if (x < left || !step) return null;
    const total = step[3].reduce((sum, part) => sum + part[1], 0);
    const about = `step ${step[0]}: ${total} tokens for ${step[3].length} requests in ${duration(step[2])}`;
    const part = y < room && step[3].find((each) => this.lanes.get(each[0]) === Math.floor(y / lane));
    if (!part) return about;
    const draft = step[4].find((each) => each[0] === part[0]);
    const guessed = draft ? `, ${draft[2]} of ${draft[1]} drafts accepted` : "";
    const what = part[2] ? "of its prompt" : `generated${guessed}`;
    return `${this.name(part[0])}: ${part[1]} ${part[1] > 1 ? "tokens" : "token"} ${what}\n${about}`;
  }
}

// The map of the KV cache. It has a cell for each block, or for several blocks if there are too many.

import { prepare, tellOnHover } from "./canvas.js";
import { color, onTheme, requestColor } from "./theme.js";

const [FREE, CACHED, OWNED, SHARED, QUARANTINED] = [0, 1, 2, 3, 4];
const NAMES = ["free", "cached", "owned", "shared", "in quarantine"];
const MIN_CELL = 5; // pixels
const MAX_HEIGHT = 210;

export class BlockMap {
  /** name(number): the id of a request. counts: by state, the element that shows the number of blocks. */
  constructor(canvas, note, counts, name) {
    this.canvas = canvas;
    this.note = note;
    this.counts = counts;
    this.name = name;
    this.clear();
    tellOnHover(canvas, (x, y) => this.tell(x, y));
    onTheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  clear() {
    this.states = new Uint8Array(0);
    this.tables = new Map();
    this.blockSize = 0;
  }

  /** Apply changes of block states and of block tables. States are a string of digits or [[block, state], ...]. */
  update(change) {
    if (typeof change.states === "string") this.states = Uint8Array.from(change.states, Number);
    else for (const [block, state] of change.states) this.states[block] = state;
    for (const number of change.gone) this.tables.delete(number);
    for (const [number, from, blocks] of change.grown) {
      const table = from ? this.tables.get(number) : [];
      table.length = from;
      table.push(...blocks);
      this.tables.set(number, table);
    }
    this.blockSize = change.block_size;
  }

  draw() {
    const total = this.states.length;
    const room = this.canvas.clientWidth;
    const mostCells = Math.max(Math.floor(room / MIN_CELL) * Math.floor(MAX_HEIGHT / MIN_CELL), 1);
    const each = Math.max(Math.ceil(total / mostCells), 1); // blocks in a cell
    const cells = Math.ceil(total / each);
    const size = Math.max(MIN_CELL, Math.min(14, Math.floor(Math.sqrt((room * MAX_HEIGHT) / Math.max(cells, 1)))));
    const columns = Math.max(Math.floor(room / size), 1);
    this.canvas.style.height = `${Math.max(Math.ceil(cells / columns) * size, size)}px`;
    const { context } = prepare(this.canvas);
    const owners = new Int32Array(total).fill(-1);
    for (const [number, table] of this.tables) for (const block of table) owners[block] = number;
    const plain = { [FREE]: color("free"), [CACHED]: color("cached"), [SHARED]: color("shared"), [QUARANTINED]: color("bad") };
    for (let cell = 0; cell < cells; cell += 1) {
      let shown = cell * each; // the most used of the blocks in the cell
      for (let block = shown + 1; block < Math.min((cell + 1) * each, total); block += 1) {
        if (this.states[block] > this.states[shown]) shown = block;
      }
      const state = this.states[shown];
      context.fillStyle = state === OWNED ? (owners[shown] < 0 ? color("quiet") : requestColor(owners[shown])) : plain[state];
      context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
    }
    const counts = [0, 0, 0, 0, 0];
    for (const state of this.states) counts[state] += 1;
    this.counts.forEach((element, state) => {
      element.textContent = counts[state].toLocaleString("en");
    });
    const cellNote = each > 1 ? `, ${each} in a cell` : "";
    const lost = counts[QUARANTINED] ? `, ${counts[QUARANTINED]} in quarantine` : "";
    this.note.textContent = total ? `${total.toLocaleString("en")} blocks of ${this.blockSize} tokens${cellNote}${lost}` : "";
    this.canvas.dataset.blocks = total;
    this.geometry = { size, columns, each, total };
  }

  tell(x, y) {
    const { size, columns, each, total } = this.geometry;
    const column = Math.floor(x / size);
    const first = (Math.floor(y / size) * columns + column) * each;
    if (column >= columns || first >= total) return null;
    const lines = [];
    for (let block = first; block < Math.min(first + each, total); block += 1) {
      const holders = [...this.tables].filter(([, table]) => table.includes(block)).map(([number]) => this.name(number));
      lines.push(`block ${block}: ${NAMES[this.states[block]]}${holders.length ? `\n${holders.join("\n")}` : ""}`);
    }
    return lines.slice(0, 6).join("\n");
  }
}

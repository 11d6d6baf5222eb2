// The list of requests, and how one of them spent its time.

import { count, duration } from "./format.js";
import { requestColor } from "./theme.js";

const PHASE_COLORS = {
  "on its way to the queue": "#8a8f98",
  "waiting in the queue": "#b08d00",
  "waiting for a block that another request computed": "#a0663c",
  "waiting for KV from outside": "#8a6fd1",
  "computing the prompt": "#4477cc",
  generating: "#2a9d6f",
  "preempted, waiting to continue": "#d1495b",
};
const CLICK_MS = 50;
const dialog = document.getElementById("explanation");

function element(kind, text, className) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Return true if a request in this state has not ended. */
export function isLive(state) {
  return ["waiting", "prompt", "generating", "preempted"].includes(state);
}

/**
 * A row moves only if the place of its request in the list changes. While a button, a finger or the space bar is down,
 * no row moves, because a browser makes no click if the row moved between press and release.
 */
export class RequestTable {
  constructor(body, empty) {
    this.body = body;
    this.empty = empty;
    this.rows = new Map();
    this.isPressed = false;
    this.numPresses = 0;
    body.addEventListener("pointerdown", (event) => this.press(event.isPrimary && event.button === 0 && !event.ctrlKey));
    body.addEventListener("keydown", (event) => this.press(event.key === " "));
    // After a touch the click comes a moment after the release.
    for (const over of ["pointerup", "keyup"]) addEventListener(over, () => this.letGoSoon());
    for (const over of ["pointercancel", "contextmenu", "blur"]) addEventListener(over, () => this.press(false));
    body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) explain(row.dataset.id);
    });
  }

  /** Hold the rows still, or let them move again. */
  press(isPressed) {
    this.numPresses += 1;
    this.isPressed = isPressed;
  }

  /** Let the rows move after the click, unless a button or key is pressed again before. */
  letGoSoon() {
    const press = this.numPresses;
    setTimeout(() => press === this.numPresses && this.press(false), CLICK_MS);
  }

  clear() {
    this.press(false);
    this.rows.clear();
    this.body.replaceChildren();
  }

  update(requests) {
    if (this.isPressed) return;
    const focused = document.activeElement;
    const present = new Set(requests.map((request) => request.number));
    for (const [number, row] of this.rows) {
      if (present.has(number)) continue;
      row.remove();
      this.rows.delete(number);
    }
    requests.forEach((request, place) => {
      const row = this.rows.get(request.number) ?? this.make(request);
      this.fill(row, request);
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
    });
    if (focused !== document.activeElement && this.body.contains(focused)) focused.focus({ preventScroll: true });
    this.empty.hidden = requests.length > 0;
  }

  make(request) {
    const row = element("tr");
    row.dataset.id = request.id;
    const who = element("div", undefined, "who");
    const dot = element("span", undefined, "dot");
    dot.style.background = requestColor(request.number);
    const name = element("button", request.id);
    name.type = "button";
    name.title = request.id;
    who.append(dot, name);
    const first = element("td");
    first.append(who);
    row.append(first, ...["", "key", "number", "number cached", "number", "number", "number age"].map((c) => element("td", "", c)));
    this.rows.set(request.number, row);
    return row;
  }

  fill(row, request) {
    const preempted = request.preemptions ? ` (preempted ${request.preemptions} times)`.replace("1 times", "once") : "";
    const values = [
      request.state + preempted,
      request.key || "–",
      count(request.prompt),
      count(request.cached),
      count(request.generated),
      duration(request.ttft),
      duration(request.age),
    ];
    values.forEach((value, i) => {
      const cell = row.children[i + 1];
      if (cell.textContent !== value) cell.textContent = value;
    });
    row.classList.toggle("ended", !isLive(request.state));
    row.children[1].classList.toggle("error", request.state === "error");
  }
}

/** Show how a request spent its time. */
export async function explain(id) {
  document.getElementById("explanation-title").textContent = id;
  const ending = document.getElementById("explanation-ending");
  const [phases, sums, reasons] = ["phases", "sums", "reasons"].map((name) => document.getElementById(name));
  ending.textContent = "asking…";
  for (const each of [phases, sums, reasons]) each.replaceChildren();
  if (!dialog.open) dialog.showModal();
  let data;
  try {
    const response = await fetch(`dashboard/requests/${encodeURIComponent(id)}`);
    data = await response.json();
    if (!response.ok) throw new Error(data.error.message);
  } catch (error) {
    ending.textContent = error.message;
    return;
  }
  ending.textContent = `${duration(data.seconds)} in all; ${data.ending}`;
  for (const { phase, start, end } of data.phases) {
    const part = element("div");
    part.style.flexGrow = 1e6 * (end - start); // with a sum below 1 the parts would not fill the row
    part.style.background = PHASE_COLORS[phase];
    part.title = `${phase}: ${duration(end - start)}`;
    phases.append(part);
  }
  for (const { phase, seconds } of data.sums) {
    const share = data.seconds ? `${Math.round((100 * seconds) / data.seconds)} %` : "";
    const name = element("dt", phase);
    name.style.borderLeft = `4px solid ${PHASE_COLORS[phase]}`;
    name.style.paddingLeft = "8px";
    sums.append(name, element("dd", duration(seconds)), element("dd", share));
  }
  reasons.append(...data.reasons.map((reason) => element("li", reason)));
}

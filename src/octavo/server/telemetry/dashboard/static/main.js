// The page: passes the feed's events to its parts.

import { BlockMap } from "./blocks.js";
import { Chart } from "./charts.js";
import { setModel } from "./chat.js";
import { ExpertPanel } from "./experts.js";
import { follow } from "./feed.js";
import { count, duration, percent } from "./format.js";
import { PrefixLines } from "./prefixes.js";
import { RequestTable, isLive } from "./requests.js";
import { toggleTheme } from "./theme.js";
import { TierTable } from "./tiers.js";
import { Timeline } from "./timeline.js";

const at = (id) => document.getElementById(id);
const names = new Map(); // ids of the requests that the drawings show, by number
const live = new Set();
let offset = 0; // wall-clock time minus the engine's clock, in seconds
const name = (number) => names.get(number) ?? "a request of before";

// Columns of a row of the feed: time, prompt tokens, generated tokens, running, waiting, use, then p50 and p99 of both,
// bytes loaded and saved, bytes of experts' weights.
const charts = [
  new Chart(at("chart-tokens"), [
    { label: "generated", column: 2, style: "first" },
    { label: "of prompts", column: 1, style: "second" },
  ]),
  new Chart(at("chart-requests"), [
    { label: "running", column: 3, style: "first" },
    { label: "waiting", column: 4, style: "second" },
  ]),
  new Chart(at("chart-ttft"), [
    { label: "p50", column: 6, scale: 1000, style: "first" },
    { label: "p99", column: 7, scale: 1000, style: "second" },
  ]),
  new Chart(at("chart-itl"), [
    { label: "p50", column: 8, scale: 1000, style: "first" },
    { label: "p99", column: 9, scale: 1000, style: "second" },
  ]),
  new Chart(at("chart-tiers"), [
    { label: "read", column: 10, scale: 2 ** -20, style: "first" },
    { label: "written", column: 11, scale: 2 ** -20, style: "second" },
  ]),
  new Chart(at("chart-experts"), [{ label: "read", column: 12, scale: 2 ** -20, style: "first" }]),
];
const timeline = new Timeline(at("timeline"), name, (number) => !live.has(number));
const blocks = new BlockMap(
  at("blocks"),
  at("block-note"),
  ["num-free", "num-cached", "num-owned", "num-shared"].map(at),
  name,
);
const experts = new ExpertPanel(
  at("experts"),
  at("expert-map"),
  ["expert-tokens", "expert-bytes", "expert-imbalance"].map(at),
);
const prefixes = new PrefixLines(at("unusable"), at("states"));
const tiers = new TierTable(at("tiers"));
const table = new RequestTable(at("requests").tBodies[0], at("no-requests"));

function showMoment(frame) {
  const { moment } = frame;
  at("generated").textContent = count(moment.generated_per_s);
  at("prefill").textContent = count(moment.prefill_per_s);
  at("running").textContent = count(moment.running);
  at("waiting").textContent = `${count(moment.waiting)} waiting`;
  at("ttft").textContent = duration(moment.ttft[0]);
  at("ttft99").textContent = `p99 ${duration(moment.ttft[1])}`;
  at("itl").textContent = duration(moment.itl[0]);
  at("itl99").textContent = `p99 ${duration(moment.itl[1])}`;
  at("usage").textContent = percent(moment.usage);
  at("hits").textContent = `${percent(moment.cache_hits)} of prompts found`;
  at("drafts").textContent = draftsText(moment.drafts);
}

/** "19 of 25, 6.3 tokens per step, 4.65 times as fast as without drafts"; "" without drafts. */
function draftsText(drafts) {
  if (drafts === null) return "";
  const speedUp = drafts.speed_up === null ? "" : `, ${drafts.speed_up} times as fast as without drafts`;
  return `${count(drafts.accepted)} of ${count(drafts.drafted)}, ${drafts.tokens_per_step} tokens per step${speedUp}`;
}

function takeFrame(frame) {
  const parts = [...charts, timeline, blocks, table];
  if (frame.is_first) {
    for (const part of parts) part.clear();
    names.clear();
    offset = Date.now() / 1000 - frame.now;
  }
  for (const [number, id] of frame.names) names.set(number, id);
  live.clear();
  for (const number of frame.live) live.add(number);
  while (names.size > 2000) names.delete(names.keys().next().value);
  for (const chart of charts) chart.add(frame.seconds, offset);
  showMoment(frame);
  if (frame.blocks !== null) blocks.update(frame.blocks);
  timeline.add(frame.steps, frame.steps_left_out);
  experts.update(frame.experts, frame.moment.experts);
  if (document.hidden) return; // the page is not visible
  if (frame.is_first || frame.steps.length) timeline.draw();
  if (frame.is_first || frame.blocks !== null) blocks.draw();
  prefixes.update(frame.prefixes);
  tiers.update(frame.tiers);
  table.update(frame.requests);
  const shown = frame.requests.filter((request) => isLive(request.state)).length;
  const all = frame.moment.running + frame.moment.waiting;
  at("request-note").textContent = shown < all ? `${shown} of ${all} live ones; ` : "";
}

at("theme").addEventListener("click", toggleTheme);
follow("dashboard/events", {
  hello(data) {
    at("model").textContent = `${data.model} · ${count(data.max_model_len)} tokens of context · octavo ${data.version}`;
    setModel(data.model, data.has_chat);
  },
  frame: takeFrame,
  state(state, text) {
    const element = at("state");
    if (element.textContent !== text) element.textContent = text;
    element.dataset.state = state;
    document.body.classList.toggle("stale", state !== "ready");
  },
});

"use strict";

const number = new Intl.NumberFormat("en");

function cell(row, text, kind) {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function show(engine, most) {
  const row = document.createElement("tr");
  cell(row, engine.url);
  cell(row, engine.role);
  cell(row, engine.ready ? "ready" : "away", engine.ready ? "good" : "bad");
  cell(row, engine.models === null ? "" : engine.models.join(", "));
  cell(row, number.format(engine.open_requests), "figure");
  const tokens = engine.open_tokens + engine.other_tokens;
  const load = cell(row, number.format(tokens), "figure");
  const bar = document.createElement("progress");
  bar.max = Math.max(most, 1);
  bar.value = tokens;
  load.append(bar);
  cell(row, number.format(engine.requests), "figure");
  cell(row, engine.prefills ? number.format(engine.prefills) : "", engine.failed_prefills ? "figure bad" : "figure");
  const rate = engine.prompt_tokens ? engine.cached_tokens / engine.prompt_tokens : null;
  cell(row, rate === null ? "" : `${(100 * rate).toFixed(1)} %`, "figure");
  cell(row, number.format(engine.failures), engine.failures ? "figure bad" : "figure");
  cell(row, number.format(engine.restarts), "figure");
  return row;
}

async function refresh() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch("/router/engines");
    if (!answer.ok) throw new Error(answer.status);
    const told = await answer.json();
    const most = Math.max(...told.engines.map((engine) => engine.open_tokens + engine.other_tokens), 0);
    document.getElementById("engines").replaceChildren(...told.engines.map((engine) => show(engine, most)));
    document.getElementById("policy").textContent = told.policy;
    state.textContent = "connected";
    state.className = "state good";
  } catch (error) {
    state.textContent = `no figures: ${error.message}`;
    state.className = "state bad";
  }
  setTimeout(refresh, 1000);
}

refresh();

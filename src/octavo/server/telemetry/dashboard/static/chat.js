// A conversation with the model, through the public route.

import { duration } from "./format.js";
import { explain } from "./requests.js";

const list = document.getElementById("messages");
const form = document.getElementById("chat");
const prompt = document.getElementById("prompt");
const [send, stop, clear] = ["send", "stop", "clear"].map((name) => document.getElementById(name));
const conversation = [];
let model = "";
let hasChat = true;
let running = null;

/** Set the model. A model without a chat template continues texts instead of answering messages. */
export function setModel(name, chat) {
  [model, hasChat] = [name, chat];
  prompt.placeholder = hasChat ? "Write to the model. Enter sends." : "A text for the model to continue. Enter sends.";
}

function addMessage(role) {
  const item = document.createElement("li");
  item.className = role;
  const parts = ["thought", "text", "facts"].map((name) => {
    const part = document.createElement("div");
    part.className = name;
    part.hidden = name !== "text";
    return part;
  });
  item.append(...parts);
  list.append(item);
  return { item, thought: parts[0], text: parts[1], facts: parts[2] };
}

/** Yield the data of server-sent events as they arrive. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

function body(text) {
  const number = (name) => document.getElementById(name).valueAsNumber;
  const options = { model, stream: true, stream_options: { include_usage: true } };
  if (!Number.isNaN(number("temperature"))) options.temperature = number("temperature");
  if (!Number.isNaN(number("max-tokens"))) options.max_tokens = number("max-tokens");
  return hasChat ? { ...options, messages: conversation } : { ...options, prompt: text };
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user").text.textContent = text;
  const answer = addMessage("assistant");
  const seen = { content: "", start: performance.now(), first: null, id: null, usage: null, reason: null };
  running = new AbortController();
  show(true);
  try {
    const response = await fetch(hasChat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body(text)),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) take(event, seen, answer);
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.item.classList.add("failed");
      answer.text.textContent += `${seen.content ? "\n" : ""}${error.message}`;
    } else seen.reason = "stopped";
  }
  running = null;
  show(false);
  if (seen.content) conversation.push({ role: "assistant", content: seen.content });
  else conversation.pop(); // no answer came, so the next message replaces this message
  tellFacts(seen, answer.facts);
}

function take(event, seen, answer) {
  if (event.error) throw new Error(event.error.message);
  seen.id ??= event.id;
  seen.usage = event.usage ?? seen.usage;
  const choice = event.choices[0];
  if (!choice) return;
  const thought = choice.delta?.reasoning_content ?? "";
  const text = choice.delta?.content ?? choice.text ?? "";
  if (thought || text) seen.first ??= performance.now();
  seen.reason = choice.finish_reason ?? seen.reason;
  seen.content += text;
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  if (thought) {
    answer.thought.hidden = false;
    answer.thought.append(thought);
  }
  answer.text.append(text);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function tellFacts(seen, facts) {
  const said = [];
  const seconds = (performance.now() - seen.start) / 1000;
  if (seen.first !== null) said.push(`first token after ${duration((seen.first - seen.start) / 1000)}`);
  if (seen.usage) {
    const tokens = seen.usage.completion_tokens;
    said.push(`${tokens} tokens in ${duration(seconds)} (${(tokens / seconds).toFixed(1)}/s)`);
    const cached = seen.usage.prompt_tokens_details?.cached_tokens;
    if (cached) said.push(`${cached} of ${seen.usage.prompt_tokens} prompt tokens cached`);
  }
  if (seen.reason) said.push(`ended: ${seen.reason}`);
  facts.replaceChildren(...said.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
  if (seen.id !== null) {
    const why = Object.assign(document.createElement("button"), { type: "button", textContent: "where the time went" });
    why.addEventListener("click", () => explain(seen.id));
    facts.append(why);
  }
  facts.hidden = false;
  list.scrollTop = list.scrollHeight;
}

function show(isRunning) {
  stop.hidden = !isRunning;
  send.hidden = isRunning;
  clear.disabled = isRunning;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  ask(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
stop.addEventListener("click", () => running?.abort());
clear.addEventListener("click", () => {
  conversation.length = 0;
  list.replaceChildren();
});

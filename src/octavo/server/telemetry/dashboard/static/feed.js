// Receives the server's frames, reports a lost connection, and reconnects.

const SILENT_MS = 5000; // frames come several times a second
const RETRY_MS = 1000;

/**
 * Follow the feed at a URL. on.hello(data) and on.frame(data) get the events. on.state(state, text) gets the state:
 * "connecting", "ready", "restarting", "closing", "gone" or "refused".
 */
export function follow(url, on) {
  let source = null;
  let heard = Date.now();
  let retry = null;

  function connect() {
    retry = null;
    heard = Date.now();
    source = new EventSource(url);
    source.addEventListener("hello", (event) => on.hello(JSON.parse(event.data)));
    source.addEventListener("frame", (event) => {
      heard = Date.now();
      const frame = JSON.parse(event.data);
      if (frame.dead) on.state("gone", "the engine has stopped");
      else if (!frame.ready) on.state("restarting", "the engine is being started again");
      else on.state("ready", "ready");
      on.frame(frame);
    });
    source.addEventListener("bye", () => again("closing", "the server is shutting down"));
    source.addEventListener("error", explain);
  }

  /** Close this connection, report the reason, and connect again soon. */
  function again(state, text) {
    source.close();
    on.state(state, text);
    retry ??= setTimeout(connect, RETRY_MS);
  }

  /** Send a request to find out why the event source failed, because the event source does not report the reason. */
  async function explain() {
    const failed = source;
    failed.close();
    try {
      const response = await fetch(url, { signal: AbortSignal.timeout(SILENT_MS) });
      const type = response.headers.get("content-type") ?? "";
      const body = type.includes("json") ? await response.json() : null;
      await response.body?.cancel().catch(() => {});
      if (failed !== source) return;
      if (body?.error) again(response.status === 503 ? "restarting" : "refused", body.error.message);
      else again("connecting", "connecting");
    } catch {
      if (failed === source) again("gone", "the server cannot be reached; trying again");
    }
  }

  setInterval(() => {
    if (retry === null && Date.now() - heard > SILENT_MS) again("gone", "the server is silent; trying again");
  }, 1000);
  connect();
}

// Answers: each streams into its message, whichever conversation is shown meanwhile.
import { t } from "./language.js";
import { keep, running } from "./conversations.js";
import { watchHealth } from "./health.js";
import { ask, readEvents, ServerError } from "./server.js";

// The pause between two updates of an answer that streams: at least, at most, and by what the last one took.
const MIN_PAUSE_MS = 100, MAX_PAUSE_MS = 1500, PAUSE_FACTOR = 40;
const SAVE_MS = 1000, QUIET_MS = 1500;
let left = false;
addEventListener("pagehide", () => { left = true; });
addEventListener("pageshow", ({ persisted }) => { if (persisted) location.reload(); });  // its answers have ended

// Adds what an event brings to the answer.
function take(node, event) {
  if (event.error) throw new ServerError(0, event.error.code, event.error.message || String(event.error));
  node.revision++;
  node.model = event.model || node.model;
  if (event.usage || event.timings) node.end = { ...node.end, usage: event.usage || node.end?.usage, timings: event.timings || node.end?.timings };
  for (const { delta = {}, finish_reason: reason } of event.choices || []) {
    if (delta.content) node.content += delta.content;
    if (delta.reasoning_content) node.reasoning = (node.reasoning || "") + delta.reasoning_content;
    for (const call of delta.tool_calls || []) {
      node.calls ||= [];
      const known = node.calls[call.index] ||= { id: call.id, name: call.function.name, text: "" };
      known.text += call.function.arguments || "";
    }
    if (reason) node.end = { ...node.end, reason };
  }
}

// Reads the answer to `body` into a message of a conversation; calls `show` as it grows, with a text while it waits.
export async function stream(conversation, node, body, show) {
  const abort = new AbortController();
  let due = null, pause_ms = MIN_PAUSE_MS, saved = 0, heard = performance.now();
  const update = () => {
    const began = performance.now();
    show();
    pause_ms = Math.min(MAX_PAUSE_MS, Math.max(MIN_PAUSE_MS, PAUSE_FACTOR * (performance.now() - began)));
    due = null;
    if (began - saved > SAVE_MS) { saved = began; keep(conversation); }
  };
  const hear = () => { heard = performance.now(); };
  const quiet = setInterval(() => { if (performance.now() - heard > QUIET_MS) { hear(); watchHealth(); } }, QUIET_MS / 3);
  node.revision = (node.revision || 0) + 1;
  running.set(conversation.id, { node: node.id, stop: () => abort.abort(), own: true });
  keep(conversation);
  try {
    const response = await ask("v1/chat/completions", { method: "POST", body, signal: abort.signal });
    const position = Number(response.headers.get("X-Queue-Position"));
    if (position) show(t("queued", { position }));
    for await (const { data } of readEvents(response, hear)) {
      if (data === "[DONE]") break;
      take(node, JSON.parse(data));
      due ??= setTimeout(update, pause_ms);
    }
    if (!node.end) throw new Error();
  } catch (error) {
    if (left) return;  // what there is was left behind
    if (abort.signal.aborted) node.stopped = true;
    else node.error = error instanceof ServerError ? error.message : t(node.content ? "lost_inside" : "lost");
    if (!abort.signal.aborted) watchHealth();
  } finally {
    clearTimeout(due);
    clearInterval(quiet);
  }
  node.revision++;
  running.delete(conversation.id);
  await keep(conversation);
}

// Answers: each streams into its message, whichever conversation is shown meanwhile.
import { t } from "./language.js";
import { conversations, keep, running } from "./conversations.js";
import { watchHealth } from "./health.js";
import { ask, readEvents, ServerError } from "./server.js";

// The pause between two updates of an answer that streams: at least, at most, and by what the last one took.
const MIN_PAUSE_MS = 100, MAX_PAUSE_MS = 1500, PAUSE_FACTOR = 40;
const SAVE_MS = 1000, QUIET_MS = 1500, RETRY_MS = 1000, RETRIES = 5;
const RECONNECT_S = 60, KEPT_OWN = "cllm.answers";  // by conversation: the message that this tab's answer streams into
let left = false;
addEventListener("pagehide", () => { left = true; });
addEventListener("pageshow", ({ persisted }) => { if (persisted) location.reload(); });  // its answers have ended

const own = () => JSON.parse(sessionStorage.getItem(KEPT_OWN) || "{}");
const address = node => "v1/streams/" + node.stream.replace(/\.\d+$/, "");

// The answers that this tab was reading when it was reloaded: their conversations and messages.
export const unread = () => Object.entries(own()).map(([id, node]) => [conversations.get(id), conversations.get(id)?.nodes[node]])
  .filter(([, node]) => node?.stream);

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

// The response to what `body` makes, or the rest of the one that the message has begun with.
async function connect(node, body, signal) {
  if (node.stream) return ask(address(node), { headers: { "Last-Event-ID": node.stream }, signal });
  return ask("v1/chat/completions", { method: "POST", body: { ...await body(), reconnect_s: RECONNECT_S }, signal });
}

// Reads the answer to what `body` makes into a message of a conversation; calls `show` as it grows, with a text while it waits.
export async function stream(conversation, node, body, show) {
  const abort = new AbortController();
  let lost = 0, due = null, pause_ms = MIN_PAUSE_MS, saved = 0, heard = performance.now();
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
  const stop = () => {
    abort.abort();
    if (node.stream) ask(address(node), { method: "DELETE", quiet: true }).catch(() => {});
  };
  running.set(conversation.id, { node: node.id, stop, own: true });
  sessionStorage.setItem(KEPT_OWN, JSON.stringify({ ...own(), [conversation.id]: node.id }));
  keep(conversation);
  const read = async () => {
    const response = await connect(node, body, abort.signal);
    const position = Number(response.headers.get("X-Queue-Position"));
    if (position) show(t("queued", { position }));
    for await (const { data, id } of readEvents(response, hear)) {
      if (data === "[DONE]") break;
      take(node, JSON.parse(data));
      if (id) node.stream = id;
      lost = 0;
      due ??= setTimeout(update, pause_ms);
    }
    if (!node.end) throw new Error();
  };
  const isLost = error => !(error instanceof ServerError) || error.code === "unreachable";
  try {
    for (;;) {
      try { await read(); break; } catch (error) {
        if (left || abort.signal.aborted || !node.stream || !isLost(error) || ++lost > RETRIES) throw error;
        watchHealth();
        await new Promise(resolve => setTimeout(resolve, RETRY_MS));
      }
    }
  } catch (error) {
    if (left) return;  // what there is was left behind
    const gone = isLost(error) || (error.status === 404 && node.stream);
    if (abort.signal.aborted) node.stopped = true;
    else node.error = gone && node.content ? t("lost_inside") : error instanceof ServerError ? error.message : t("lost");
    if (!abort.signal.aborted) watchHealth();
  } finally {
    clearTimeout(due);
    clearInterval(quiet);
  }
  node.revision++;
  delete node.stream;
  running.delete(conversation.id);
  const { [conversation.id]: _, ...others } = own();
  sessionStorage.setItem(KEPT_OWN, JSON.stringify(others));
  await keep(conversation);
}

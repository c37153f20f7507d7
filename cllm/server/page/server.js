// Server: requests to the server that this page is from, with the visitor's API key.
import { $, show } from "./dom.js";
import { t } from "./language.js";
import { watchHealth } from "./health.js";

const KEPT = "cllm.key";
let key = sessionStorage.getItem(KEPT) || localStorage.getItem(KEPT) || "";
let asking = null;

export class ServerError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// One dialogue for all requests that wait for a key; resolves with whether one was entered.
export function askForKey(why) {
  asking ||= (async () => {
    $("key-why").textContent = why;
    $("key-input").value = key;
    $("key-keep").checked = Boolean(localStorage.getItem(KEPT));
    const entered = await show($("key-dialog")) === "ok";
    if (entered) {
      key = $("key-input").value.trim();
      sessionStorage.setItem(KEPT, key);
      if ($("key-keep").checked && key) localStorage.setItem(KEPT, key);
      else localStorage.removeItem(KEPT);
    }
    $("key-input").value = "";
    asking = null;
    return entered;
  })();
  return asking;
}

export const authorization = () => key ? { Authorization: "Bearer " + key } : {};

// A response that is OK; asks for a key where the server wants one. Throws ServerError.
export async function ask(path, { method = "GET", body, signal, headers: more, quiet = false } = {}) {
  for (;;) {
    const sent = key;
    const headers = { ...authorization(), ...more, ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
    const content = body === undefined ? undefined : JSON.stringify(body);
    const answer = await fetch(path, { method, headers, signal, body: content }).catch(error => {
      if (signal?.aborted) throw error;
      watchHealth();
      throw new ServerError(0, "unreachable", t("unreachable"));
    });
    if (answer.ok) return answer;
    const error = await readError(answer);
    if (answer.status !== 401 || quiet) throw error;
    if (key === sent && !await askForKey(t(sent ? "key_wrong" : "key_wanted"))) throw error;
  }
}

async function readError(answer) {
  let found = {};
  try { found = await answer.json(); } catch { /* no JSON: the status must do */ }
  const inside = typeof found.error === "object" && found.error ? found.error : found;
  const line = `${answer.status} ${answer.statusText}`.trim();
  const message = answer.status === 413 ? t("too_large", { why: inside.message || line }) : inside.message || t("odd_answer", { status: line });
  return new ServerError(answer.status, inside.code || found.error || "", message);
}

// The server-sent events of a response: { name, data, id }. Calls `heard` with whatever comes, also comments.
export async function* readEvents(answer, heard = () => {}) {
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      text += decoder.decode(value, { stream: true });
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        let name = "", data = "", id = "";
        for (const line of text.slice(0, end).split("\n")) {
          if (line.startsWith("data: ")) data += line.slice(6);
          else if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("id: ")) id = line.slice(4);
        }
        if (data) yield { name, data, id };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

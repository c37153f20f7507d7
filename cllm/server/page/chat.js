// Chat: the conversation that is open, its composer, and the list of the others.
import { $, button, confirm, download, make } from "./dom.js";
import { t } from "./language.js";
import { Conversation } from "./conversation.js";
import { MessageView } from "./message.js";
import { fields, fillSettings, system } from "./settings.js";
import { ask, readEvents } from "./server.js";
import * as storage from "./storage.js";

// Between two updates of an answer that streams: at least, at most, and by what the last one took.
const MIN_MS = 100, MAX_MS = 1500, RESTED = 40;
const KEPT_MODEL = "cllm.model", KEPT_OPEN = "cllm.open";
let conversations = [], current = new Conversation(), views = new Map(), running = null;

// Answers ------------------------------------------------------------------------------------------

// Adds what an event brings to the answer.
function take(node, event) {
  if (event.error) throw new Error(event.error.message || String(event.error));
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

// Lets the model answer `parent`, in a new branch.
async function answer(parent) {
  let body;
  try {
    body = { model: $("model").value || undefined, messages: current.messages(parent, system()), stream: true,
      stream_options: { include_usage: true }, ...fields() };
  } catch (error) {
    notice(t("wrong_json", { why: error.message }));
    return;
  }
  notice("");
  const conversation = current, abort = new AbortController();
  const node = conversation.add(parent.id, { role: "assistant", content: "", model: body.model });
  running = { abort, node };
  render();
  const view = views.get(node.id);
  view.fillFoot(true);
  view.update(t("waiting"));
  let due = null, rest_ms = MIN_MS;
  const update = () => {
    const began = performance.now();
    stick(() => view.update(t("waiting")));
    rest_ms = Math.min(MAX_MS, Math.max(MIN_MS, RESTED * (performance.now() - began)));
    due = null;
  };
  try {
    const response = await ask("v1/chat/completions", { method: "POST", body, signal: abort.signal });
    const position = Number(response.headers.get("X-Queue-Position"));
    if (position) view.update(t("queued", { position }));
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") break;
      take(node, JSON.parse(data));
      due ??= setTimeout(update, rest_ms);
    }
    if (!node.end) throw new Error(t("lost"));
  } catch (error) {
    if (abort.signal.aborted) node.stopped = true;
    else node.error = error.message || t("lost");
  }
  clearTimeout(due);
  running = null;
  stick(() => { view.update(); view.fillFoot(); });
  showState();
  await keep(conversation);
  listConversations();
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  const last = current.path.at(-1), call = current.openCall;
  const message = call ? { role: "tool", content: text, callId: call.id } : { role: "user", content: text };
  if (!conversations.includes(current)) conversations.push(current);
  const node = current.add(last ? last.id : "", message);
  $("prompt").value = "";
  fit();
  const more = current.openCall;  // several calls: each has a result before the model goes on
  if (call && more) { render(); keep(current); return; }
  answer(node);
  $("messages").scrollTop = $("messages").scrollHeight;
}

const act = {
  edit(node, text) { if (!running) answer(current.add(node.parent, { role: "user", content: text })); },
  regenerate(node) { if (!running) answer(current.nodes[node.parent]); },
  choose(node, step) {
    current.choose(node);
    render();
    keep(current);
    const again = views.get(node.id).node.querySelector(step < 0 ? ".earlier" : ".later");
    (again.disabled ? views.get(node.id).node.querySelector(".branch button:not(:disabled)") : again)?.focus();
  },
};

// The page -----------------------------------------------------------------------------------------

// Changes the messages; who reads at the end stays there.
function stick(change) {
  const list = $("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  change();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

function render() {
  const path = current.path;
  views = new Map(path.map(node => [node.id, views.get(node.id) || new MessageView(current, node, act)]));
  for (const [id, view] of views) if (id !== running?.node.id) view.fillFoot(Boolean(running));
  const empty = make("div", { className: "empty" }, make("h1", {}, t("empty_title")), make("p", { className: "dim" }, t("empty_text")));
  $("messages").replaceChildren(...(path.length ? [...views.values()].map(view => view.node) : [empty]));
  $("messages").scrollTop = $("messages").scrollHeight;
  $("chat").classList.toggle("blank", !path.length);
  showState();
}

function showState() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  const call = running ? null : current.openCall;
  $("prompt").placeholder = call ? t("result_placeholder", { name: call.name }) : t("prompt_placeholder");
  for (const [id, view] of views) if (id !== running?.node.id) view.fillFoot(Boolean(running));
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function fit() {
  const input = $("prompt");
  input.style.height = "auto";
  input.style.height = Math.min(input.scrollHeight, innerHeight * 0.4) + "px";
}

async function keep(conversation) {
  localStorage.setItem(KEPT_OPEN, conversation.id);
  try { await storage.save(structuredClone(conversation.data)); } catch { notice(t("error_storage")); }
}

// The list -----------------------------------------------------------------------------------------

function listConversations() {
  conversations.sort((one, other) => other.updated - one.updated);
  $("conversations").replaceChildren(...conversations.map(each => make("li", { className: each === current ? "current" : "" },
    make("button", { type: "button", className: "title", ariaCurrent: each === current ? "true" : null, onclick: () => open(each) }, each.title || t("untitled")),
    button("down", t("export_one"), () => download(`cllm-${each.id}.json`, JSON.stringify(each.data, null, 2)), "icon export"),
    button("trash", t("delete"), () => forget(each), "icon delete"))));
  $("export").disabled = $("delete-all").disabled = !conversations.length;
}

function open(conversation) {
  running?.abort.abort();
  current = conversation;
  localStorage.setItem(KEPT_OPEN, conversation.id);
  views = new Map();
  render();
  listConversations();
  showList(false);
  $("prompt").focus();
}

async function forget(conversation) {
  if (!await confirm(t("delete_one", { title: conversation.title || t("untitled") }), t("delete"))) return;
  conversations = conversations.filter(each => each !== conversation);
  await storage.remove(conversation.id).catch(() => {});
  if (conversation === current) open(new Conversation());
  else listConversations();
}

async function forgetAll() {
  if (!await confirm(t("delete_every"), t("delete_all"))) return;
  conversations = [];
  await storage.removeAll().catch(() => {});
  open(new Conversation());
}

export function showList(shown) {
  $("history").classList.toggle("open", shown);
  $("menu").setAttribute("aria-expanded", shown);
}

async function listModels() {
  const { data } = await (await ask("v1/models")).json();
  const kept = localStorage.getItem(KEPT_MODEL);
  $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, selected: id === kept }, id)));
  $("model").classList.toggle("single", data.length < 2);
  $("model").disabled = data.length < 2;
}

function showSettings(shown) {
  $("settings").hidden = !shown;
  $("show-settings").setAttribute("aria-expanded", shown);
  if (shown) $("settings").querySelector("textarea").focus();
  else $("show-settings").focus();
}

export async function startChat() {
  fillSettings($("settings"), () => showSettings(false));
  $("show-settings").onclick = () => showSettings($("settings").hidden);
  $("composer").onsubmit = event => { event.preventDefault(); send(); };
  $("stop").onclick = () => running?.abort.abort();
  $("new-chat").onclick = () => open(new Conversation());
  $("delete-all").onclick = forgetAll;
  $("export").onclick = () => download("cllm-conversations.json", JSON.stringify(conversations.map(each => each.data), null, 2));
  $("model").onchange = () => localStorage.setItem(KEPT_MODEL, $("model").value);
  $("menu").onclick = () => showList(!$("history").classList.contains("open"));
  $("prompt").oninput = fit;
  $("prompt").onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !$("prompt").value && !running) {
      const last = current.path.findLast(node => node.role === "user");
      if (last) { event.preventDefault(); views.get(last.id).edit(); }
    }
  };
  $("chat").onkeydown = event => {
    if (event.key !== "Escape") return;
    if (running) running.abort.abort();
    else if (!$("settings").hidden) showSettings(false);
    else showList(false);
  };
  try {
    conversations = (await storage.loadAll()).map(data => new Conversation(data));
  } catch { notice(t("error_storage")); }
  const kept = localStorage.getItem(KEPT_OPEN);
  current = conversations.find(each => each.id === kept) || current;
  render();
  listConversations();
  await listModels().catch(error => notice(error.message));
}

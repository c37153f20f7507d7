// Chat: the conversation that is open, its composer, and what is said there of the server.
import { $, make } from "./dom.js";
import { count, digits, t } from "./language.js";
import { stream, unread } from "./answers.js";
import { settled, showAttached, startAttached } from "./attached.js";
import { Conversation } from "./conversation.js";
import { conversations, keep, running, startConversations } from "./conversations.js";
import { listConversations, startHistory } from "./history.js";
import { MessageView } from "./message.js";
import { readUrls } from "./pictures.js";
import { fields, startSettings, system, wrongField } from "./settings.js";
import { ask } from "./server.js";
import { attached, draft, keepAttached, keepDraft } from "./storage.js";

const KEPT_MODEL = "cllm.model", KEPT_OPEN = "cllm.open", FULL = 0.9;
const END_PX = 60;  // closer to the end than that is at the end
let current = new Conversation(), views = new Map(), atEnd = true, models = new Map();

// Whether the model takes pictures. One that is not loaded may.
const sees = () => { const model = models.get($("model").value); return !model || !model.loaded || model.capabilities.includes("vision"); };

// Answers ------------------------------------------------------------------------------------------

// Whether a request can be made of the settings; else the field that is wrong is shown.
function checkSettings() {
  const name = wrongField();
  if (!name) return true;
  showSettings(true);
  $("set-" + name).focus();
  $("set-" + name).closest("label").scrollIntoView({ block: "nearest" });
  notice(t("wrong_field", { field: t(name) }));
  return false;
}

// Lets the model answer `parent`, in a new branch, or go on with the answer `node`.
async function answer(parent, node) {
  const conversation = current, set = fields(), model = $("model").value || undefined, said = system(), last = node || parent;
  const body = async () => ({ model, messages: conversation.messages(last, said, await readUrls(conversation, conversation.way(last))), stream: true,
    stream_options: { include_usage: true }, ...set });
  notice("");
  if (node) for (const name of ["end", "error", "stopped", "stream"]) delete node[name];
  node ||= conversation.add(parent.id, { role: "assistant", content: "", model, json: Boolean(set.response_format) });
  await follow(conversation, node, body);
}

// Shows an answer to what `body` makes while it streams into `node`; without a body, the rest of one.
async function follow(conversation, node, body) {
  const show = (waiting = t("waiting")) => { if (conversation === current) views.get(node.id)?.update(waiting); };
  const done = stream(conversation, node, body, show);
  render();
  listConversations();
  await done;
  listConversations();
  if (models.get($("model").value)?.loaded === false) listModels().catch(() => {});
  if (conversation !== current) return;
  render();
  if (!document.activeElement.closest("input, textarea, select, summary, #history") && getSelection().isCollapsed) focusPrompt();
}

const makeQuestion = (content, pictures) => ({ role: "user", content, ...(pictures.length && { pictures }) });

async function send() {
  const { id } = current;
  await settled();
  if (id !== current.id) return;
  const text = $("prompt").value.trim(), last = current.path.at(-1), call = current.openCall, pictures = call ? [] : attached(current.id);
  if (!text && !pictures.length || running.has(current.id) || !checkSettings()) return;
  if (pictures.length && !sees()) { notice(t("no_pictures", { model: $("model").value })); return; }
  const message = call ? { role: "tool", content: text, callId: call.id } : makeQuestion(text, pictures);
  const node = current.add(last ? last.id : "", message);
  $("prompt").value = "";
  keepDraft(current.id, "");
  if (!call) keepAttached(current.id, []);
  fit();
  atEnd = true;
  const more = current.openCall;  // several calls: each has a result before the model goes on
  if (call && more) { render(); keep(current); } else answer(node);
}

const free = () => !running.has(current.id) && checkSettings();

const act = {
  edit(node, text, pictures) {
    if (!free()) return false;
    answer(current.add(node.parent, makeQuestion(text, pictures)));
    return true;
  },
  regenerate(node) { if (free()) answer(current.nodes[node.parent]); },
  goOn(node) { if (free()) answer(null, node); },
  choose(node, step) {
    current.choose(node);
    render();
    keep(current);
    const again = views.get(node.id).node.querySelector(step < 0 ? ".earlier" : ".later");
    (again.disabled ? views.get(node.id).node.querySelector(".branch button:not(:disabled)") : again)?.focus();
  },
};

// The page -----------------------------------------------------------------------------------------

// Keeps the end of the messages in view while they grow, unless the reader has scrolled away from it.
const grown = new ResizeObserver(() => { if (atEnd) $("messages").scrollTop = $("messages").scrollHeight; });

function render() {
  const path = current.path, streams = running.get(current.id)?.node;
  const before = views;
  views = new Map(path.map(node => [node.id, before.get(node.id) || new MessageView(current, node, act)]));
  for (const [id, view] of views) {
    if (view.message.role === "assistant" && (id === streams || view.live || view.revision !== view.message.revision)) view.update(id === streams ? t("waiting") : "");
    view.live = id === streams;
    view.fillFoot(Boolean(streams));
    grown.observe(view.node);
  }
  const empty = make("div", { className: "empty" }, make("h1", {}, t("empty_title")), make("p", { className: "dim" }, t("empty_text")));
  const nodes = path.length ? [...views.values()].map(view => view.node) : [empty];
  if (nodes.length !== $("messages").childElementCount || nodes.some((node, index) => node !== $("messages").children[index])) $("messages").replaceChildren(...nodes);
  $("chat").classList.toggle("blank", !path.length);
  $("send").hidden = Boolean(streams);
  $("stop").hidden = !streams;
  const call = streams ? null : current.openCall;
  $("prompt").placeholder = call ? t("result_placeholder", { name: call.name }) : t("prompt_placeholder");
  showAttached();
  showContext();
  if (atEnd) $("messages").scrollTop = $("messages").scrollHeight;
}

function showModel() {
  $("model").title = $("model").value;
  $("add-pictures").hidden = !models.size;
  showContext();
}

function showContext() {
  const limit = models.get($("model").value)?.context_length, { used } = current, shown = Boolean(used && limit);
  $("context").hidden = !shown;
  if (!shown) return;
  $("context").style.setProperty("--used", Math.min(1, used / limit));
  $("context").classList.toggle("wrong", used > FULL * limit);
  $("context").textContent = digits(100 * used / limit, 2) + " %";
  $("context").title = t("context_used", { used: count(used), limit: count(limit) });
}

function notice(text, kind = "wrong") {
  $("notice").textContent = text;
  $("notice").className = "notice " + kind;
  $("notice").hidden = !text;
}

function fit() {
  const input = $("prompt");
  input.style.height = "auto";
  input.style.height = Math.min(input.scrollHeight, innerHeight * 0.4) + "px";
}

// Not on a touch screen, where that opens a keyboard over the page.
function focusPrompt() {
  if (matchMedia("(pointer: coarse)").matches || $("chat").hidden || document.querySelector("dialog[open]")) return;
  $("prompt").focus();
}

// Shows what waits in the composer of a conversation, and in the list where it is a new one.
function drafted(conversation) {
  if (conversation.empty && (draft(conversation.id) || attached(conversation.id).length)) conversations.set(conversation.id, conversation);
  showAttached();
  listConversations();
}

function open(conversation) {
  current = conversation;
  sessionStorage.setItem(KEPT_OPEN, conversation.id);
  localStorage.setItem(KEPT_OPEN, conversation.id);
  views = new Map();
  atEnd = true;
  notice("");
  $("messages").replaceChildren();
  $("prompt").value = draft(conversation.id);
  fit();
  render();
  listConversations();
  showList(false);
  focusPrompt();
}

export function showList(shown) {
  $("history").classList.toggle("open", shown);
  $("menu").setAttribute("aria-expanded", shown);
}

function showSettings(shown) {
  $("settings").hidden = !shown;
  $("show-settings").setAttribute("aria-expanded", shown);
  if (shown) $("settings").querySelector("textarea").focus();
  else $("show-settings").focus();
}

async function listModels() {
  const { data } = await (await ask("v1/models")).json();
  const kept = localStorage.getItem(KEPT_MODEL);
  models = new Map(data.map(model => [model.id, model]));
  $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, selected: id === kept }, id)));
  $("model").classList.toggle("single", data.length < 2);
  $("model").disabled = data.length < 2;
  showModel();
}

// What other tabs, and the server, let us know.
function startEvents() {
  addEventListener("conversation", ({ detail: id }) => {
    if (id === current.id && current.gone) open(new Conversation());
    else if (id === current.id) { current = conversations.get(id) || current; render(); }
    listConversations();
  });
  addEventListener("unsaved", () => notice(t("error_storage")));
  addEventListener("health", ({ detail: state }) => {
    const well = state === "ready" || state === "sleeping";
    $("sign").hidden = well;
    if (!well) $("sign").textContent = t("health_" + state);
    else if (!models.size) listModels().catch(error => notice(error.message));
  });
  grown.observe($("messages"));
  $("messages").onclick = () => showList(false);
  $("messages").onscroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = $("messages");
    atEnd = scrollHeight - scrollTop - clientHeight < END_PX;
  };
}

function startKeys() {
  $("prompt").onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !$("prompt").value && !running.has(current.id)) {
      const last = current.path.findLast(node => node.role === "user");
      if (last) { event.preventDefault(); views.get(last.id).edit(); }
    }
  };
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || $("chat").hidden || document.querySelector("dialog[open]")) return;
    if (running.has(current.id)) running.get(current.id).stop();
    else if (!$("settings").hidden) showSettings(false);
    else showList(false);
  });
}

export async function startChat() {
  startSettings($("settings"), () => showSettings(false));
  startHistory({ get id() { return current.id; }, open, notice });
  startAttached({ get conversation() { return current; }, get sees() { return sees(); }, get model() { return $("model").value; }, notice, changed: drafted, focus: focusPrompt });
  startEvents();
  startKeys();
  $("show-settings").onclick = () => showSettings($("settings").hidden);
  $("composer").onsubmit = event => { event.preventDefault(); send(); };
  $("stop").onclick = () => running.get(current.id)?.stop();
  $("new-chat").onclick = () => open(new Conversation());
  $("model").onchange = () => { localStorage.setItem(KEPT_MODEL, $("model").value); showModel(); };
  $("menu").onclick = () => showList(!$("history").classList.contains("open"));
  $("prompt").oninput = () => {
    fit();
    try { keepDraft(current.id, $("prompt").value); } catch { notice(t("error_storage")); }
    if (current.empty) drafted(current);
  };
  await startConversations((id, text, old) => {
    if (id === current.id && $("prompt").value === old) { $("prompt").value = text; fit(); }  // else ours is another text
    listConversations();
  });
  const kept = sessionStorage.getItem(KEPT_OPEN) || localStorage.getItem(KEPT_OPEN);
  open($("prompt").value || attached(current.id).length ? current : conversations.get(kept) || new Conversation());
  for (const [conversation, node] of unread()) follow(conversation, node);
  await listModels().catch(error => notice(error.message));
}

// Message: one turn of a conversation on the page, and what can be done with it.
import { button, copy, make } from "./dom.js";
import { count, digits, duration, t } from "./language.js";
import { MarkdownView } from "./markdown.js";
import { makeTile } from "./pictures.js";
import { draft, keepDraft } from "./storage.js";

// What is known of an answer that has ended, in one line.
export function describeEnd(node) {
  const words = [];
  const { usage, timings } = node.end || {};
  if (timings?.predicted_per_second) words.push(t("speed", { value: digits(timings.predicted_per_second) }));
  if (usage) {
    words.push(t("tokens", { count: count(usage.completion_tokens) }));
    const cached = usage.prompt_tokens_details?.cached_tokens || 0;
    words.push(t("cached", { cached: count(cached), prompt: count(usage.prompt_tokens) }));
  }
  if (timings?.prompt_ms) words.push(t("first_token", { value: duration(timings.prompt_ms / 1000) }));
  if (node.model) words.push(node.model);
  if (node.stopped) words.unshift(t("stopped"));
  else if (isOpen(node)) words.unshift(t("interrupted"));
  else if (node.end?.reason === "length") words.unshift(t("cut"));
  return words.join(" · ");
}

const WHOLE = ["stop", "tool_calls"];

// The page was left before the answer had ended.
const isOpen = node => !node.end?.reason && !node.stopped && !node.error;

// `act` has what can be done: edit(node, text, pictures), regenerate(node), goOn(node), choose(node).
export class MessageView {
  constructor(conversation, node, act) {
    this.conversation = conversation;
    this.message = node;
    this.act = act;
    const name = { user: "you", assistant: "assistant", tool: "tool" }[node.role];
    this.body = make("div", { className: "body" });
    this.foot = make("div", { className: "foot" });
    this.node = make("article", { className: "message " + node.role, ariaLabel: t(name) }, this.body, this.foot);
    this.node.dataset.id = node.id;
    if (node.role === "assistant") this.fillAnswer();
    else this.fillText();
    if (node.pictures) this.node.prepend(make("div", { className: "pictures" }, ...node.pictures.map(picture => makeTile(conversation, picture))));
    this.fillFoot();
    if (node.role === "user" && draft(this.draft)) this.edit();
  }

  fillText() {
    const { content } = this.message;
    this.body.replaceChildren(...(content ? [make("div", { className: "plain" }, content)] : []));
  }

  get draft() { return `${this.conversation.id}/${this.message.id}`; }

  fillAnswer() {
    this.thoughts = make("pre", { className: "thoughts" });
    this.summary = make("summary", {});
    this.reasoning = make("details", { className: "reasoning", hidden: true }, this.summary, this.thoughts);
    this.markdown = new MarkdownView();
    this.calls = make("div", { className: "calls" });
    this.status = make("p", { className: "status", role: "status", hidden: true });
    this.body.append(this.reasoning, this.markdown.node, this.calls, this.status);
    this.update();
  }

  // Shows what the message holds now; `waiting` is the text while there is nothing, and the answer has not ended.
  update(waiting = "") {
    const { content = "", reasoning = "", calls = [], error, json } = this.message;
    this.revision = this.message.revision;
    this.reasoning.hidden = !reasoning;
    if (reasoning) {
      this.summary.textContent = t("reasoning_for", { count: count(reasoning.length) });
      if (this.thoughts.textContent !== reasoning) this.thoughts.textContent = reasoning;
    }
    this.markdown.set(content, !waiting, json);
    calls.forEach((call, index) => {
      const shown = this.calls.children[index] || this.calls.appendChild(make("details", { className: "call", open: true },
        make("summary", {}), make("pre", {})));
      shown.firstChild.textContent = t("calls", { name: call.name });
      shown.lastChild.textContent = pretty(call.text);
    });
    const text = error || (!content && !reasoning && !calls.length ? waiting : "");
    this.status.hidden = !text;
    this.status.textContent = text;
    this.status.classList.toggle("wrong", Boolean(error));
    this.status.classList.toggle("pulse", !error);
  }

  // The line below: figures of the answer, its actions, and its branches.
  fillFoot(running = false) {
    const { message, conversation, act } = this;
    const controls = [];
    const siblings = conversation.children(message.parent);
    if (siblings.length > 1) {
      const place = siblings.indexOf(message);
      const go = step => () => act.choose(siblings[place + step], step);
      controls.push(make("span", { className: "branch" },
        make("button", { type: "button", className: "icon earlier", title: t("earlier"), ariaLabel: t("earlier"), disabled: running || place === 0, onclick: go(-1) }, "‹"),
        make("span", {}, t("version", { index: place + 1, count: siblings.length })),
        make("button", { type: "button", className: "icon later", title: t("later"), ariaLabel: t("later"), disabled: running || place === siblings.length - 1, onclick: go(1) }, "›")));
    }
    if (!running && message.content) {
      const control = button("copy", t("copy"), () => copy(message.content, control, t("copied")), "icon copy");
      controls.push(control);
    }
    if (!running && message.role === "user") controls.push(button("edit", t("edit"), () => this.edit(), "icon edit"));
    if (!running && message.role === "assistant") {
      const cut = this.isCut;
      if (!cut || message.content || message.reasoning) controls.push(button("again", t("regenerate"), () => act.regenerate(message), "icon again"));
      if (cut) controls.push(this.makeContinue());
    }
    const words = message.role === "assistant" && !running ? describeEnd(message) : "";
    this.foot.replaceChildren(make("span", { className: "actions" }, ...controls), make("span", { className: "figures" }, words));
  }

  // It has not come to its end, and nothing follows on it.
  get isCut() {
    const { message, conversation } = this;
    return !conversation.chosen[message.id] && (message.stopped || message.error || isOpen(message) || !WHOLE.includes(message.end.reason));
  }

  // An answer goes on where it was cut. One under a schema, or in a call, must be made anew.
  makeContinue() {
    const { message, act } = this;
    const goesOn = !message.json && !message.calls?.length, begun = goesOn && (message.content || message.reasoning);
    const control = button(begun ? "right" : "again", t(begun ? "continue" : "try_again"), () => goesOn ? act.goOn(message) : act.regenerate(message), "chip continue");
    control.append(control.title);
    return control;
  }

  edit() {
    const input = make("textarea", { value: draft(this.draft) || this.message.content, ariaLabel: t("edit_placeholder"), className: "editing", rows: 3,
      oninput: () => keepDraft(this.draft, input.value) });
    const pictures = new Map((this.message.pictures || []).map(picture => [picture, makeTile(this.conversation, picture, () => {
      pictures.get(picture).remove();
      pictures.delete(picture);
    })]));
    const leave = () => {
      keepDraft(this.draft, "");
      this.fillText();
      this.node.classList.remove("edited");
      this.foot.hidden = false;
    };
    const done = () => {
      const text = input.value.trim();
      if (!text && !pictures.size) leave();
      else if (this.act.edit(this.message, text, [...pictures.keys()])) leave();
    };
    input.onkeydown = event => {
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
    };
    this.node.classList.add("edited");
    this.foot.hidden = true;
    this.body.replaceChildren(make("div", { className: "attached" }, ...pictures.values()), input, make("div", { className: "row choices" },
      make("button", { type: "button", className: "primary", onclick: done }, t("save")),
      make("button", { type: "button", className: "quiet", onclick: leave }, t("cancel"))));
    if (input.scrollHeight) input.style.height = input.scrollHeight + 2 + "px";
    input.focus();
  }
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

// Conversation: a tree of messages. An edited question and a regenerated answer are new branches of it.
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), byte => byte.toString(16).padStart(2, "0")).join("");

export class Conversation {
  constructor(data = {}) {
    this.id = data.id || newId();
    this.title = data.title || "";
    this.updated = data.updated || Date.now();
    this.nodes = data.nodes || {};  // by id: { id, parent, role, content, … }
    this.chosen = data.chosen || {};  // by parent ("" for none): the id of the child that is shown
  }

  get data() {
    const { id, title, updated, nodes, chosen } = this;
    return { id, title, updated, nodes, chosen };
  }

  get empty() { return !Object.keys(this.nodes).length; }

  children(parent) { return Object.values(this.nodes).filter(node => node.parent === parent); }

  // The messages that are shown, first to last.
  get path() {
    const found = [];
    for (let id = this.chosen[""]; id; id = this.chosen[id]) found.push(this.nodes[id]);
    return found;
  }

  add(parent, message) {
    const node = { id: newId(), parent, ...message };
    this.nodes[node.id] = node;
    this.chosen[parent] = node.id;
    this.updated = Date.now();
    if (!this.title && node.role === "user") this.title = node.content.replace(/\s+/g, " ").trim().slice(0, 80);
    return node;
  }

  choose(node) { this.chosen[node.parent] = node.id; }

  // The messages up to a node, as the API takes them. Reasoning is not repeated.
  messages(last, system) {
    const found = [];
    for (let node = last; node; node = this.nodes[node.parent]) found.unshift(node);
    const sent = found.filter(node => node.content || node.calls?.length).map(node => {
      if (node.role === "tool") return { role: "tool", content: node.content, tool_call_id: node.callId };
      if (!node.calls?.length) return { role: node.role, content: node.content };
      const calls = node.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
      return { role: "assistant", content: node.content || null, tool_calls: calls };
    });
    return system ? [{ role: "system", content: system }, ...sent] : sent;
  }

  // The first tool call of the last answer that has no result.
  get openCall() {
    const path = this.path;
    const answered = new Set();
    for (const node of path.reverse()) {
      if (node.role === "tool") answered.add(node.callId);
      else return node.role === "assistant" ? (node.calls || []).find(call => !answered.has(call.id)) : undefined;
    }
    return undefined;
  }
}

// Conversation: a tree of messages. An edited question and a regenerated answer are new branches of it.
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), byte => byte.toString(16).padStart(2, "0")).join("");

const isText = value => typeof value === "string";
const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);
const isId = value => isText(value) && /^[0-9a-f]{16}$/.test(value);  // as `newId` makes them

const isSize = value => Number.isInteger(value) && value > 0;
const isPicture = value => isObject(value) && isId(value.id) && isText(value.name) && isSize(value.width) && isSize(value.height);

// True where every message leads to a first one.
function hasNoCycle(nodes) {
  const ended = new Set();
  for (const id of Object.keys(nodes)) {
    const way = new Set();
    for (let at = id; nodes[at] && !ended.has(at); at = nodes[at].parent) {
      if (way.has(at)) return false;
      way.add(at);
    }
    for (const each of way) ended.add(each);
  }
  return true;
}

export class Conversation {
  constructor(data = {}) {
    this.id = data.id || newId();
    this.title = data.title || "";
    this.updated = data.updated || Date.now();
    this.revision = data.revision || 0;  // of title and choices; a message has one of its own
    this.nodes = Object.assign(Object.create(null), data.nodes);  // by id: { id, parent, role, content, pictures, … }
    this.chosen = data.chosen || {};  // by parent ("" for none): the id of the child that is shown
  }

  get data() {
    const { id, title, updated, revision, nodes, chosen } = this;
    return { id, title, updated, revision, nodes, chosen };
  }

  // One from a file, whose content is of any kind; undefined where it is no conversation.
  static read(data) {
    const good = node => isObject(node) && isId(node.id) && (node.parent === "" || isId(node.parent)) && isText(node.content) && ["user", "assistant", "tool"].includes(node.role)
      && isText(node.reasoning ?? "") && isText(node.error ?? "") && Array.isArray(node.calls ?? [])
      && Array.isArray(node.pictures ?? []) && (node.pictures || []).every(isPicture)
      && (node.calls || []).every(call => isObject(call) && isText(call.id) && isText(call.name) && isText(call.text));
    if (!isObject(data) || !isId(data.id) || !isText(data.title ?? "") || !isObject(data.nodes) || !isObject(data.chosen)) return undefined;
    if (!Object.entries(data.nodes).every(([id, node]) => good(node) && node.id === id)) return undefined;
    if (!hasNoCycle(data.nodes) || !Object.entries(data.chosen).every(([parent, id]) => (parent === "" || isId(parent)) && isId(id))) return undefined;
    return new Conversation({ ...data, updated: Number(data.updated) || 0, revision: Number(data.revision) || 0 });
  }

  get empty() { return !Object.keys(this.nodes).length; }

  children(parent) { return Object.values(this.nodes).filter(node => node.parent === parent); }

  // The messages that are shown, first to last.
  get path() {
    const found = [];
    for (let last = "", node; (node = this.nodes[this.chosen[last]])?.parent === last; last = node.id) found.push(node);
    return found;
  }

  // The messages up to a node, first to last.
  way(last) {
    const found = [];
    for (let node = last; node; node = this.nodes[node.parent]) found.unshift(node);
    return found;
  }

  // Tokens of context that the last answer took with all before it.
  get used() {
    const { prompt_tokens: prompt = 0, completion_tokens: answer = 0 } = this.path.findLast(node => node.end?.usage)?.end.usage || {};
    return prompt + answer;
  }

  add(parent, message) {
    const node = { id: newId(), parent, revision: 0, ...message };
    this.nodes[node.id] = node;
    this.choose(node);
    this.updated = Date.now();
    if (!this.title && node.role === "user") this.title = node.content.replace(/\s+/g, " ").trim().slice(0, 80);
    return node;
  }

  choose(node) {
    this.chosen[node.parent] = node.id;
    this.revision++;
  }

  rename(title) {
    this.title = title;
    this.revision++;
  }

  // Takes what is newer in another state of the same conversation: messages of both are kept.
  take(data) {
    for (const node of Object.values(data.nodes)) {
      const mine = this.nodes[node.id] ||= node;
      if (mine === node || !((node.revision || 0) > (mine.revision || 0))) continue;
      const { parent } = mine;  // a message stays where it is: two trees could make a cycle
      for (const name of Object.keys(mine)) delete mine[name];
      Object.assign(mine, node, { parent });
    }
    const newer = (data.revision || 0) > this.revision;
    this.chosen = newer ? { ...this.chosen, ...data.chosen } : { ...data.chosen, ...this.chosen };
    if (newer) [this.title, this.revision] = [data.title, data.revision];
    this.updated = Math.max(this.updated, data.updated || 0);
    return this;
  }

  // The messages up to a node, as the API takes them, with the data URLs of their pictures by id. Reasoning is not
  // repeated, but for an answer that goes on.
  messages(last, system, urls) {
    const sent = this.way(last).filter(node => node.content || node.pictures || node.calls?.length || (node === last && node.reasoning)).map(node => {
      if (node.role === "tool") return { role: "tool", content: node.content, tool_call_id: node.callId };
      if (node.pictures) {
        const seen = node.pictures.filter(({ id }) => urls.has(id)).map(({ id }) => ({ type: "image_url", image_url: { url: urls.get(id) } }));
        return { role: node.role, content: [...seen, ...(node.content ? [{ type: "text", text: node.content }] : [])] };
      }
      if (!node.calls?.length) return { role: node.role, content: node.content, ...(node === last && node.reasoning ? { reasoning_content: node.reasoning } : {}) };
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

// Conversations: those of this browser, and which of them an answer streams into, alike in all of its tabs.
import { Conversation } from "./conversation.js";
import * as storage from "./storage.js";

export const conversations = new Map();  // by id
export const running = new Map();  // by conversation: { node, stop, own }; an answer of another tab is not our own
const channel = new BroadcastChannel("cllm");
const changed = id => dispatchEvent(new CustomEvent("conversation", { detail: id }));

export const find = id => conversations.get(id) || conversations.set(id, new Conversation({ id })).get(id);

function announce(id) {
  const { own, node } = running.get(id) || {};
  channel.postMessage({ id, node: own ? node : null });
}

export async function keep(conversation) {
  if (conversation.gone) return;
  conversations.set(conversation.id, conversation);
  try { await storage.save(conversation.data); } catch { dispatchEvent(new Event("unsaved")); }
  if (!conversation.gone) announce(conversation.id);
}

function drop(id) {
  const conversation = conversations.get(id);
  if (conversation) conversation.gone = true;
  if (running.get(id)?.own) running.get(id).stop();
  conversations.delete(id);
  running.delete(id);
  storage.forgetDrafts(id);
  changed(id);
}

// Forgets one, or all of them.
export async function forget(id) {
  for (const each of id ? [id] : [...conversations.keys()]) { drop(each); channel.postMessage({ id: each, gone: true }); }
  await (id ? storage.remove(id) : storage.removeAll()).catch(() => {});
}

async function hear({ hello, id, node, stop, gone }) {
  const now = running.get(id);
  if (hello) for (const [each, { own }] of running) { if (own) announce(each); }
  if (!id) return;
  if (gone) { drop(id); await storage.remove(id).catch(() => {}); return; }  // after what this tab may be saving
  if (stop) { if (now?.own) now.stop(); return; }
  if (!now?.own) {
    const free = () => { channel.postMessage({ id, stop: true }); running.delete(id); changed(id); };  // its tab may be dead
    if (node) running.set(id, { node, stop: free });
    else running.delete(id);
  }
  const conversation = find(id), data = await storage.load(id).catch(() => undefined);
  if (conversation.gone) return;
  if (data) conversation.take(data);
  changed(id);
}

function takeLeft() {
  for (const data of storage.takeLeft()) {
    if (!running.get(data.id)?.own) running.delete(data.id);
    keep(find(data.id).take(data));
    changed(data.id);
  }
}

export async function startConversations(drafted) {
  channel.onmessage = ({ data }) => hear(data);
  storage.watch((id, text, old) => { if (text && !id.includes("/")) find(id); drafted(id, text, old); }, id => { if (storage.attached(id).length) find(id); changed(id); }, takeLeft);
  addEventListener("pagehide", () => {
    for (const [id, { own, node }] of running) {
      if (!own) continue;
      const { data, nodes } = conversations.get(id), { parent } = nodes[node];
      storage.leave({ ...data, nodes: { [node]: nodes[node], [parent]: nodes[parent] } });
    }
  });
  try {
    for (const data of await storage.loadAll()) conversations.set(data.id, new Conversation(data));
  } catch { dispatchEvent(new Event("unsaved")); }
  for (const id of storage.drafts()) find(id);
  takeLeft();
  channel.postMessage({ hello: true });
}

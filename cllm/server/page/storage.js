// Storage: what this browser keeps for all of its tabs. Conversations are in its IndexedDB; what is typed, and
// what a page had of an answer when it was left, in its localStorage, which is written at once.
import { Conversation } from "./conversation.js";

const DRAFT = "cllm.draft.", LEFT = "cllm.left.";
const open = new Promise((done, failed) => {
  const asked = indexedDB.open("cllm", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", { keyPath: "id" });
  asked.onsuccess = () => done(asked.result);
  asked.onerror = () => failed(asked.error);
});
open.catch(() => {});

async function run(mode, act) {
  const database = await open;
  return new Promise((done, failed) => {
    const transaction = database.transaction("conversations", mode);
    const asked = act(transaction.objectStore("conversations"));
    transaction.oncomplete = () => done(asked.result);
    transaction.onerror = transaction.onabort = () => failed(transaction.error);
  });
}

export const loadAll = () => run("readonly", store => store.getAll());
export const load = id => run("readonly", store => store.get(id));
export const remove = id => run("readwrite", store => store.delete(id));
export const removeAll = () => run("readwrite", store => store.clear());

// Stores a conversation; what other tabs have stored of it stays.
export const save = data => run("readwrite", store => {
  const asked = store.get(data.id);
  asked.onsuccess = () => store.put(new Conversation(asked.result || data).take(data).data);
  return asked;
});

const keys = prefix => Object.keys(localStorage).filter(key => key.startsWith(prefix));

// What is typed and not sent yet, by conversation, or by conversation/message where one is edited.
export const draft = id => localStorage.getItem(DRAFT + id) || "";
export const drafts = () => keys(DRAFT).map(key => key.slice(DRAFT.length)).filter(id => !id.includes("/"));

export function keepDraft(id, text) {
  if (text) localStorage.setItem(DRAFT + id, text);
  else localStorage.removeItem(DRAFT + id);
}

export function forgetDrafts(id = "") {
  for (const key of keys(DRAFT + id)) localStorage.removeItem(key);
}

// A page that is left cannot wait for IndexedDB.
export function leave(data) {
  try { localStorage.setItem(LEFT + data.id, JSON.stringify(data)); } catch { /* full: what was saved last must do */ }
}

export function takeLeft() {
  return keys(LEFT).flatMap(key => {
    const text = localStorage.getItem(key);
    localStorage.removeItem(key);
    return text ? [JSON.parse(text)] : [];
  });
}

// Calls with what another tab has changed: the draft of an id, from an old text, or something that it left.
export function watch(drafted, left) {
  addEventListener("storage", ({ key, newValue, oldValue }) => {
    if (key?.startsWith(DRAFT)) drafted(key.slice(DRAFT.length), newValue || "", oldValue || "");
    else if (key?.startsWith(LEFT) && newValue) left();
  });
}

// Storage: what this browser keeps for all of its tabs. Conversations and the files of their pictures are in its
// IndexedDB; what is typed and attached, and what a page had of an answer when it was left, in its localStorage,
// which is written at once.
import { Conversation } from "./conversation.js";

const DRAFT = "cllm.draft.", ATTACHED = "cllm.attached.", LEFT = "cllm.left.";

// One store of a database of its own: a version that adds a store need not wait for tabs of an older one.
function open(name, store, options) {
  const opened = new Promise((done, failed) => {
    const asked = indexedDB.open(name, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(store, options);
    asked.onsuccess = () => done(asked.result);
    asked.onerror = () => failed(asked.error);
  });
  opened.catch(() => {});
  return async (mode, act) => {
    const database = await opened;
    return new Promise((done, failed) => {
      const transaction = database.transaction(store, mode);
      const asked = act(transaction.objectStore(store));
      transaction.oncomplete = () => done(asked.result);
      transaction.onerror = transaction.onabort = () => failed(transaction.error);
    });
  };
}

const run = open("cllm", "conversations", { keyPath: "id" });
const runFiles = open("cllm.pictures", "files");  // by conversation/picture

export const loadAll = () => run("readonly", store => store.getAll());
export const load = id => run("readonly", store => store.get(id));

export async function remove(id) {
  await run("readwrite", store => store.delete(id));
  await runFiles("readwrite", store => store.delete(IDBKeyRange.bound(id + "/", id + "0", false, true)));  // "0" follows "/"
}

export async function removeAll() {
  await run("readwrite", store => store.clear());
  await runFiles("readwrite", store => store.clear());
}

// Stores a conversation; what other tabs have stored of it stays.
export const save = data => run("readwrite", store => {
  const asked = store.get(data.id);
  asked.onsuccess = () => store.put(new Conversation(asked.result || data).take(data).data);
  return asked;
});

export const loadFile = key => runFiles("readonly", store => store.get(key));
export const saveFile = (key, blob) => runFiles("readwrite", store => store.put(blob, key));
export const removeFile = key => runFiles("readwrite", store => store.delete(key));

const keys = prefix => Object.keys(localStorage).filter(key => key.startsWith(prefix));

// What is typed and not sent yet, by conversation, or by conversation/message where one is edited.
export const draft = id => localStorage.getItem(DRAFT + id) || "";
export const drafts = () => [DRAFT, ATTACHED].flatMap(prefix => keys(prefix).map(key => key.slice(prefix.length))).filter(id => !id.includes("/"));

export function keepDraft(id, text) {
  if (text) localStorage.setItem(DRAFT + id, text);
  else localStorage.removeItem(DRAFT + id);
}

// The pictures that wait beside it.
export const attached = id => JSON.parse(localStorage.getItem(ATTACHED + id) || "[]");

export function keepAttached(id, pictures) {
  if (pictures.length) localStorage.setItem(ATTACHED + id, JSON.stringify(pictures));
  else localStorage.removeItem(ATTACHED + id);
}

export function forgetDrafts(id = "") {
  for (const key of [...keys(DRAFT + id), ...keys(ATTACHED + id)]) localStorage.removeItem(key);
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

// Calls with what another tab has changed: the draft of an id, from an old text, its pictures, or something that it left.
export function watch(drafted, attachedTo, left) {
  addEventListener("storage", ({ key, newValue, oldValue }) => {
    if (key?.startsWith(DRAFT)) drafted(key.slice(DRAFT.length), newValue || "", oldValue || "");
    else if (key?.startsWith(ATTACHED)) attachedTo(key.slice(ATTACHED.length));
    else if (key?.startsWith(LEFT) && newValue) left();
  });
}

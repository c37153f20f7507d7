// Storage: conversations in this browser's IndexedDB. Where that is closed to us, they last as long as the page.
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
export const save = conversation => run("readwrite", store => store.put(conversation));
export const remove = id => run("readwrite", store => store.delete(id));
export const removeAll = () => run("readwrite", store => store.clear());

// History: the list of conversations, to search, rename, export, import and delete.
import { $, button, confirm, download, make } from "./dom.js";
import { count, t } from "./language.js";
import { Conversation } from "./conversation.js";
import { conversations, find, forget, keep, running } from "./conversations.js";
import { exportPictures, importPictures, parsePictures } from "./pictures.js";
import { attached, draft } from "./storage.js";

let opened, renaming = null;  // { id: of the one that is open, open(conversation), notice(text) }

const listed = () => [...conversations.values()].filter(each => !each.empty || draft(each.id) || attached(each.id).length).sort((one, other) => other.updated - one.updated);
const nameOf = each => each.title || draft(each.id).trim().slice(0, 80) || t(each.empty && !attached(each.id).length ? "untitled" : "picture");

function matches(conversation, words) {
  if (!words.length) return true;
  const texts = [nameOf(conversation), ...Object.values(conversation.nodes).map(node => node.content)].map(text => text.toLowerCase());
  return words.every(word => texts.some(text => text.includes(word)));
}

export function listConversations() {
  if (renaming) return;  // its field is in the list
  const found = listed(), words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = found.filter(each => matches(each, words));
  const focus = document.activeElement?.closest("#conversations li") && [document.activeElement.closest("li").dataset.id, document.activeElement.classList[0]];
  $("conversations").replaceChildren(...(shown.length || !words.length ? shown.map(item) : [make("li", { className: "dim none" }, t("found_none"))]));
  if (focus) $("conversations").querySelector(`[data-id="${CSS.escape(focus[0])}"] .${focus[1]}`)?.focus();
  $("search").hidden = found.length < 2 && !words.length;
  $("export").disabled = $("delete-all").disabled = !found.length;
}

const write = async each => JSON.stringify(await exportPictures(each), null, 2);

function item(each) {
  const current = each.id === opened.id, marks = [current && "current", running.has(each.id) && "running", each.empty && "unsent"];
  return make("li", { className: marks.filter(Boolean).join(" "), "data-id": each.id },
    make("button", { type: "button", className: "title", title: nameOf(each), ariaCurrent: current ? "true" : null, onclick: () => opened.open(each) }, nameOf(each)),
    each.empty ? null : button("edit", t("rename"), event => rename(each, event.currentTarget.parentNode), "rename icon"),
    each.empty ? null : button("down", t("export_one"), async () => download(`cllm-${each.id}.json`, [await write(each)]), "export icon"),
    button("trash", t("delete"), () => remove(each), "delete icon"));
}

function rename(conversation, place) {
  const input = make("input", { value: nameOf(conversation), ariaLabel: t("rename"), maxLength: 200 });
  const end = kept => {
    if (renaming !== input) return;
    renaming = null;
    if (kept && input.value.trim()) { conversation.rename(input.value.trim()); keep(conversation); }
    listConversations();
    $("conversations").querySelector(`[data-id="${CSS.escape(conversation.id)}"] .title`)?.focus();
  };
  input.onkeydown = event => {
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
    if (event.key === "Enter" && !event.isComposing) end(true);
  };
  input.onblur = () => end(true);
  renaming = input;
  place.replaceChildren(input);
  input.select();
}

async function remove(conversation) {
  if (await confirm(t("delete_one", { title: nameOf(conversation) }), t("delete"))) await forget(conversation.id);
}

// A part each: all of them may be longer than a text can be.
async function writeAll() {
  const parts = [];
  for (const each of listed().filter(each => !each.empty)) parts.push(parts.length ? ",\n" : "[", await write(each));
  return [...parts, "]"];
}

// What `export` has written, of this browser or another one. What is here already stays.
async function importFile(file) {
  let found = [], files = [];
  try {
    const read = [JSON.parse(await file.text())].flat();
    files = read.map(parsePictures);
    found = read.map(Conversation.read);
  } catch { /* nothing is found */ }
  if (!found.length || found.includes(undefined)) { opened.notice(t("import_wrong", { name: file.name })); return; }
  for (const [index, each] of found.entries()) {
    await importPictures(each, files[index]);
    await keep(find(each.id).take(each.data));
  }
  opened.open(conversations.get(found[0].id));
  opened.notice(t("imported", { count: count(found.length) }), "good");
}

export function startHistory(chat) {
  opened = chat;
  $("search").oninput = listConversations;
  $("search").onkeydown = event => { if (event.key === "Escape" && $("search").value) event.stopPropagation(); };
  $("export").onclick = async () => download("cllm-conversations.json", await writeAll());
  $("import").onclick = () => $("import-file").click();
  $("import-file").onchange = async () => {
    for (const file of $("import-file").files) await importFile(file);
    $("import-file").value = "";
  };
  $("delete-all").onclick = async () => { if (await confirm(t("delete_every"), t("delete_all"))) await forget(); };
}

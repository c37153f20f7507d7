// Attached: the pictures beside the message that is typed, by button, paste or drop.
import { $ } from "./dom.js";
import { t } from "./language.js";
import { addPictures, forgetPicture, makeTile } from "./pictures.js";
import { attached, keepAttached } from "./storage.js";

let chat, shown = "", tiles = new Map();  // { conversation, sees, model, notice(text), changed(conversation), focus() }
let adding = Promise.resolve();

// Ends when all that was chosen, pasted or dropped is attached or refused.
export const settled = () => adding;

export function showAttached() {
  const { conversation } = chat, pictures = attached(conversation.id), now = [conversation.id, ...pictures.map(({ id }) => id)].join();
  if (now === shown) return;
  shown = now;
  tiles = new Map(pictures.map(picture => [picture.id, tiles.get(picture.id) || makeTile(conversation, picture, () => remove(conversation, picture))]));
  $("attached").replaceChildren(...tiles.values());
  $("attached").hidden = !pictures.length;
}

function remove(conversation, picture) {
  keepAttached(conversation.id, attached(conversation.id).filter(({ id }) => id !== picture.id));
  forgetPicture(conversation, picture);
  chat.notice("");
  chat.changed(conversation);
}

function add(files) {
  const { conversation, model } = chat;
  chat.notice(chat.sees ? "" : t("no_pictures", { model }));
  if (!chat.sees) return;
  adding = adding.then(async () => {
    const others = [{ pictures: attached(conversation.id) }, ...conversation.path].flatMap(node => node.pictures || []).length;
    const wrong = await addPictures(conversation, files, others, picture => {
      keepAttached(conversation.id, [...attached(conversation.id), picture]);
      chat.changed(conversation);
    });
    if (wrong) chat.notice(wrong);
  }).catch(() => chat.notice(t("error_storage")));
}

const isShown = () => !$("chat").hidden && !document.querySelector("dialog[open]");
const carriesFiles = event => event.dataTransfer.types.includes("Files");
const mark = shown => $("composer").classList.toggle("dropping", shown);

export function startAttached(given) {
  chat = given;
  $("add-pictures").onclick = () => $("picture-files").click();
  $("picture-files").onchange = () => {
    add([...$("picture-files").files]);
    $("picture-files").value = "";
    chat.focus();
  };
  document.addEventListener("paste", event => {
    const { files, types } = event.clipboardData;
    const isText = types.includes("text/html") && types.includes("text/plain");  // of an office program, with a picture of it
    if (!files.length || isText || !isShown()) return;
    event.preventDefault();
    add([...files]);
  });
  // A file that is dropped elsewhere would replace the page.
  document.addEventListener("dragover", event => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = isShown() ? "copy" : "none";
    mark(isShown() && chat.sees);
  });
  document.addEventListener("dragleave", event => { if (!event.relatedTarget) mark(false); });
  document.addEventListener("drop", event => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(false);
    if (isShown()) { add([...event.dataTransfer.files]); chat.focus(); }
  });
}

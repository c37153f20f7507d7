// Attached: the pictures beside the message that is typed, by button, paste or drop. Files of text go into the message.
import { $ } from "./dom.js";
import { t } from "./language.js";
import { addPictures, forgetPicture, makeTile } from "./pictures.js";
import { attached, keepAttached } from "./storage.js";

const MAX_TEXT_BYTES = 256 << 10, NO_TEXT = /^(image|audio|video)\/|\/pdf$/;
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

// Puts a file into the message, fenced, under its name; false where it is no text, or too long.
async function addText(conversation, file) {
  if (NO_TEXT.test(file.type) || file.size > MAX_TEXT_BYTES) return false;
  const text = await file.arrayBuffer().then(data => new TextDecoder("utf-8", { fatal: true }).decode(data)).catch(() => "\0");
  if (text.includes("\0") || conversation !== chat.conversation) return false;
  const fence = "`".repeat(Math.max(2, ...(text.match(/`{3,}/g) || []).map(run => run.length)) + 1), prompt = $("prompt");
  prompt.value = `${prompt.value && prompt.value.trimEnd() + "\n\n"}${file.name}\n${fence}\n${text.trimEnd()}\n${fence}\n\n`;
  return prompt.dispatchEvent(new Event("input"));
}

function add(files) {
  const { conversation, model } = chat;
  chat.notice("");
  adding = adding.then(async () => {
    const rest = [];
    for (const file of files) if (!await addText(conversation, file)) rest.push(file);
    const isPicture = rest.some(({ type }) => type.startsWith("image/")), names = rest.map(({ name }) => name).join(", ");
    if (!chat.sees) return chat.notice(rest.length ? t(isPicture ? "no_pictures" : "picture_type", { model, names }) : "");
    const others = [{ pictures: attached(conversation.id) }, ...conversation.path].flatMap(node => node.pictures || []).length;
    const wrong = await addPictures(conversation, rest, others, picture => {
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
    mark(isShown());
  });
  document.addEventListener("dragleave", event => { if (!event.relatedTarget) mark(false); });
  document.addEventListener("drop", event => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(false);
    if (isShown()) { add([...event.dataTransfer.files]); chat.focus(); }
  });
}

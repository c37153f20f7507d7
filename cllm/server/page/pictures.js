// Pictures: files that belong to a conversation. Its messages, and what is not sent yet, name them: { id, name, width, height }.
import { button, make, show } from "./dom.js";
import { bytes, count, t } from "./language.js";
import { newId } from "./conversation.js";
import { loadFile, removeFile, saveFile } from "./storage.js";

// As the server has them (docs/limits.md).
const TYPES = ["image/jpeg", "image/png", "image/webp", "image/gif"];
const MAX_PICTURES = 32, MAX_BYTES = 20 << 20, MAX_PIXELS = 1 << 26;
const THUMBNAIL_PX = 480;  // of the longer side
const DATA_URL = new RegExp(`^data:(${TYPES.join("|")});base64,`);
const unsaved = new Map();  // by key: files that this browser does not keep
let drawn = Promise.resolve();  // one after the other: a photograph takes 50 MB while it is decoded

const keyOf = (conversation, { id }) => `${conversation.id}/${id}`;
const load = async key => unsaved.get(key) || await loadFile(key).catch(() => undefined);

async function save(key, blob) {
  try { await saveFile(key, blob); } catch { unsaved.set(key, blob); dispatchEvent(new Event("unsaved")); }
}

export async function forgetPicture(conversation, picture) {
  unsaved.delete(keyOf(conversation, picture));
  await removeFile(keyOf(conversation, picture)).catch(() => {});
}

// Why a file cannot be a picture here, beside `others`; else its size in pixels.
async function measure(file, others) {
  if (!TYPES.includes(file.type)) return { wrong: "type" };
  if (file.size > MAX_BYTES) return { wrong: "bytes" };
  if (others >= MAX_PICTURES) return { wrong: "number" };
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return { wrong: "broken" };
  const { width, height } = bitmap;
  bitmap.close();
  return width * height > MAX_PIXELS ? { wrong: "pixels" } : { width, height };
}

// Keeps files as pictures of a conversation that has `others` in a request; calls `add` with each. Returns what
// is wrong with those that it refuses, as a text.
export async function addPictures(conversation, files, others, add) {
  const refused = new Map(), limits = { bytes: bytes(MAX_BYTES), number: count(MAX_PICTURES), pixels: count(MAX_PIXELS) };
  for (const file of files) {
    const { wrong, width, height } = await measure(file, others);
    if (wrong) { refused.set(wrong, [...refused.get(wrong) || [], file.name]); continue; }
    const picture = { id: newId(), name: file.name, width, height };
    await save(keyOf(conversation, picture), file.slice(0, file.size, file.type));
    if (conversation.gone) { await forgetPicture(conversation, picture); break; }
    others++;
    add(picture);
  }
  return [...refused].map(([wrong, names]) => t("picture_" + wrong, { names: names.join(", "), limit: limits[wrong] })).join(" ");
}

const readUrl = blob => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(blob);
});

// The data URLs of the pictures of some messages, by id; without those that this browser has not kept.
export async function readUrls(conversation, nodes) {
  const found = new Map();
  for (const picture of nodes.flatMap(node => node.pictures || [])) {
    const blob = found.has(picture.id) ? null : await load(keyOf(conversation, picture));
    const url = blob && await readUrl(blob).catch(() => null);
    if (url) found.set(picture.id, url);
  }
  return found;
}

// A conversation as a file has it: with its pictures.
export async function exportPictures(conversation) {
  const urls = await readUrls(conversation, Object.values(conversation.nodes));
  return urls.size ? { ...conversation.data, pictures: Object.fromEntries(urls) } : conversation.data;
}

// The files of what `exportPictures` wrote, by id. Throws where they are none.
export const parsePictures = ({ pictures = {} }) => Object.entries(pictures).map(([id, url]) => {
  const [head, type] = DATA_URL.exec(url);
  return [id, new Blob([Uint8Array.from(atob(url.slice(head.length)), each => each.charCodeAt(0))], { type })];
});

// Keeps those of them that messages of the conversation name, and that are not here yet.
export async function importPictures(conversation, files) {
  const named = new Set(Object.values(conversation.nodes).flatMap(node => node.pictures || []).map(({ id }) => id));
  for (const [id, blob] of files) {
    const key = keyOf(conversation, { id });
    if (named.has(id) && !await load(key)) await save(key, blob);
  }
}

// The picture, small: one frame, and turned, as the model sees it.
function makeThumbnail(conversation, picture) {
  const { name, width, height } = picture, scale = Math.min(1, THUMBNAIL_PX / Math.max(width, height));
  const canvas = make("canvas", { width: Math.ceil(width * scale), height: Math.ceil(height * scale), className: "thumbnail", role: "img", ariaLabel: name, title: name });
  drawn = drawn.then(async () => {
    const bitmap = await createImageBitmap(await load(keyOf(conversation, picture)));
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    bitmap.close();
    canvas.classList.add("drawn");
  }).catch(() => canvas.replaceWith(make("span", { className: "thumbnail gone" }, t("picture_gone", { name }))));
  return canvas;
}

// A picture that can be enlarged and, beside a text field, removed.
export function makeTile(conversation, picture, remove) {
  const label = t("enlarge", { name: picture.name });
  const tile = make("div", { className: "tile" },
    make("button", { type: "button", ariaLabel: label, onclick: () => enlarge(conversation, picture) }, makeThumbnail(conversation, picture)));
  if (remove) tile.append(button("close", t("remove_picture", { name: picture.name }), () => {
    const next = (tile.nextSibling || tile.previousSibling)?.querySelector(".remove") || tile.parentNode.parentNode.querySelector("textarea");
    remove();
    next.focus();
  }, "remove"));
  return tile;
}

async function enlarge(conversation, picture) {
  const url = (await readUrls(conversation, [{ pictures: [picture] }])).get(picture.id);
  if (!url) return;
  const close = make("button", { type: "button", ariaLabel: t("close") }, make("img", { src: url, alt: picture.name }));
  const dialog = make("dialog", { className: "enlarged", ariaLabel: picture.name, onclick: () => dialog.close() }, close);  // also beside it
  document.body.append(dialog);
  await show(dialog);
  dialog.remove();
}

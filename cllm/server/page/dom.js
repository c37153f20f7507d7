// DOM: elements made of data. Text goes in as text, never as markup.
export const $ = id => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
}

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  up: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  key: "M8 12a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7M10.6 13.2L19 4.8M15 9l3 3M18 6l2 2",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  check: "M5 13l4 4L19 7",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  picture: "M4 5h16v14H4zM4 16l4.5-4.5L13 16l2.5-2.5L20 18M15.5 8.5a.6.6 0 1 0 .01 0",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  down: "M12 5v14M6 13l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6l1.4 1.4M17 17l1.4 1.4M5.6 18.4L7 17M17 7l1.4-1.4",
  moon: "M19 14.5A8 8 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5",
  auto: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16M12 4v16M12 8h5.5M12 12h8M12 16h5.5",
};

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function button(name, label, act, className = "icon") {
  return make("button", { type: "button", className, title: label, ariaLabel: label, onclick: act }, icon(name));
}

// Shows a modal dialogue; resolves with its value: "ok", or anything else.
export function show(dialog) {
  return new Promise(done => {
    dialog.returnValue = "cancel";
    dialog.addEventListener("close", () => done(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}

export async function confirm(text, word) {
  $("ask-text").textContent = text;
  $("ask-ok").textContent = word;
  return await show($("ask-dialog")) === "ok";
}

export async function copy(text, control, done) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // not a secure context: the old way
    const area = make("textarea", { value: text, className: "offscreen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = [...control.childNodes];
  control.replaceChildren(icon("check"));
  control.title = done;
  setTimeout(() => control.replaceChildren(...before), 1200);
}

export function download(name, parts) {
  const link = make("a", { href: URL.createObjectURL(new Blob(parts, { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

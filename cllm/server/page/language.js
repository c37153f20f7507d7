// Language: the texts of the page, by the browser's language or the visitor's choice.
import { icon } from "./dom.js";

const KEPT = "cllm.language";
export const language = localStorage.getItem(KEPT) || (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
const { default: strings } = await import(language === "zh" ? "./strings/zh.js" : "./strings/en.js");
const locale = language === "zh" ? "zh-CN" : "en";

export function t(name, values = {}) {
  return strings[name].replace(/\{(\w+)\}/g, (_, key) => values[key]);
}

export function setLanguage(value) {
  localStorage.setItem(KEPT, value);
  location.reload();
}

// Fills in what the HTML names by `data-*`.
export function translate(root) {
  document.documentElement.lang = locale;
  for (const node of root.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
  for (const node of root.querySelectorAll("[data-text]")) node.textContent = t(node.dataset.text);
  for (const node of root.querySelectorAll("[data-placeholder]")) node.placeholder = t(node.dataset.placeholder);
  for (const node of root.querySelectorAll("[data-label]")) {
    node.setAttribute("aria-label", t(node.dataset.label));
    if (node.classList.contains("icon") || node.classList.contains("send")) node.title = t(node.dataset.label);
  }
}

const whole = new Intl.NumberFormat(locale, { maximumFractionDigits: 0 });
export const count = value => whole.format(value);
export const digits = (value, places = 3) => value.toLocaleString(locale, { maximumSignificantDigits: Math.max(places, 1) });

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return (unit && value < 100 ? digits(value) : count(value)) + " " + units[unit];
}

export function duration(seconds) {
  if (seconds < 0.9995) return (seconds < 0.1 ? digits(seconds * 1000) : count(seconds * 1000)) + " ms";
  if (seconds < 99.5) return digits(seconds) + " s";
  if (seconds < 5940) return count(seconds / 60) + " min";
  return count(seconds / 3600) + " h";
}

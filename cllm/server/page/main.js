// The page: its tabs, its colours, its language, the visitor's key.
import { $, icon } from "./dom.js";
import { language, setLanguage, t, translate } from "./language.js";
import { askForKey } from "./server.js";
import { startChat } from "./chat.js";
import { closeLive, openLive } from "./live.js";
import { findModels, openModels } from "./models.js";
import { openApi } from "./api.js";

const OPEN = { chat: () => {}, live: openLive, models: openModels, api: openApi };
const THEMES = { auto: "auto", light: "sun", dark: "moon" }, KEPT_THEME = "cllm.theme";
const tabs = () => [...document.querySelectorAll("[role=tab]")].filter(tab => !tab.hidden);

function openTab(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === "tab-" + name;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  document.body.dataset.tab = name;
  document.title = name === "chat" ? "cllm" : `${t("tab_" + name)} · cllm`;
  if (name !== "live") closeLive();
  OPEN[name]($(name));
}

function startTabs() {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const name = tab.id.slice(4);
    tab.onclick = () => { history.replaceState(null, "", "#" + name); openTab(name); };
    tab.onkeydown = event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const all = tabs(), next = all[(all.indexOf(tab) + step + all.length) % all.length];
      next.focus();
      next.click();
    };
  }
  const wanted = () => {
    const name = location.hash.slice(1);
    if (name in OPEN) return name;
    return location.pathname.endsWith("/docs") || /^(get|post|delete|put)\//.test(name) ? "api" : "chat";
  };
  addEventListener("hashchange", () => { if (location.hash.slice(1) in OPEN) openTab(wanted()); });
  openTab(wanted());
}

function startTheme() {
  const show = theme => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").replaceChildren(icon(THEMES[theme]));
    $("theme").title = t("theme_" + theme);
    $("theme").setAttribute("aria-label", t("theme_" + theme));
    dispatchEvent(new Event("theme"));
  };
  let theme = localStorage.getItem(KEPT_THEME) || "auto";
  $("theme").onclick = () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    localStorage.setItem(KEPT_THEME, theme);
    show(theme);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("theme")));
  show(theme);
}

translate(document.body);
$("language").textContent = language === "zh" ? "EN" : "中";
$("language").onclick = () => setLanguage(language === "zh" ? "en" : "zh");
$("key").onclick = async () => { if (await askForKey(t("key_change"))) location.reload(); };
startTheme();
startTabs();
await startChat();
findModels().then(({ models }) => { $("tab-models").hidden = models.length < 2; });
document.documentElement.dataset.ready = "";

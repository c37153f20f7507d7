// Models: those that this server serves, their state and memory; load and unload.
import { make } from "./dom.js";
import { bytes, count, duration, t } from "./language.js";
import { ask } from "./server.js";

const ROUTE = "admin/models", REFRESH_MS = 3000;
let timer = null;

// What the server says of its models; none where it serves one only, or we may not ask.
export async function findModels() {
  try {
    return await (await ask(ROUTE, { quiet: true })).json();
  } catch { return { models: [] }; }
}

const sum = sizes => Object.values(sizes || {}).reduce((all, size) => all + size, 0);

function control(section, model, said) {
  const loaded = model.state === "ready", word = t(loaded ? "unload" : "load");
  const act = make("button", { type: "button", className: loaded ? "quiet" : "primary", disabled: model.state === "loading", ariaLabel: `${word} ${model.name}` }, word);
  act.onclick = async () => {
    clearTimeout(timer);
    act.disabled = true;
    act.textContent = t("working");
    said.textContent = "";
    try { await ask(`${ROUTE}/${loaded ? "unload" : "load"}`, { method: "POST", body: { model: model.name } }); } catch (error) { said.textContent = error.message; }
    openModels(section, said.textContent);
  };
  return act;
}

function row(section, model, said) {
  const facts = [model.architecture, model.quantization, model.context ? t("context", { count: count(model.context) }) : "", model.slots ? t("slots", { count: model.slots }) : ""];
  const memory = sum(model.memory_bytes) ? bytes(sum(model.memory_bytes)) : "–";
  const used = model.last_used ? t("ago", { value: duration(Math.max(0, Date.now() / 1000 - model.last_used)) }) : "–";
  return make("tr", {},
    make("td", {}, make("b", {}, model.name), model.default ? make("small", { className: "tag" }, t("models_default")) : null,
      make("div", { className: "dim" }, model.error || facts.filter(Boolean).join(" · ")),
      make("div", { className: "dim narrow" }, memory)),
    make("td", {}, make("span", { className: "state", "data-state": model.state === "ready" ? "on" : model.state }, t("model_" + model.state))),
    make("td", { className: "wider" }, memory),
    make("td", { className: "wider" }, used),
    make("td", { className: "end" }, control(section, model, said)));
}

export async function openModels(section, message = "") {
  clearTimeout(timer);
  const { models, memory_bytes: used, memory_limit_bytes: limit } = await findModels();
  const said = make("p", { className: "wrong", role: "alert" }, message);
  const memory = sum(limit) ? t("tier_of", { used: bytes(sum(used)), limit: bytes(sum(limit)) }) : sum(used) ? bytes(sum(used)) : "";
  section.replaceChildren(make("div", { className: "column" },
    make("header", { className: "lead" }, make("h1", {}, t("models_title")), make("span", { className: "space" }), make("span", { className: "dim" }, memory)), said,
    make("div", { className: "scroll", tabIndex: 0 }, make("table", {},
      make("thead", {}, make("tr", {}, ...["model", "state", "memory", "last_used"].map((each, index) => make("th", { scope: "col", className: index > 1 ? "wider" : "" }, t(each))), make("th", {}))),
      make("tbody", {}, ...models.map(model => row(section, model, said)))))));
  timer = setTimeout(() => { if (!section.hidden) openModels(section, said.textContent); }, REFRESH_MS);
}

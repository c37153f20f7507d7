// Settings: system prompt, sampling, schema and tools, kept in this browser; empty is the server's default.
import { $, button, make } from "./dom.js";
import { t } from "./language.js";

const KEPT = "cllm.settings";
const NUMBERS = [
  ["temperature", 0, 10, 0.05], ["top_p", 0, 1, 0.01], ["top_k", 0, 1000, 1], ["min_p", 0, 1, 0.01],
  ["repetition_penalty", 0.1, 10, 0.05], ["max_tokens", 1, 1000000, 1], ["seed", 0, 4294967294, 1],
];
const SHAPES = { schema: value => typeof value === "object" && value !== null && !Array.isArray(value), tools: Array.isArray };
let values = {};

function read() {
  try { values = JSON.parse(localStorage.getItem(KEPT)) || {}; } catch { values = {}; }
}
read();

function parse(name) {
  if (!values[name]?.trim()) return undefined;
  const found = JSON.parse(values[name]);
  if (!SHAPES[name](found)) throw new Error(t("wrong_" + name));
  return found;
}

// The first field whose JSON is wrong.
export const wrongField = () => Object.keys(SHAPES).find(name => {
  try { parse(name); return false; } catch { return true; }
});

export const system = () => (values.system || "").trim();

// The fields of a request. Throws where the JSON of a field is wrong.
export function fields() {
  const found = {};
  for (const [name] of NUMBERS) if (values[name] !== undefined && values[name] !== "") found[name] = Number(values[name]);
  const stop = (values.stop || "").split("\n").filter(Boolean);
  if (stop.length) found.stop = stop;
  const schema = parse("schema"), tools = parse("tools");
  if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools) found.tools = tools;
  return found;
}

function summarize() {
  const on = NUMBERS.filter(([name]) => values[name]).map(([name]) => `${t(name)} ${values[name]}`);
  for (const name of ["system", "schema", "tools"]) if (values[name]?.trim()) on.unshift(t(name + "_on"));
  $("active-settings").textContent = on.join(" · ");
}

function keep(name, value) {
  values[name] = value;
  localStorage.setItem(KEPT, JSON.stringify(values));
  summarize();
}

function area(name, label, help, json, placeholder = "") {
  const wrong = make("p", { className: "wrong", role: "alert", hidden: true });
  const check = () => {
    wrong.hidden = true;
    try { if (json) parse(name); } catch (error) {
      wrong.hidden = false;
      wrong.textContent = t("wrong_json", { why: error.message });
    }
  };
  const input = make("textarea", { id: "set-" + name, value: values[name] || "", placeholder, spellcheck: !json,
    rows: json ? 5 : 3, className: json ? "mono" : "", oninput: () => { keep(name, input.value); check(); } });
  check();
  return make("label", {}, make("span", {}, label), input, help ? make("small", { className: "dim" }, help) : null, wrong);
}

// The same settings in all tabs.
export function startSettings(panel, close) {
  fillSettings(panel, close);
  addEventListener("storage", ({ key }) => { if (key === KEPT) { read(); fillSettings(panel, close); } });
}

function fillSettings(panel, close) {
  const numbers = NUMBERS.map(([name, min, max, step]) => {
    const input = make("input", { id: "set-" + name, type: "number", min, max, step, value: values[name] ?? "",
      placeholder: t("default_value"), oninput: () => keep(name, input.value) });
    return make("label", { className: "number" }, make("span", {}, t(name)), input);
  });
  panel.replaceChildren(
    make("header", {}, make("h2", {}, t("settings")), button("close", t("close"), close)),
    area("system", t("system_prompt"), "", false, t("system_placeholder")),
    make("fieldset", {}, make("legend", {}, t("sampling")), ...numbers),
    area("stop", t("stop_texts"), t("stop_help"), false),
    area("schema", t("schema"), t("schema_help"), true, '{"type": "object"}'),
    area("tools", t("tools"), t("tools_help"), true, "[]"),
    make("button", { type: "button", className: "quiet", onclick: () => {
      values = {};
      localStorage.removeItem(KEPT);
      summarize();
      fillSettings(panel, close);
    } }, t("reset")),
  );
  summarize();
}

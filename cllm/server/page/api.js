// API: the routes of the server, from its OpenAPI description, to read and to try out.
import { make } from "./dom.js";
import { t } from "./language.js";
import { ask, authorization } from "./server.js";

let schemas = {};
const pretty = value => typeof value === "string" ? value : JSON.stringify(value, null, 2);
const coded = text => text.split("`").map((part, index) => index % 2 ? make("code", {}, part) : part);
const nameOf = reference => reference.split("/").pop();
const follow = schema => schema?.$ref ? schemas[nameOf(schema.$ref)] || {} : schema || {};
const short = name => name.replace(/Body$/, "");

function typeOf(schema) {
  if (schema.$ref) return short(nameOf(schema.$ref));
  const several = schema.anyOf || schema.oneOf;
  if (several) return several.map(typeOf).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return "[" + typeOf(schema.items || {}) + "]";
  return schema.type || "any";
}

const LIMITS = [["minimum", "≥ "], ["exclusiveMinimum", "> "], ["maximum", "≤ "], ["minLength", "length ≥ "], ["maxLength", "length ≤ "],
  ["minItems", "items ≥ "], ["maxItems", "items ≤ "], ["maxProperties", "keys ≤ "], ["pattern", "matches "]];

const limitsOf = schema => [schema, ...(schema.anyOf || [])].flatMap(part =>
  LIMITS.filter(([name]) => part[name] !== undefined).map(([name, sign]) => sign + part[name])).join(", ");

// Schemas that a field refers to, each once, in the order in which they are met.
function referred(schema, found = new Map()) {
  JSON.stringify(schema, (key, value) => {
    if (key === "$ref" && !found.has(nameOf(value))) {
      found.set(nameOf(value), schemas[nameOf(value)]);
      referred(schemas[nameOf(value)], found);
    }
    return value;
  });
  return found;
}

function fields(schema) {
  const required = new Set(schema.required || []);
  const names = Object.keys(schema.properties || {}).sort((one, other) => required.has(other) - required.has(one));
  const rows = names.map(name => {
    const field = schema.properties[name], example = field.examples?.[0], limits = limitsOf(field);
    const known = field.default !== undefined && field.default !== null;
    return make("tr", {},
      make("td", {}, make("code", {}, name), required.has(name) ? make("em", {}, t("api_required")) : null),
      make("td", {}, make("code", {}, typeOf(field))),
      make("td", {}, known ? make("code", {}, JSON.stringify(field.default)) : ""),
      make("td", {}, ...coded(field.description || ""), limits ? make("div", { className: "dim" }, limits) : null,
        example !== undefined ? make("div", { className: "dim" }, t("api_example") + " ", make("code", {}, JSON.stringify(example))) : null));
  });
  const head = make("tr", {}, ...["field", "type", "default", "meaning"].map(each => make("th", { scope: "col" }, t("api_" + each))));
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function trial(method, path, body) {
  const example = pretty(body?.example || {});
  const input = body ? make("textarea", { value: example, rows: example.split("\n").length + 1, spellcheck: false, className: "mono", ariaLabel: t("api_body") }) : null;
  const output = make("pre", { hidden: true, tabIndex: 0 });
  const headers = () => ({ ...(body ? { "Content-Type": "application/json" } : {}), ...authorization() });
  const send = make("button", { type: "button", className: "primary", onclick: async () => {
    output.hidden = false;
    output.textContent = "…";
    try {
      const answer = await fetch(path.slice(1), { method: method.toUpperCase(), headers: headers(), body: input?.value });
      const reader = answer.body.getReader(), decoder = new TextDecoder();
      let text = "";
      for (let part; !(part = await reader.read()).done;) {
        text += decoder.decode(part.value, { stream: true });
        output.textContent = answer.status + "\n\n" + text;
      }
      try { output.textContent = answer.status + "\n\n" + pretty(JSON.parse(text)); } catch { /* not JSON: as it came */ }
    } catch (error) { output.textContent = String(error); }
  } }, t("api_send"));
  const curl = make("button", { type: "button", className: "quiet", onclick: () => {
    const words = ["curl", ...(method === "get" ? [] : ["-X", method.toUpperCase()]), new URL(path.slice(1), document.baseURI).href, ...Object.entries(headers()).map(([name, value]) => `-H '${name}: ${value}'`)];
    if (input) words.push("-d '" + input.value.replaceAll("'", "'\\''") + "'");
    output.hidden = false;
    output.textContent = words.join(" ");
  } }, t("api_curl"));
  return make("div", {}, input, make("div", { className: "row" }, send, curl), output);
}

const answers = route => Object.entries(route.responses).map(([status, answer]) => make("details", { className: "more", open: status === "200" },
  make("summary", {}, status + " ", ...coded(answer.description)),
  ...Object.entries(answer.content || {}).flatMap(([kind, { example }]) =>
    example === undefined ? [] : [make("div", { className: "dim" }, kind), make("pre", { tabIndex: 0 }, pretty(example))])));

function fillRoute(inside, method, path, route) {
  const content = route.requestBody?.content?.["application/json"], body = content ? follow(content.schema) : null;
  if (route.description) inside.append(make("p", {}, ...coded(route.description)));
  inside.append(make("h3", {}, t("api_try")), trial(method, path, body));
  if (body) {
    inside.append(make("h3", {}, t("api_fields")), fields(body));
    for (const [name, schema] of referred(body))
      if (schema.properties) inside.append(make("details", { className: "more" }, make("summary", {}, make("code", {}, short(name)), " ", ...coded(schema.description || "")), fields(schema)));
  }
  inside.append(make("h3", {}, t("api_answers")), ...answers(route));
}

function makeRoute(method, path, route) {
  const inside = make("div", { className: "inside" });
  const details = make("details", { className: "route", id: method + path },
    make("summary", {}, make("b", { className: method }, method.toUpperCase()), make("code", {}, path), make("span", {}, ...coded(route.summary || ""))), inside);
  details.addEventListener("toggle", () => { if (!inside.childNodes.length) fillRoute(inside, method, path, route); });
  return details;
}

function list(section, description) {
  schemas = description.components?.schemas || {};
  const groups = new Map((description.tags || []).map(tag => [tag.name, { text: tag.description, routes: [] }]));
  for (const [path, methods] of Object.entries(description.paths))
    for (const [method, route] of Object.entries(methods)) {
      const tag = (route.tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, { text: "", routes: [] });
      groups.get(tag).routes.push([method, path, route]);
    }
  const nav = make("nav", { ariaLabel: t("tab_api") }), main = make("div", { className: "routes" });
  main.append(make("h1", {}, description.info.title + " ", make("small", { className: "dim" }, description.info.version)), make("p", { className: "dim" }, description.info.description || ""));
  const filter = make("input", { type: "search", placeholder: t("api_filter"), ariaLabel: t("api_filter"), oninput: () => {
    for (const link of nav.querySelectorAll("a")) link.hidden = !link.textContent.includes(filter.value);
    for (const route of main.querySelectorAll(".route")) route.hidden = !route.id.includes(filter.value);
  } });
  nav.append(filter);
  for (const [tag, { text, routes }] of groups) {
    nav.append(make("h2", {}, tag), ...routes.map(([method, path]) => make("a", { href: "#" + method + path, onclick: () => { document.getElementById(method + path).open = true; } }, path)));
    main.append(make("section", {}, make("h2", {}, tag), make("p", { className: "dim" }, text), ...routes.map(route => makeRoute(...route))));
  }
  section.replaceChildren(nav, main);
  const wanted = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (wanted?.classList.contains("route")) { wanted.open = true; wanted.scrollIntoView(); }
}

export async function openApi(section) {
  if (section.childNodes.length) return;
  section.replaceChildren(make("p", { className: "dim" }, t("api_loading")));
  try { list(section, await (await ask("openapi.json")).json()); } catch (error) {
    section.replaceChildren(make("p", { className: "wrong" }, t("api_failed", { why: error.message })));
    setTimeout(() => section.addEventListener("click", () => { section.replaceChildren(); openApi(section); }, { once: true }));
  }
}

// Markdown: an answer as elements. `marked` makes HTML of it, and nothing of that is used but through DOMPurify.
import { button, copy, make } from "./dom.js";
import { t } from "./language.js";

const { marked, DOMPurify } = window;
const MAX_COLOURED = 50_000;  // characters of a block of code
const LIBRARIES = { hljs: ["highlight.min.js"], katex: ["katex.min.js", "katex.min.css"] };
const BLOCK_FORMULA = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/;
// A dollar sign opens a formula before what is no space, and closes it behind such: prices are none.
const FORMULA = /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n`])+?)(?<!\s)\$(?!\d))/;
const JSON_BEGIN = /^\s*(?:\{\s*"|\[\s*[{["])/;
const escape = text => text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);

function formula(name, level, begin, whole) {
  return { name, level, start: text => text.match(begin)?.index, tokenizer(text) {
    const found = whole.exec(text);
    if (!found) return undefined;
    const shown = level === "block" || /^(\$\$|\\\[)/.test(found[0]) ? "display" : "inline";
    return { type: name, raw: found[0], shown, text: found.slice(1).find(part => part !== undefined).trim() };
  }, renderer: ({ shown, text }) => {
    const code = `<code class="math-${shown}">${escape(text)}</code>`;
    return level === "block" ? `<p>${code}</p>` : code;
  } };
}

marked.use({
  gfm: true,
  breaks: true,
  extensions: [formula("formulas", "block", /^ {0,3}(?:\$\$|\\\[)/m, BLOCK_FORMULA), formula("formula", "inline", /\$|\\[[(]/, FORMULA)],
  renderer: {
    html: ({ text, block }) => block ? `<p>${escape(text.trimEnd())}</p>` : escape(text),  // HTML in an answer is shown, not used
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,  // nothing is fetched
    strong: ({ raw }) => /^__\w+__$/.test(raw) ? escape(raw) : false,  // a name in Python, not a word in bold
  },
});

const PURE = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input",
    "li", "ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "title", "class", "align", "start", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.tagName === "INPUT") {
    node.setAttribute("type", "checkbox");
    node.setAttribute("disabled", "");
  }
  if (node.hasAttribute("class") && !/^(?:language-[\w+#.-]+|math-\w+|hljs-[\w -]+)$/.test(node.className)) node.removeAttribute("class");
});

export const sanitize = html => DOMPurify.sanitize(html, PURE);

// Libraries that few answers need: from this server, on first use. An answer is legible without them.
const ready = {}, loading = {};

function withLibrary(name, use) {
  if (ready[name]) { use(ready[name]); return; }
  loading[name] ||= Promise.all(LIBRARIES[name].map(file => new Promise((done, failed) => {
    const { href } = new URL("./vendor/" + file, import.meta.url);
    const [tag, attributes] = file.endsWith(".css") ? ["link", { rel: "stylesheet", href }] : ["script", { src: href }];
    document.head.append(make(tag, { ...attributes, onload: done, onerror: failed }));
  }))).then(() => { ready[name] = window[name]; });
  loading[name].then(() => use(ready[name]), () => { delete loading[name]; });
}

function typeset(code) {
  withLibrary("katex", katex => {
    const shown = make("span", { className: code.className });
    try {
      katex.render(code.textContent, shown, { displayMode: code.className === "math-display", trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 });
      code.replaceWith(shown);
    } catch { /* not a formula that can be set: it stays as it was written */ }
  });
}

function colour(code, language) {
  if (!language || code.textContent.length > MAX_COLOURED) return;
  withLibrary("hljs", hljs => {
    if (!hljs.getLanguage(language)) return;
    code.replaceChildren(sanitize(hljs.highlight(code.textContent, { language, ignoreIllegals: true }).value));
  });
}

function decorate(fragment) {
  for (const code of fragment.querySelectorAll("pre > code")) {
    const name = code.className.replace("language-", "");
    const control = button("copy", t("copy"), () => copy(code.textContent, control, t("copied")));
    code.parentNode.replaceWith(make("figure", { className: "code" },
      make("figcaption", {}, make("span", {}, name), control), make("pre", { tabIndex: 0 }, code)));
    colour(code, name);
  }
  fragment.querySelectorAll("code[class^=math-]").forEach(typeset);
  for (const table of fragment.querySelectorAll("table")) {
    const wrap = make("div", { className: "scroll", tabIndex: 0 });
    table.replaceWith(wrap);
    wrap.append(table);
  }
  return fragment;
}

// An answer that is JSON as a whole: Markdown would change it. While it grows, its beginning decides.
function isJson(text, whole) {
  if (!JSON_BEGIN.test(text)) return false;
  try { return !(whole || text.includes("\n\n")) || Boolean(JSON.parse(text)); } catch { return false; }
}

// A growing text: blocks that have not changed keep their elements, so that only the last one is made anew.
export class MarkdownView {
  constructor() {
    this.node = make("div", { className: "markdown" });
    this.blocks = [];
  }

  // A text that grows is read from its last block on; one that has ended is read `whole` once more.
  set(text, whole, json = false) {
    text = text.replace(/\r\n?/g, "\n");
    json = text && (json || isJson(text, whole));
    const kept = whole || json ? 0 : Math.max(0, this.blocks.length - 1);
    const begin = this.blocks.slice(0, kept).reduce((sum, block) => sum + block.raw.length, 0);
    const tail = json ? [{ type: "code", lang: "json", raw: text, text }] : marked.lexer(text.slice(begin));
    const tokens = [...this.blocks.slice(0, kept), ...tail];
    let same = kept;
    while (same < tokens.length && same < this.blocks.length && this.blocks[same].raw === tokens[same].raw) same++;
    for (const block of this.blocks.splice(same)) block.nodes.forEach(node => node.remove());
    for (const token of tokens.slice(same)) {
      const part = [token];
      part.links = tail.links;
      const nodes = [...decorate(sanitize(marked.parser(part))).childNodes];
      this.node.append(...nodes);
      this.blocks.push({ raw: token.raw, nodes });
    }
  }
}

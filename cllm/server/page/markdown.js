// Markdown: an answer as elements. `marked` makes HTML of it, and nothing of that is used but through DOMPurify.
import { button, copy, make } from "./dom.js";
import { t } from "./language.js";

const { marked, DOMPurify } = window;
const escape = text => text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);

marked.use({
  gfm: true,
  breaks: false,
  renderer: {
    html: ({ text }) => escape(text),  // HTML in an answer is shown, not used
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,  // nothing is fetched
  },
});

const PURE = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input",
    "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
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
  if (node.hasAttribute("class") && !/^language-[\w+#.-]+$/.test(node.className)) node.removeAttribute("class");
});

export const sanitize = html => DOMPurify.sanitize(html, PURE);

function decorate(fragment) {
  for (const code of fragment.querySelectorAll("pre > code")) {
    const name = code.className.replace("language-", "");
    const control = button("copy", t("copy"), () => copy(code.textContent, control, t("copied")));
    code.parentNode.replaceWith(make("figure", { className: "code" },
      make("figcaption", {}, make("span", {}, name), control), make("pre", { tabIndex: 0 }, code)));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const wrap = make("div", { className: "scroll", tabIndex: 0 });
    table.replaceWith(wrap);
    wrap.append(table);
  }
  return fragment;
}

// A growing text: blocks that have not changed keep their elements, so that only the last one is made anew.
export class MarkdownView {
  constructor() {
    this.node = make("div", { className: "markdown" });
    this.blocks = [];
  }

  // A text that grows is read from its last block on; one that has ended is read `whole` once more.
  set(text, whole) {
    text = text.replace(/\r\n?/g, "\n");
    const kept = whole ? 0 : Math.max(0, this.blocks.length - 1);
    const begin = this.blocks.slice(0, kept).reduce((sum, block) => sum + block.raw.length, 0);
    const tail = marked.lexer(text.slice(begin)), tokens = [...this.blocks.slice(0, kept), ...tail];
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

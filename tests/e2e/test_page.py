"""The page at `/` in a real Chromium, on the scripted model. What takes longer: proof/page.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cllm.testing import call_tool, say
from tests.driver.browser import Visitor, visiting
from tests.driver.server import Server, wait_for
from tests.e2e.golden.record import scripted_server
from tests.e2e.xss import PAYLOADS
from tests.tiny_models import make_dense

FAST = ("--step-ms", "4", "--draft-tokens", "16")  # an answer is in its prompt: drafts are right
KEY = "open sesame"
LONG = "A sentence that takes a while. " * 200
MARKDOWN = """# Title

Some **bold** text and `code`.

```python
print(1)
```

| a | b |
|---|---|
| 1 | 2 |
"""
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
Visit = Callable[..., Visitor]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("page") / "log"
    with scripted_server(log, *FAST, "--parallel", "4", "--ctx-size", "65536") as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("keyed") / "log"
    with scripted_server(log, "--step-ms", "4", "--parallel", "2", "--api-key", KEY) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Visit]:
    with ExitStack() as stack:
        yield lambda path="/", **options: stack.enter_context(
            visiting(browser, options.pop("server", server), path, **options)
        )


def test_an_answer_streams_as_markdown_with_its_figures(visit: Visit) -> None:
    visitor = visit()
    visitor.ask(say(MARKDOWN))
    page = visitor.page
    assert page.locator(".markdown h1").inner_text() == "Title"
    assert page.locator(".markdown strong").inner_text() == "bold"
    assert page.locator(".code pre").inner_text().strip() == "print(1)"
    assert page.locator(".markdown td").all_inner_texts() == ["1", "2"]
    figures = page.locator(".message.assistant .figures").inner_text()
    assert "tokens/s" in figures and "from cache" in figures and "first token" in figures
    body = visitor.bodies[-1]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".code button").click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == "print(1)"


def test_reasoning_is_folded_and_tool_calls_are_shown(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.ask(say("<think>\nTwo and two.\n</think>\n\nFour."))
    assert visitor.answer == "Four."
    assert not page.locator(".thoughts").is_visible()
    page.locator(".reasoning summary").click()
    assert "Two and two." in page.locator(".thoughts").inner_text()
    page.locator("#new-chat").click()
    page.locator("#show-settings").click()
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    page.fill("#set-tools", json.dumps([tool]))
    visitor.ask(say(call_tool("get_weather", {"city": "Paris"}), "It rains."))
    assert "get_weather" in page.locator(".call summary").inner_text()
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Paris"}
    visitor.ask("rain")
    assert visitor.bodies[-1]["messages"][-1]["role"] == "tool"
    assert visitor.answer == "It rains."


def test_stop_ends_the_request_and_keeps_what_there_is(visit: Visit, server: Server) -> None:
    visitor = visit()
    visitor.ask(say(LONG), wait=False)
    visitor.until("document.querySelector('.markdown')?.innerText.length > 20")
    visitor.page.click("#stop")
    visitor.wait_answered()
    wait_for(server.idle, 5)
    assert 20 < len(visitor.answer) < len(LONG)
    assert "Stopped" in visitor.page.locator(".message.assistant .figures").inner_text()


def test_regenerate_and_edit_are_branches_and_history_lasts(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.ask(say("First answer."))
    page.locator(".message.assistant .again").click()
    visitor.wait_answered()
    assert page.locator(".message.assistant .branch span").inner_text() == "2 of 2"
    page.locator(".message.user").hover()
    page.locator(".message.user .edit").click()
    page.fill(".editing", say("Second answer."))
    page.keyboard.press("Enter")
    visitor.wait_answered()
    assert visitor.answer == "Second answer."
    assert page.locator(".message.user .branch span").inner_text() == "2 of 2"
    page.locator(".message.user .earlier").click()
    assert visitor.answer == "First answer."
    assert page.locator(".message.assistant .branch span").inner_text() == "2 of 2"
    visitor.open()
    assert visitor.answer == "First answer."
    assert page.locator("#conversations li").count() == 1
    with page.expect_download() as download:
        page.click("#export")
    (exported,) = json.loads(Path(download.value.path()).read_text())
    assert len(exported["nodes"]) == 5
    page.click("#delete-all")
    page.click("#ask-ok")
    page.wait_for_selector("#chat.blank")
    visitor.open()
    assert page.locator("#conversations li").count() == 0


def test_text_json_code_and_formulas_are_shown_as_written(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.ask(say("Roses are red\nViolets are __init__\n<b>\n\n1 < 2 for $5 or $6"))
    assert visitor.answer == "Roses are red\nViolets are __init__\n<b>\n\n1 < 2 for $5 or $6"
    text = json.dumps({"name": "__init__", "body": "*a* <b>\n# c"})
    visitor.ask(say(text))
    assert page.locator(".code pre").last.inner_text().strip() == text
    visitor.ask(say('{"name": is *no* JSON}'))
    assert page.locator(".markdown").last.locator("em").inner_text() == "no"
    before = [url for url in visitor.requests if "highlight" in url or "katex" in url.lower()]
    assert [url.rpartition("/")[2] for url in before] == ["highlight.min.js"], "only what was needed"
    visitor.ask(
        say("```python\ndef f(): return 'a'\n```\n\nInline $a_1^2$ and \\(b\\).\n\n$$\n\\frac{1}{2}\n$$\n")
    )
    page.wait_for_selector(".math-display .katex-display")
    assert page.locator(".math-inline .katex").count() == 2
    assert page.locator(".hljs-keyword").first.inner_text() == "def"
    assert page.locator(".code pre").last.inner_text().strip() == "def f(): return 'a'"
    visitor.until(
        "[...document.fonts].some(font => font.family === 'KaTeX_Main' && font.status === 'loaded')"
    )
    scripts = [r"\href{javascript:alert(1)}{x}", r"\htmlStyle{color:red}{x}", "<img src=x onerror=alert(1)>"]
    code = "```html\n<img src=x onerror=alert(1)>\n```\n"
    visitor.ask(say(" ".join(f"${each}$" for each in scripts) + "\n" + code))
    page.wait_for_selector(".hljs-attr")
    assert page.locator(".markdown").last.locator("img, a, script, [onerror]").count() == 0


def test_leaving_the_page_keeps_an_answer_that_goes_on(visit: Visit, keyed: Server) -> None:
    """By a reload, another language, another key: what came is there, and the rest of the answer comes."""
    key = {"origin": keyed.url, "localStorage": [{"name": "cllm.key", "value": KEY}]}
    visitor = visit(server=keyed, storage_state={"origins": [key]})
    page = visitor.page

    def change_key() -> None:
        page.click("#key")
        page.keyboard.press("Enter")

    whole = "".join(f"word {number} " for number in range(80)).strip()
    visitor.ask(say(whole), wait=False)
    had = 10
    for leave in (page.reload, lambda: page.click("#language"), change_key):
        visitor.until(f"(document.querySelector('.markdown')?.innerText.length ?? 0) > {had}")
        page.evaluate("delete document.documentElement.dataset.ready")
        leave()
        page.wait_for_selector("html[data-ready]")
        kept = visitor.answer
        assert len(kept) > had and whole.startswith(kept)
        assert page.locator(".message.user .plain").inner_text().strip("\x02\x03") == whole
        had = len(kept) + 5
    visitor.wait_answered()
    assert visitor.answer == whole and not page.locator(".continue").is_visible()
    assert len(visitor.bodies) == 1
    page.click("#show-settings")
    page.fill("#set-max_tokens", "5")
    page.click("#new-chat")
    visitor.ask(say("Once upon a time"))
    assert visitor.answer == "Once " and "上限" in page.locator(".figures").last.inner_text()
    page.fill("#set-max_tokens", "")
    page.click(".continue")
    visitor.until("document.querySelector('.markdown').innerText === 'Once upon a time'")
    visitor.wait_answered()


def test_an_answer_whose_stream_is_gone_can_be_continued(visit: Visit) -> None:
    """After a reload, and in the next tab after the one that received it was closed."""
    visitor, whole = visit(), "".join(f"word {number} " for number in range(200)).strip()
    visitor.ask(say(whole), wait=False)
    visitor.until("(document.querySelector('.markdown')?.innerText.length ?? 0) > 10")
    visitor.context.route("**/v1/streams/**", lambda route: route.fulfill(status=404, json={}))
    visitor.open().page.click(".continue")
    visitor.until("document.querySelector('.markdown').innerText.length > 100")
    visitor.page.close()
    visitor.page = visitor.context.new_page()
    visitor.open().page.wait_for_selector(".continue")
    assert "Interrupted" in visitor.page.locator(".figures").last.inner_text()
    assert whole.startswith(visitor.answer) and 100 < len(visitor.answer) < len(whole)
    visitor.page.click(".continue")
    visitor.until(f"document.querySelector('.markdown').innerText.length === {len(whole)}")
    visitor.wait_answered()
    assert visitor.answer == whole


def test_what_is_typed_is_kept(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.ask(say("First."))
    page.fill("#prompt", "for the first")
    page.click("#new-chat")
    assert page.input_value("#prompt") == ""
    page.keyboard.type("for a new one")
    visitor.open()
    assert page.input_value("#prompt") == "for a new one"
    page.locator("#conversations .title").last.click()
    assert page.input_value("#prompt") == "for the first"
    page.locator(".message.user").hover()
    page.locator(".message.user .edit").click()
    page.fill(".editing", "edited, not sent")
    visitor.open()
    assert (
        page.input_value(".editing") == "edited, not sent" and page.input_value("#prompt") == "for the first"
    )
    page.locator(".message.user .quiet").click()
    page.click("#show-settings")
    for name, wrong in (("schema", '{"type":'), ("tools", "{}"), ("schema", "[]")):
        page.fill(f"#set-{name}", wrong)
        sent = len(visitor.bodies)
        page.click("#send")
        assert page.input_value("#prompt") == "for the first" and len(visitor.bodies) == sent
        assert page.evaluate("document.activeElement.id") == f"set-{name}"
        assert "Not valid JSON" in page.locator(f"label:has(#set-{name}) .wrong").inner_text()
        assert "Not sent" in page.locator("#notice").inner_text()
        page.fill(f"#set-{name}", "")
    visitor.ask(say("Sent."))
    assert visitor.answer == "Sent." and page.input_value("#prompt") == ""
    visitor.open()
    assert page.input_value("#prompt") == ""


def test_files_of_text_go_into_the_message(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    page.fill("#prompt", "Compare:")
    files = {"a.txt": "One\n", "b.md": "```\nü\n```", "large.txt": "x" * (256 << 10), "c.bin": "\0"}
    uploads: Any = [{"name": name, "mimeType": "", "buffer": text.encode()} for name, text in files.items()]
    uploads[2]["buffer"] += b"x"
    page.set_input_files("#picture-files", uploads)
    page.wait_for_selector("#notice:has-text('Not added: large.txt, c.bin.')")
    wanted = "Compare:\n\na.txt\n```\nOne\n```\n\nb.md\n````\n```\nü\n```\n````"
    assert page.input_value("#prompt").strip() == wanted
    visitor.open()
    assert page.input_value("#prompt").strip() == wanted, "kept as what is typed"
    page.click("#send")
    visitor.wait_answered()
    assert visitor.bodies[-1]["messages"] == [{"role": "user", "content": wanted}]


# Two states of the conversation that is shown, each with another message behind its last one; both are saved.
DIVERGE = """async () => {
  const { Conversation } = await import(new URL("page/conversation.js", document.baseURI));
  const storage = await import(new URL("page/storage.js", document.baseURI));
  const id = sessionStorage.getItem("cllm.open");
  const states = [new Conversation(await storage.load(id)), new Conversation(await storage.load(id))];
  const last = states[0].path.at(-1).id;
  for (const each of states) each.add(last, { role: "user", content: "a branch" });
  for (const each of states) await storage.save(each.data);
  return new Conversation(await storage.load(id)).children(last).length; }"""


def test_two_tabs_share_conversations_and_overwrite_none(visit: Visit) -> None:
    one = visit()
    two = Visitor(None, one.server, context=one.context).open()
    one.ask(say("Of one."))
    two.ask(say("Of two."))
    one.until("document.querySelectorAll('#conversations li').length === 2")
    two.until("document.querySelectorAll('#conversations li').length === 2")
    two.page.locator("#conversations .title").last.click()
    assert two.answer == "Of one."
    two.page.keyboard.type("from the other tab")
    one.until("document.getElementById('prompt').value === 'from the other tab'")
    one.ask(say(LONG), wait=False)
    two.until("document.querySelectorAll('.message.assistant').length === 2")
    two.until("[...document.querySelectorAll('.markdown')].at(-1).innerText.length > 20")
    assert two.page.input_value("#prompt") == "" and not two.page.locator(".continue").is_visible()
    two.page.click("#stop")
    for tab in (one, two):
        tab.wait_answered()
        tab.until("[...document.querySelectorAll('.figures')].at(-1).innerText.includes('Stopped')")
    assert one.answer == two.answer
    # Two tabs that had not heard of each other yet: both go on from here.
    assert two.page.evaluate(DIVERGE) == 2
    one.open()
    assert one.page.locator(".message.user .branch span").inner_text() == "1 of 2"
    two.page.locator("#conversations .delete").first.click()
    two.page.click("#ask-ok")
    one.until("document.querySelectorAll('#conversations li').length === 1")
    one.page.wait_for_selector("#chat.blank")
    two.check()


TELL = """async message => {
  const id = sessionStorage.getItem("cllm.open");
  new BroadcastChannel("cllm").postMessage({ id, ...message }); }"""
IS_STORED = """(async () => {
  const storage = await import(new URL("page/storage.js", document.baseURI));
  return Boolean(await storage.load(sessionStorage.getItem("kept"))); })()"""


def test_an_answer_of_a_killed_tab_can_be_stopped(visit: Visit) -> None:
    visitor = visit()
    visitor.ask(say("Of this tab."))
    last = visitor.page.locator(".message").last.get_attribute("data-id")
    visitor.page.evaluate(TELL, {"node": last})
    visitor.page.click("#stop")
    visitor.wait_answered()
    # Of a conversation that this tab does not know: leaving the page saves what it does.
    visitor.page.evaluate(TELL, {"id": A, "node": B})
    visitor.ask(say("More."))
    visitor.page.evaluate("dispatchEvent(new Event('pagehide'))")


def test_a_conversation_deleted_in_another_tab_is_removed_here(visit: Visit) -> None:
    visitor = visit()
    visitor.ask(say("To be deleted."))
    visitor.page.evaluate("sessionStorage.setItem('kept', sessionStorage.getItem('cllm.open'))")
    assert visitor.page.evaluate(IS_STORED)
    visitor.page.evaluate(TELL, {"gone": True})
    visitor.page.wait_for_selector("#chat.blank")
    visitor.until(IS_STORED.join(("(async () => !await ", ")()")))


def test_comments_of_a_stream_are_heard(visit: Visit) -> None:
    heard = """async () => {
      const { readEvents } = await import(new URL("page/server.js", document.baseURI));
      const parts = [":\\n\\n", ":\\n\\n", "data: 1\\n\\n"].map(part => new TextEncoder().encode(part));
      const pull = sink => parts.length ? sink.enqueue(parts.shift()) : sink.close();
      const answer = new Response(new ReadableStream({ pull }));
      let heard = 0, events = 0;
      for await (const _ of readEvents(answer, () => { heard++; })) events++;
      return [heard, events]; }"""
    assert visit().page.evaluate(heard) == [3, 1]


def test_an_answer_goes_on_while_another_conversation_is_open(visit: Visit, server: Server) -> None:
    visitor = visit()
    page = visitor.page
    assert page.evaluate("document.activeElement.id") == "prompt"
    whole = "A sentence that takes a while. " * 90
    visitor.ask(say(whole.strip()), wait=False)
    page.wait_for_selector(".markdown p")
    page.click("#new-chat")
    page.wait_for_selector("#conversations .running")
    assert page.locator("#send").is_visible()
    visitor.ask(say("Short."))
    assert visitor.answer == "Short."
    page.locator("#conversations .title").last.click()
    visitor.wait_answered()
    assert visitor.answer == whole.strip()
    assert page.evaluate("document.activeElement.id") == "prompt"
    visitor.ask(say(LONG), wait=False)
    page.wait_for_selector("#conversations .running")
    page.click(".message.user >> nth=-1")
    assert page.evaluate("document.activeElement.id") != "prompt"
    page.keyboard.press("Escape")
    visitor.wait_answered()
    visitor.until("document.activeElement.id === 'prompt'")
    wait_for(server.idle, 5)


def test_an_error_says_what_to_do_and_trying_again_helps(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    states = ["restarting"]
    page.route("**/health", lambda route: route.fulfill(json={"status": "ok", "engine": states[0]}))
    page.route("**/v1/chat/completions", lambda route: route.abort())
    visitor.ask(say("There."))
    error = page.locator(".status.wrong")
    assert "cannot be reached" in error.inner_text() and "Check" in error.inner_text()
    red, dim = (
        f"getComputedStyle(document.querySelector('{name}')).color" for name in (".status.wrong", ".figures")
    )
    assert page.evaluate(f"{red} !== {dim}")
    page.wait_for_selector("#sign:visible")
    assert "restarts" in page.locator("#sign").inner_text()
    states[0] = "ready"
    page.wait_for_selector("#sign", state="hidden")
    page.unroute("**/v1/chat/completions")
    page.click(".continue")
    visitor.until("document.querySelector('.markdown').innerText === 'There.'")
    visitor.wait_answered()
    assert not error.is_visible() and page.locator(".message").count() == 2
    # A server that is silent is asked how it is.
    states[0] = "restarting"
    page.route("**/v1/chat/completions", lambda route: None)
    visitor.ask("silence", wait=False)
    page.wait_for_selector("#sign:visible")
    states[0] = "ready"
    page.wait_for_selector("#sign", state="hidden")
    page.keyboard.press("Escape")
    visitor.wait_answered()


A, B = "a" * 16, "b" * 16


def make_export(parents: dict[str, str]) -> dict[str, Any]:
    """A conversation as a file has it, by the parent of each message."""
    message = {"role": "user", "content": "x"}
    nodes = {id: {"id": id, "parent": parent, **message} for id, parent in parents.items()}
    return {"id": "c" * 16, "nodes": nodes, "chosen": {parent: id for id, parent in parents.items()}}


def test_conversations_are_found_renamed_and_imported(visit: Visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.page
    visitor.ask(say("An apple."))
    assert page.locator(".message .figures").last.inner_text().endswith("fake")
    assert page.locator("#model").input_value() == "fake"
    used = visitor.server.get("/v1/models")["data"][0]["context_length"]
    assert page.locator("#context").get_attribute("title").endswith(f"of {used:,} tokens of context used")
    page.click("#new-chat")
    visitor.ask(say("A pear."))
    page.fill("#search", "APPLE")
    assert page.locator("#conversations li").count() == 1
    page.locator("#conversations li").hover()
    page.click("#conversations .rename")
    page.keyboard.type("Fruit")
    page.keyboard.press("Enter")
    page.fill("#search", "fruit")
    assert page.locator("#conversations .title").all_inner_texts() == ["Fruit"]
    page.fill("#search", "")
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "exported.json"
    download.value.save_as(path)
    page.click("#delete-all")
    page.click("#ask-ok")
    page.wait_for_selector("#chat.blank")
    hostile = [{"": ""}, {"__proto__": ""}, {A: "__proto__"}, {A: A}, {A: B, B: A}]
    texts = ["no JSON", "[]", '{"id": "a"}', '[{"id": "a", "nodes": {"b": {}}, "chosen": {}}]']
    for number, text in enumerate([*texts, *(json.dumps(make_export(each)) for each in hostile)]):
        wrong = tmp_path / f"{number}.json"
        wrong.write_text(text)
        page.set_input_files("#import-file", wrong)
        page.wait_for_selector(f"#notice:has-text('{number}.json was not imported')")
    page.set_input_files("#import-file", path)
    page.wait_for_selector("#notice:has-text('Imported: 2')")
    visitor.open()
    assert sorted(page.locator("#conversations .title").all_inner_texts())[-1] == "Fruit"
    page.locator("#conversations .title:has-text('Fruit')").click()
    assert visitor.answer == "An apple."


def test_system_prompt_sampling_and_schema_are_sent(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    page.click("#show-settings")
    page.fill("#set-system", "Be brief.")
    page.fill("#set-temperature", "0.2")
    page.fill("#set-schema", "{")
    assert page.locator(".settings .wrong:visible").count() == 1
    page.fill("#set-schema", json.dumps(SCHEMA))
    assert page.locator(".settings .wrong:visible").count() == 0
    visitor.ask(say('{"answer":42}'))
    assert json.loads(page.locator(".code pre").inner_text()) == {"answer": 42}
    body = visitor.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["temperature"] == 0.2
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


INERT = """root => [...root.querySelectorAll("*")].flatMap(node => [
  ...(ALLOWED.includes(node.localName) ? [] : [node.localName]),
  ...[...node.attributes].filter(({ name, value }) => /^(on.*|style|src)$/.test(name)
    || (name === "href" && !/^(https?:|mailto:)/.test(value))).map(each => each.name + "=" + each.value)])"""
ALLOWED = (
    "a blockquote br button code del div em figcaption figure h1 h2 h3 h4 h5 h6 hr input li ol p path pre "
    "span strong svg table tbody td th thead tr ul"
)


def test_a_hundred_scripts_in_an_answer_are_inert(visit: Visit) -> None:
    assert len(set(PAYLOADS)) >= 100
    visitor = visit()
    page = visitor.page
    inert = INERT.replace("ALLOWED", json.dumps(ALLOWED.split()))
    for begin in range(0, len(PAYLOADS), 30):
        visitor.ask(say("\n\n".join(PAYLOADS[begin : begin + 30])))
        assert page.locator(".markdown").last.evaluate(inert) == []
    assert page.evaluate("window.violations") == []
    # The sanitizer alone, as if `marked` let everything through. What it parses meets the policy already.
    sanitize = f"""async payloads => {{
      const {{ sanitize }} = await import(new URL("page/markdown.js", document.baseURI));
      const box = document.body.appendChild(document.createElement("div"));
      const put = html => box.replaceChildren(sanitize(html));
      const found = payloads.flatMap(html => {{ put(html); return ({inert})(box); }});
      await new Promise(done => setTimeout(done, 100));
      return found; }}"""
    assert page.evaluate(sanitize, list(PAYLOADS)) == []
    page.evaluate("window.violations.splice(0)")
    visitor.errors[:] = [each for each in visitor.errors if "Content Security Policy" not in each]


def test_scripts_elsewhere_are_inert(visit: Visit) -> None:
    """In a question, its title, reasoning, the name and arguments of a call, and an error."""
    visitor = visit()
    script = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    visitor.ask(script + say(f"<think>\n{script}\n</think>\n\n" + script))
    visitor.page.locator("#new-chat").click()
    visitor.page.locator("#show-settings").click()
    visitor.page.fill("#set-tools", json.dumps([{"type": "function", "function": {"name": "f"}}]))
    visitor.ask(script + say(call_tool("f", {script: script})))
    visitor.open()
    assert visitor.page.locator("#chat img, #chat script").count() == 0


def test_an_error_is_said_and_the_next_try_works(visit: Visit) -> None:
    visitor = visit()
    visitor.ask("too long " * 3000)
    assert "too long" in visitor.page.locator(".status.wrong").inner_text()
    visitor.page.click("#new-chat")
    visitor.ask(say("Whole."))
    assert visitor.answer == "Whole."


def test_a_key_is_asked_for(visit: Visit, keyed: Server, browser: Any) -> None:
    visitor = Visitor(browser, keyed)
    page = visitor.page
    page.goto(keyed.url)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-input", "wrong")
    page.keyboard.press("Enter")
    visitor.until("document.getElementById('key-why').textContent.includes('refused')")
    page.fill("#key-input", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-ready]")
    visitor.ask(say("Welcome."))
    assert visitor.answer == "Welcome."
    page.click("#tab-live")
    page.wait_for_selector(".state[data-state=on]")
    visitor.check()
    visitor.close()


def test_keyboard_alone_is_enough(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.locator("#live").is_visible()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#chat").is_visible()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.keyboard.insert_text(say(LONG))
    page.keyboard.press("Enter")
    visitor.until("document.querySelector('.markdown')?.innerText.length > 5")
    page.keyboard.press("Escape")
    visitor.wait_answered()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(say("Edited."))
    page.keyboard.press("Enter")
    visitor.wait_answered()
    assert visitor.answer == "Edited."


@pytest.mark.parametrize(("locale", "tab"), [("en-GB", "Live"), ("zh-CN", "实时"), ("de-DE", "Live")])
def test_the_language_is_the_browsers(visit: Visit, locale: str, tab: str) -> None:
    page = visit(locale=locale).page
    assert page.locator("#tab-live").inner_text() == tab
    texts = page.evaluate("[...document.querySelectorAll('[data-text]')].map(node => node.textContent)")
    assert len(texts) > 10 and all(texts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_clipped_on_a_phone(visit: Visit, scheme: str) -> None:
    visitor = visit(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True)
    page = visitor.page
    visitor.ask(say(MARKDOWN + "\n" + "unbroken" * 40))
    for tab in ("chat", "live", "api"):
        page.click(f"#tab-{tab}")
        if tab == "live":
            page.wait_for_selector(".state[data-state=on]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
        assert page.evaluate(f"document.getElementById('{tab}').scrollWidth") <= 390, tab
    page.click("#tab-chat")
    page.click("#menu")
    page.locator("#conversations .title").click()
    page.wait_for_selector("#history", state="hidden")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_several_models_have_a_tab(browser: Any, tmp_path: Path) -> None:
    paths = [str(make_dense(tmp_path / f"{name}.gguf")) for name in ("small", "large")]
    log, phone = tmp_path / "log", {"width": 390, "height": 844}
    options = ("--threads", "1", "--ctx-size", "1024", "--parallel", "1")
    with Server(log, *paths, *options) as server, visiting(browser, server, viewport=phone) as visitor:
        page = visitor.page
        page.click("#tab-models")
        for name, word in (("large", "Load"), ("small", "Unload")):
            page.locator(f"[aria-label='{word} {name}']").click()
            page.wait_for_selector(f"[aria-label='{'Unload' if word == 'Load' else 'Load'} {name}']")
        states = {model["name"]: model["state"] for model in server.get("/admin/models")["models"]}
        assert states == {"small": "unloaded", "large": "ready"}
        assert page.evaluate("document.querySelector('#models .scroll').scrollWidth") <= 390


def test_the_kv_map_has_a_scale(visit: Visit, server: Server) -> None:
    """A lane that holds an eighth of its slot is not drawn as a full one."""
    server.post("/admin/cache/clear", {})
    server.generate(say("A few words."), 16)
    visitor = visit("/#live")
    lanes = "document.querySelector('.kvmap canvas:not(.swatch)').lanes()"
    visitor.until(f"{lanes}.lanes.some(each => each.lane.computed)")
    shown = visitor.page.evaluate(lanes)
    (slot,) = {each["n_ctx"] for each in server.get("/slots")}
    longest = max(each["lane"]["tokens"] for each in shown["lanes"])
    assert longest <= shown["scale"] / 4 and shown["scale"] < slot
    words = visitor.page.locator(".kvmap .scale").inner_text()
    assert f"{shown['scale']:,.0f} of the {slot:,}" in words


def test_one_model_has_no_tab(visit: Visit) -> None:
    assert not visit().page.locator("#tab-models").is_visible()


def test_the_api_tab_lists_and_tries_routes(visit: Visit) -> None:
    visitor = visit("/docs")
    page = visitor.page
    page.wait_for_selector("#api .route")
    page.locator("[id='get/health'] summary").first.click()
    page.locator("[id='get/health'] button.primary").click()
    visitor.until("document.getElementById('get/health').innerText.includes('\"status\": \"ok\"')")
    page.fill("#api input[type=search]", "/v1/chat")
    assert page.locator("#api .route:visible").count() == 1


def test_batches_are_shown_and_cancelled(visit: Visit, server: Server) -> None:
    visitor = visit("/#live")
    page = visitor.page
    assert not page.locator("#panel-batches").is_visible()
    body = {"prompt": say("word " * 400), "max_tokens": 400}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(200)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("night.jsonl", content)}}
    file = server.client.post("/v1/files", **form).json()["id"]
    server.post("/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions"})
    page.wait_for_selector("#panel-batches button")
    assert "/ 200" in page.locator("#panel-batches").inner_text()
    page.locator("#panel-batches button").click()
    visitor.until("document.getElementById('panel-batches').innerText.includes('cancelled')")

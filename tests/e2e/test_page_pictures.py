"""Pictures in the chat page, in a real Chromium, on a tiny model with an mmproj."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama.library import load
from cllm.errors import LibraryError
from tests.driver.browser import Visitor, visiting
from tests.driver.media import make_file, make_text, make_url
from tests.driver.server import Server, wait_for
from tests.tiny_media import make_causal

SHORT = {"name": "cllm.settings", "value": json.dumps({"max_tokens": 4, "temperature": 0})}
# Put a picture into the clipboard of the system.
COPY = """async text => {
  const data = Uint8Array.from(atob(text), each => each.charCodeAt(0)), type = "image/png";
  await navigator.clipboard.write([new ClipboardItem({ [type]: new Blob([data], { type }) })]); }"""
# Drop a file on the messages, of some bytes and zeros behind them.
DROP = """async ([text, type, name, zeros = 0]) => {
  const data = Uint8Array.from(atob(text), each => each.charCodeAt(0)), dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([data, new Uint8Array(zeros)], name, { type }));
  for (const kind of ["dragover", "drop"]) document.getElementById("messages")
    .dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true })); }"""
STORED = """new Promise(done => {
  const asked = indexedDB.open("cllm.pictures", 1);
  asked.onsuccess = () => {
    const files = asked.result.transaction("files").objectStore("files").count();
    files.onsuccess = () => { asked.result.close(); done(files.result); };
  }; })"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        load().load_media()
    except LibraryError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("page_pictures")
    files = make_causal(folder)
    options = ("--mmproj", str(files.mmproj), "--parallel", "4", "--ctx-size", "4096")
    with Server(folder / "log", str(files.model), *options) as server:
        yield server


@pytest.fixture
def visitor(browser: Any, server: Server) -> Iterator[Visitor]:
    """A visitor whose answers are short."""
    state = {"origins": [{"origin": server.url, "localStorage": [SHORT]}]}
    with visiting(browser, server, storage_state=state) as visitor:
        yield visitor


def make_upload(seed: int, name: str = "") -> Any:
    return {"name": name or f"{seed}.png", "mimeType": "image/png", "buffer": make_file(seed)}


def attach(visitor: Visitor, *files: Any) -> None:
    """Choose files by the button's field; they are attached and drawn when this returns."""
    before = visitor.page.locator("#attached .tile").count()
    visitor.page.set_input_files("#picture-files", list(files))
    wait_attached(visitor, before + len(files))


def wait_attached(visitor: Visitor, count: int) -> None:
    visitor.until(f"document.querySelectorAll('#attached .drawn').length === {count}")
    assert visitor.page.locator("#attached .tile").count() == count


def wait_shown(visitor: Visitor, count: int) -> None:
    visitor.until(f"document.querySelectorAll('.message .drawn').length === {count}")


def list_urls(message: dict[str, Any]) -> list[str]:
    """The pictures of a message that was sent."""
    return [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]


def test_a_pasted_picture_is_shown_sent_and_kept(visitor: Visitor, server: Server) -> None:
    page = visitor.page
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate(COPY, make_text(make_file(1)))
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    wait_attached(visitor, 1)
    page.click("#show-settings")
    page.fill("#set-max_tokens", "")
    visitor.ask("What is this?", wait=False)
    visitor.until("document.querySelector('.markdown')?.innerText.length > 20")
    page.click("#stop")
    visitor.wait_answered()
    wait_for(server.idle, 5)
    assert "Stopped" in page.locator(".figures").last.inner_text()
    assert not page.locator("#attached").is_visible()
    page.fill("#set-max_tokens", "4")
    page.locator(".again").click()
    visitor.wait_answered()
    visitor.ask("And now?")
    (url,) = list_urls(visitor.bodies[0]["messages"][0])
    assert url.startswith("data:image/png;base64,")
    assert visitor.bodies[0]["messages"][0]["content"][-1] == {"type": "text", "text": "What is this?"}
    first, answer, last = visitor.bodies[-1]["messages"]
    assert first == visitor.bodies[0]["messages"][0] and len(visitor.bodies) == 3
    assert answer["content"] and last["content"] == "And now?"
    assert "from cache" in page.locator(".figures").last.inner_text()
    visitor.open()
    wait_shown(visitor, 1)
    visitor.ask("Is it still there?")
    assert visitor.bodies[-1]["messages"][0] == first
    page.click("[aria-label='Enlarge image.png']")
    assert page.locator("dialog.enlarged img").get_attribute("src") == url
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.enlarged", state="detached")


def test_what_is_attached_is_kept_until_it_is_sent_or_removed(visitor: Visitor) -> None:
    page = visitor.page
    page.evaluate(DROP, [make_text(make_file(1)), "image/png", "dropped.png"])
    wait_attached(visitor, 1)
    with page.expect_file_chooser() as chooser:
        page.locator("#add-pictures").press("Enter")
    assert chooser.value.is_multiple()
    chooser.value.set_files([make_upload(2), make_upload(3)])
    wait_attached(visitor, 3)
    visitor.open()
    wait_attached(visitor, 3)
    other = Visitor(None, visitor.server, context=visitor.context).open()
    wait_attached(other, 3)
    page.click("#new-chat")
    assert not page.locator("#attached").is_visible()
    page.locator("#conversations .title").click()
    page.locator("[aria-label='Remove 2.png']").press("Enter")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove 3.png"
    wait_attached(other, 2)
    visitor.ask("")
    assert list_urls(visitor.bodies[-1]["messages"][0]) == [make_url(make_file(seed)) for seed in (1, 3)]
    wait_shown(visitor, 2)
    other.until("document.querySelectorAll('#attached .tile').length === 0")
    wait_shown(other, 2)
    assert page.locator("#conversations .title").inner_text() == "Picture"
    assert page.evaluate(STORED) == 2
    other.check()


def test_an_edit_keeps_the_pictures_that_are_not_removed(visitor: Visitor) -> None:
    page = visitor.page
    attach(visitor, make_upload(1), make_upload(2))
    visitor.ask("Which?")
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    page.locator(".edited [aria-label='Remove 1.png']").click()
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove 2.png"
    page.fill(".editing", "And this?")
    page.keyboard.press("Enter")
    visitor.wait_answered()
    assert list_urls(visitor.bodies[-1]["messages"][0]) == [make_url(make_file(2))]
    page.locator(".message.user .earlier").click()
    wait_shown(visitor, 2)


def test_exports_have_pictures_and_deleting_leaves_none(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.page
    attach(visitor, make_upload(1))
    visitor.ask("One.")
    attach(visitor, make_upload(2))  # not sent
    page.click("#new-chat")
    attach(visitor, make_upload(3))
    visitor.ask("Three.")
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "exported.json"
    download.value.save_as(path)
    exported = json.loads(path.read_text())
    urls = [make_url(make_file(seed)) for seed in (3, 1)]
    assert [list(each["pictures"].values()) for each in exported] == [[url] for url in urls]
    assert page.evaluate(STORED) == 3
    page.locator("#conversations li").last.hover()
    page.locator("#conversations .delete").last.click()
    page.click("#ask-ok")
    visitor.until(STORED.join(("(async () => await ", " === 1)()")))
    page.click("#delete-all")
    page.click("#ask-ok")
    visitor.until(STORED.join(("(async () => await ", " === 0)()")))
    (picture,) = exported[0]["pictures"]
    hostile = ("http://localhost/cat.png", "data:text/html;base64,AA==", "data:image/png;base64,%", None)
    for number, url in enumerate(hostile):
        wrong = tmp_path / f"{number}.json"
        wrong.write_text(json.dumps([{**exported[0], "pictures": {picture: url}}]))
        page.set_input_files("#import-file", wrong)
        page.wait_for_selector(f"#notice:has-text('{number}.json was not imported')")
    page.set_input_files("#import-file", path)
    page.wait_for_selector("#notice:has-text('Imported: 2')")
    wait_shown(visitor, 1)
    visitor.ask("Again?")
    assert list_urls(visitor.bodies[-1]["messages"][0]) == urls[:1]
    assert page.evaluate(STORED) == 2
    page.click("#delete-all")
    page.click("#ask-ok")
    path.write_text(json.dumps({**exported[0], "pictures": {}}))
    page.set_input_files("#import-file", path)
    page.wait_for_selector(".message .gone:has-text('3.png cannot be shown')")


def test_files_over_a_limit_are_refused_before_they_are_sent(visitor: Visitor) -> None:
    page = visitor.page
    page.evaluate(DROP, [make_text(b"%PDF-1.7"), "application/pdf", "paper.pdf"])
    page.wait_for_selector("#notice:has-text('Not added: paper.pdf. A picture is a JPEG, PNG, WebP or GIF')")
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": make_file(1)[:60]}
    page.set_input_files("#picture-files", [broken, make_upload(1)])
    page.wait_for_selector("#notice:has-text('Not added: broken.png. It cannot be read')")
    wait_attached(visitor, 1)
    limit = 20 << 20
    page.evaluate(DROP, [make_text(make_file(1)), "image/png", "large.png", limit - len(make_file(1)) + 1])
    page.wait_for_selector("#notice:has-text('Not added: large.png. A picture has at most 20 MiB')")
    assert page.locator("#attached .tile").count() == 1
    visitor.ask("First.")
    page.set_input_files("#picture-files", [make_upload(seed) for seed in range(32)])
    page.wait_for_selector("#notice:has-text('Not added: 31.png. A conversation sends at most 32 pictures')")
    assert page.locator("#attached .tile").count() == 31
    assert page.evaluate(STORED) == 32


def test_an_error_of_the_server_is_shown_and_trying_again_helps(visitor: Visitor) -> None:
    page = visitor.page
    attach(visitor, make_upload(1))
    error = {"error": {"message": "picture 1 is too much", "code": "invalid_media"}}
    statuses = [400, 413]
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=statuses.pop(0), json=error))
    visitor.ask("What?")
    assert page.locator(".status.wrong").inner_text() == "picture 1 is too much"
    page.click(".continue")
    page.wait_for_selector(".status.wrong:has-text('remove pictures, or start a new chat')")
    visitor.wait_answered()
    page.unroute("**/v1/chat/completions")
    page.click(".continue")
    visitor.until("document.querySelector('.markdown').innerText.length > 0")
    visitor.wait_answered()
    assert visitor.bodies[-1]["messages"] == visitor.bodies[0]["messages"]


def test_pictures_are_sent_where_the_browser_keeps_none(visitor: Visitor) -> None:
    visitor.context.add_init_script("IDBFactory.prototype.open = () => { throw new Error('no storage'); }")
    visitor.open()
    attach(visitor, make_upload(1))
    visitor.ask("What?")
    assert list_urls(visitor.bodies[-1]["messages"][0]) == [make_url(make_file(1))]
    assert "keeps no conversations" in visitor.page.locator("#notice").inner_text()


def test_a_model_without_vision_refuses_pictures(visitor: Visitor) -> None:
    page = visitor.page
    attach(visitor, make_upload(1))
    loaded = [True]

    def blind(route: Any) -> None:
        found = route.fetch().json()
        found["data"][0]["capabilities"].remove("vision")
        found["data"][0]["loaded"] = loaded[0]
        route.fulfill(json=found)

    page.route("**/v1/models", blind)
    visitor.open()
    page.evaluate(DROP, [make_text(make_file(2)), "image/png", "dropped.png"])
    assert "takes text only" in page.locator("#notice").inner_text()
    assert "--mmproj" in page.locator("#notice").inner_text()
    wait_attached(visitor, 1)
    page.fill("#prompt", "What?")
    page.click("#send")
    assert "--mmproj" in page.locator("#notice").inner_text()
    assert not visitor.bodies and page.input_value("#prompt") == "What?"
    page.click("[aria-label='Remove 1.png']")
    visitor.ask("Text alone.")
    assert visitor.bodies[-1]["messages"] == [{"role": "user", "content": "Text alone."}]
    page.evaluate(DROP, [make_text(b"\0"), "", "some.bin"])
    page.wait_for_selector("#notice:has-text('Not added: some.bin')")
    loaded[0] = False  # it is not known yet whether it takes pictures
    visitor.open()
    attach(visitor, make_upload(3))


def test_pictures_fit_on_a_phone(visitor: Visitor) -> None:
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    wide = {**make_upload(1), "buffer": make_file(1, width=2000, height=100)}
    attach(visitor, wide, *(make_upload(seed) for seed in range(7)))
    visitor.ask("What are they?")
    attach(visitor, wide)
    for part in ("document.documentElement", "document.getElementById('messages')"):
        assert visitor.page.evaluate(f"{part}.scrollWidth") <= 390
    visitor.ask("And this one?")
    assert visitor.page.evaluate("document.getElementById('messages').scrollWidth") <= 390

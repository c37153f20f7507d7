"""A real Chromium on the page of a server: one browser for all tests, a visitor for each."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.driver.server import Server

LIMIT_MS = 20_000
NAMES = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = "there is no Chromium here: apt-get install chromium"
# Of Playwright's own list, what matters here; and the address bar's pages, a renderer for each window.
FEATURES_OFF = (
    "AvoidUnnecessaryBeforeUnloadCheckSync,MediaRouter,PaintHolding,"
    "WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,WebUIOmniboxPopup"
)
# What breaks the content policy, and scripts that should not have run.
WATCH = """
window.violations = [];
window.alarms = [];
document.addEventListener("securitypolicyviolation", event =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
for (const name of ["alert", "confirm", "prompt"])
  window[name] = text => { window.alarms.push(String(text)); };
"""


def find_chromium() -> str:
    """The system's Chromium; skips the test where there is none, or no Playwright to drive it."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(NO_BROWSER)
    return found


@contextmanager
def open_browser() -> Iterator[Any]:
    """A headless Chromium."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    flags = ["--disable-dev-shm-usage", "--disable-gpu", f"--disable-features={FEATURES_OFF}"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A page of a server in a browser context of its own, and all that it did."""

    def __init__(self, browser: Any, server: Server, *, context: Any = None, **options: Any) -> None:
        """With a `context` it is one more tab of that."""
        self.server = server
        self.context = context
        if context is None:
            self.context = browser.new_context(**{"locale": "en-US", "accept_downloads": True, **options})
            self.context.add_init_script(WATCH)
            self.context.set_default_timeout(LIMIT_MS)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.bodies: list[dict[str, Any]] = []  # of requests for answers
        self.errors: list[str] = []
        self.page.on("request", self._requested)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._said)

    def _requested(self, request: Any) -> None:
        self.requests.append(request.url)
        if request.url.endswith("/v1/chat/completions") and request.method == "POST":
            self.bodies.append(request.post_data_json)

    def _said(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def open(self, path: str = "/") -> Visitor:
        self.page.goto(self.server.url + path)
        self.page.wait_for_selector("html[data-ready]")
        return self

    def ask(self, text: str, *, wait: bool = True) -> None:
        """Send a message; the answer is there when this returns."""
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")
        if wait:
            self.wait_answered()

    def until(self, expression: str) -> None:
        """Wait until an expression is true. (Playwright's own way needs `eval`, which the policy forbids.)"""
        deadline = time.monotonic() + LIMIT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"not true in time: {expression}"
            self.page.wait_for_timeout(20)

    def wait_answered(self) -> None:
        self.page.wait_for_selector("#send:visible")

    @property
    def answer(self) -> str:
        """The text of the last answer."""
        return str(self.page.locator(".message.assistant .markdown").last.inner_text())

    def check(self) -> None:
        """It asked its own server alone, kept the policy, and nothing went wrong."""
        foreign = [url for url in self.requests if not url.startswith((self.server.url, "data:", "blob:"))]
        assert not foreign, foreign
        assert self.page.evaluate("window.violations") == []
        assert self.page.evaluate("window.alarms") == []
        assert self.errors == []

    def close(self) -> None:
        self.context.close()


@contextmanager
def visiting(browser: Any, server: Server, path: str = "/", **options: Any) -> Iterator[Visitor]:
    """A visitor on an open page; what it did is checked at the end."""
    visitor = Visitor(browser, server, **options)
    try:
        yield visitor.open(path)
        visitor.check()
    finally:
        visitor.close()

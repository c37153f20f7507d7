"""Make the screenshots of the page in docs/images: those that a document shows (`SHOWN`).

python scripts/screenshots.py [FOLDER]   (make screenshots)

They show the scripted model under a scripted load: the same page as with any other.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cllm.testing import say  # noqa: E402
from tests.driver.browser import Visitor, open_browser  # noqa: E402
from tests.driver.server import Server  # noqa: E402
from tests.e2e.golden.record import scripted_server  # noqa: E402

SIZES = {1280: 800, 390: 844}
SCHEMES = ("light", "dark")
SHOWN = (  # tab, width and scheme of each
    *("chat-1280-light.png", "live-1280-light.png", "live-kv-1280-dark.png", "models-1280-light.png"),
    *("api-1280-light.png", "chat-390-dark.png", "live-390-light.png"),
)
SETTINGS = ("--step-ms", "20", "--parallel", "12", "--ctx-size", "24576")
WARM_S = 60
MAX_BYTES = 150_000
QUESTION = "How does continuous batching keep latency flat?"
ANSWER = """Sequences **join and leave the batch at every step**, so a short answer never waits
for a long one.

1. The scheduler takes running sequences first, one token each.
2. What is left of the step's time goes to prompts, in chunks.
3. A sequence that ends frees its slot in the same step.

```python
while requests:
    batch = scheduler.schedule()
    result = runner.compute(batch)
    scheduler.update(result)
```

The cost of a step depends on what runs *now*, not on how many requests came before.
"""
WORDS = ("a", "server", "answers", "many", "readers", "while", "memory", "keeps", "computed", "prefixes")


def list_models() -> dict[str, Any]:
    """As /admin/models answers where several are served; the scripted server has one."""

    def describe(name: str, kind: str, state: str, gib: float, used_s: float | None) -> dict[str, Any]:
        last_used = None if used_s is None else time.time() - used_s
        facts = {"architecture": kind, "quantization": "Q4_K_M", "context": 32768, "slots": 8, "error": ""}
        memory = {"host": int(gib * 2**30)}
        return {"name": name, "state": state, "memory_bytes": memory, "last_used": last_used, **facts}

    models = [
        {**describe("Qwen3-8B", "qwen3", "ready", 6.4, 2), "default": True},
        describe("SmolLM2-135M-Instruct", "llama", "ready", 0.4, 340),
        describe("gemma-3-12b-it", "gemma3", "loading", 9.1, 4),
        describe("Qwen3-Coder-30B-A3B", "qwen3moe", "unloaded", 19.2, None),
    ]
    taken, limit = {"host": int(15.9 * 2**30)}, {"host": 24 * 2**30}
    return {"models": models, "memory_bytes": taken, "memory_limit_bytes": limit}


class Load:
    """Clients that ask again and again, until they are stopped."""

    def __init__(self, server: Server, clients: int) -> None:
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, seed: int) -> None:
        drawn = random.Random(seed)
        history: list[dict[str, str]] = []
        with httpx.Client(base_url=self._server.url, timeout=60, trust_env=False) as client:
            while not self._over.is_set():
                text = " ".join(drawn.choices(WORDS, k=drawn.randint(2, 16)))
                ask = " ".join(drawn.choices(WORDS, k=drawn.randint(4, 40)))
                history = [*history[: 2 * drawn.randint(0, 5)], {"role": "user", "content": ask + say(text)}]
                answer = client.post("/v1/chat/completions", json={"messages": history, "max_tokens": 400})
                if answer.status_code == 200:
                    content = answer.json()["choices"][0]["message"]["content"]
                    history.append({"role": "assistant", "content": content})
                self._over.wait(drawn.random())


def take(page: Any, path: Path) -> None:
    if path.name not in SHOWN:
        return
    page.screenshot(path=path)
    assert path.stat().st_size <= MAX_BYTES, f"{path.name} has {path.stat().st_size} bytes"
    print(path.name, path.stat().st_size)


def visit(browser: Any, server: Server, folder: Path, width: int, scheme: str) -> None:
    options = {"viewport": {"width": width, "height": SIZES[width]}, "color_scheme": scheme}
    visitor = Visitor(browser, server, reduced_motion="reduce", **options)
    visitor.context.set_default_timeout(90_000)
    visitor.context.route("**/admin/models", lambda route: route.fulfill(json=list_models()))
    visitor.open()
    page = visitor.page
    name = f"{width}-{scheme}.png"
    talk(visitor, width)
    take(page, folder / f"chat-{name}")
    page.click("#tab-live")
    page.wait_for_selector(".state[data-state=on]")
    page.wait_for_timeout(2500)
    take(page, folder / f"live-{name}")
    if width > 700:
        page.evaluate("document.getElementById('panel-kv').scrollIntoView()")
        page.wait_for_timeout(1200)
        take(page, folder / f"live-kv-{name}")
    page.click("#tab-models")
    page.wait_for_selector("#models tbody tr")
    take(page, folder / f"models-{name}")
    page.click("#tab-api")
    page.wait_for_selector("#api .route")
    take(page, folder / f"api-{name}")
    visitor.check()
    visitor.close()


def talk(visitor: Visitor, width: int) -> None:
    page = visitor.page
    for title in ("Rename files by date", "Explain this traceback", "Draft a release note"):
        visitor.ask(title + say("Done."))
        page.evaluate("document.getElementById('new-chat').click()")
    visitor.ask(QUESTION + say(ANSWER))
    page.evaluate(
        """() => { for (const node of document.querySelectorAll(".plain, #conversations .title"))
        node.textContent = node.textContent.replace(/\\u0002[^]*/, ""); }"""
    )
    page.mouse.move(width / 2, 5)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as logs,
        scripted_server(Path(logs) / "log", *SETTINGS) as server,
        open_browser() as browser,
        Load(server, 9),
    ):
        threading.Event().wait(WARM_S)
        for width in SIZES:
            for scheme in SCHEMES:
                visit(browser, server, folder, width, scheme)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A hostile hub: every answer mutated, 500 times each, and nothing outside the cache touched.

A process lists, searches, pulls and removes models of a hub on loopback whose answers are mutated one kind at
a time: other bytes, paths that lead elsewhere, control characters, numbers out of bounds, bombs, headers and
redirects. An audit hook in it reports every file that is opened to be written, renamed, linked or removed
outside of its caches; a canary beside them must stay as it is. Errors must be HubErrors without control
characters. Its memory may grow by 100 MiB at most over what it is before the first mutation.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from proof.command import make_parser
from tests.driver.hub import FakeHub
from tests.tiny_models import make_dense

REPO, NAME = "Example/Tiny", "tiny-Q8_0.gguf"
MAX_MIB = 100
LIMIT_S = 120.0  # of one mutation
KINDS = {  # of answers, by their paths
    "revision": r"/api/models/.*/revision/.*",
    "tree": r"/api/models/.*/tree/.*",
    "search": r"/api/models\?.*",
    "modelscope": r"/api/v1/models/.*/repo/files.*",
    "redirect": r"/.*/resolve/.*",
    "file": r"/signed/.*",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
TEXTS = (
    *(
        "../../outside/canary",
        "/etc/passwd",
        "..",
        "a/../../b.gguf",
        "\\..\\x",
        "C:\\x",
        "-rf",
        "~root/.bashrc",
    ),
    *(
        "\x1b]0;owned\x07",
        "\x9b2J",
        "\u202egnp.gguf",
        "a\nb.gguf",
        "\0",
        "",
        " ",
        "x" * 5000,
        "%2e%2e%2f",
        "{0}%s",
    ),
)
NUMBERS: tuple[Any, ...] = (-1, 0, 1, 2**31, 2**53, 2**63, 10**400, -(10**400), 1.5, True, None, [], {}, "7")
Answer = tuple[int, dict[str, str], bytes]
Change = Callable[[random.Random, int, dict[str, str], bytes], Answer]


def change_bytes(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    data = bytearray(body or b"x")
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return status, headers, bytes(data)


def cut(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    body = body[: chance.randrange(len(body) + 1)]
    return status, {**headers, "Content-Length": str(len(body))} if chance.random() < 0.5 else headers, body


def lengthen(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    body += body * chance.choice((1, 1000)) + bytes(chance.choice((1, 16 << 20)))
    return status, {**headers, "Content-Length": str(len(body))}, body


def change_value(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    """Replace a value of the JSON, or a key, by one that leads elsewhere."""
    try:
        value = json.loads(body)
    except ValueError:
        return change_bytes(chance, status, headers, body)
    places: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        each = left.pop()
        found = list(each.items() if isinstance(each, dict) else enumerate(each))
        places += [(each, key) for key, _ in found]
        left += [inner for _, inner in found if isinstance(inner, dict | list)]
    if places:
        holder, key = chance.choice(places)
        holder[key] = chance.choice((*TEXTS, *NUMBERS))
        if isinstance(holder, dict) and chance.random() < 0.2:
            holder[chance.choice(TEXTS)] = holder.pop(key)
    body = json.dumps(value).encode()
    return status, {**headers, "Content-Length": str(len(body))}, body


def bomb(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    piece = chance.choice((b"{},", b"[", b'{"a":', b"0," * 10, b'"\\u0000",'))
    body = b"[" + piece * ((24 << 20) // len(piece))
    if chance.random() < 0.5:
        body, headers = (
            gzip.compress(body, 1),
            {**headers, "Content-Encoding": chance.choice(("gzip", "br, gzip"))},
        )
    return status, {**headers, "Content-Length": str(len(body))}, body


def change_headers(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    name = chance.choice(
        (
            "Link",
            "Content-Range",
            "Content-Length",
            "Content-Type",
            "X-Error-Code",
            "Retry-After",
            "ETag",
            "Location",
        )
    )
    values = (
        *(
            '<http://169.254.0.1/x>; rel="next"',
            '<../../x>; rel="next"',
            "<" * 9000,
            "bytes 0-0/1",
            "bytes */*",
        ),
        *(
            "-1",
            "0",
            "99999999999",
            "gzip",
            "text/html",
            "GatedRepo",
            "RevisionNotFound",
            "a" * 200_000,
            "\x1b[2J",
        ),
    )
    return status, {**headers, name: chance.choice(values)}, body


def redirect(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    target = chance.choice(
        (
            "file:///etc/passwd",
            "/",
            "//127.0.0.1:1/x",
            "http://[::1",
            "gopher://x",
            "x" * 9000,
            "\x1b[2J",
            "http://a@b@c/",
        )
    )
    body = bytes(chance.choice((0, 8 << 20)))
    return chance.choice((301, 302, 307, 308)), {"Location": target, "Content-Length": str(len(body))}, body


def change_status(chance: random.Random, status: int, headers: dict[str, str], body: bytes) -> Answer:
    return (
        chance.choice((200, 201, 204, 206, 304, 400, 401, 403, 404, 410, 416, 418, 429, 500, 503)),
        headers,
        body,
    )


CHANGES: tuple[Change, ...] = (
    *(change_value,) * 6,
    *(change_bytes, cut, lengthen, bomb, change_headers, change_headers, redirect, change_status),
)


def read_peak_mib() -> int:
    """The largest memory of this process so far. What `getrusage` says includes that of its parent."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) >> 10


class Worker:
    """The process that asks the hub: everything that a hub's answers can lead to."""

    def __init__(self, caches: Path) -> None:
        self.caches = caches
        self.touched: list[str] = []  # outside of the caches
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        path: Any = None
        if event == "open":
            given, mode, flags = arguments
            path = given if flags & _WRITES or set(mode or "") & set("wax+") else None
        elif event in ("os.rename", "os.link", "os.symlink"):
            path = arguments[1]
        elif event in ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "shutil.rmtree"):
            path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        # Names in an open folder (`rmtree` has them) are relative to it.
        inner = event in ("os.remove", "os.rmdir") and arguments[1] not in (None, -1)
        place = Path(f"/proc/self/fd/{arguments[1]}" if inner else ".", os.fsdecode(path))
        place = place.parent.resolve() / place.name
        if self.caches not in (place, *place.parents) and str(place) != os.devnull:
            self.touched.append(f"{event} {place}")

    def serve(self, pipe: Connection) -> None:
        """Run the cases that are asked for: answer with the outcome and the largest memory so far, MiB."""
        while (kind := pipe.recv()) is not None:
            outcome = self._run(kind)
            pipe.send((outcome, read_peak_mib(), self.touched[:3]))

    def _run(self, kind: str) -> str:
        from cllm.errors import SetupError
        from cllm.models.files import HubReference
        from cllm.models.hub import make_hub
        from cllm.models.pull import Pull, PullOptions, find_model
        from cllm.models.store import find_stored, plan_removal, remove

        reference = HubReference("ms" if kind == "modelscope" else "hf", REPO)
        try:
            with make_hub(reference) as hub:
                if kind == "search":
                    return f"{len(hub.search('tiny', 5)) and 'found'}"
                Pull(hub, reference, find_model(hub, reference), PullOptions(connections=1)).run()
            if (stored := find_stored(reference)) is not None:
                remove(stored, plan_removal(stored))
            return "pulled"
        except SetupError as error:
            text = str(error)
            return "refused" if text.isprintable() else f"prints control characters: {text!r}"
        except Exception as error:
            return f"raises {type(error).__name__}: {error!r:.200}"


def work(pipe: Connection, caches: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    tempfile.tempdir = str(caches)
    from cllm.models import download, hub

    hub.LIST_BACKOFF_S = download.BACKOFF_S = 0.001
    for module in (hub, download):
        vars(module)["MAX_RETRY_AFTER_S"] = 0.01
    hub.LIST_TIMEOUT_S = download.TIMEOUT_S = 2.0
    Worker(caches).serve(pipe)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, mutations=(500, "of each answer"), seed=(1, "of the mutations"))
    options = parser.parse_args(arguments)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text).resolve()
        caches, canary = folder / "caches", folder / "outside" / "canary"
        caches.mkdir()
        canary.parent.mkdir()
        canary.write_text("as it was")
        model = make_dense(folder / "tiny.gguf").read_bytes()
        with FakeHub({REPO: {NAME: model, "README.md": b"# Tiny"}}) as hub:
            homes = {"HOME": caches, "HF_HOME": caches / "hf", "MODELSCOPE_CACHE": caches / "ms"}
            variables = {
                **hub.environment,
                **{name: str(path) for name, path in homes.items()},
                "HF_TOKEN": "",
            }
            spawn = multiprocessing.get_context("spawn")
            pipe, other = spawn.Pipe()
            process = spawn.Process(target=work, args=(other, caches, variables), daemon=True)
            process.start()
            try:
                idle = 0
                for kind in ("revision", "modelscope", "search"):  # without mutations
                    outcome, idle, touched = ask(pipe, kind)
                    assert outcome in ("pulled", "found") and not touched, (kind, outcome, touched)
                largest = idle
                for kind in KINDS:
                    outcomes: Counter[str] = Counter()
                    for number in range(options.mutations):
                        hub.mutate = make_mutation(kind, random.Random(f"{options.seed} {kind} {number}"))
                        outcome, largest, touched = ask(pipe, kind)
                        outcomes[outcome.partition(":")[0]] += 1
                        if touched or outcome not in ("pulled", "found", "refused", "0"):
                            failures.append(f"{kind} {number}: {outcome} {touched}")
                    print(f"{kind:12} {dict(outcomes)}, {largest - idle} MiB above idle", flush=True)
            finally:
                pipe.send(None)
                process.join(10)
        if canary.read_text() != "as it was" or [*canary.parent.iterdir()] != [canary]:
            failures.append("the canary has changed")
    print(*failures[:20], sep="\n")
    print(f"memory: {largest - idle} MiB above idle (bar {MAX_MIB}); failures: {len(failures)}")
    return 0 if not failures and largest - idle <= MAX_MIB else 1


def ask(pipe: Connection, kind: str) -> tuple[str, int, list[str]]:
    """Have the worker run one case. Raises TimeoutError where it does not end."""
    pipe.send(kind)
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"{kind}: no end within {LIMIT_S:.0f} s")
    found: tuple[str, int, list[str]] = pipe.recv()
    return found


def make_mutation(kind: str, chance: random.Random) -> Callable[[str, int, dict[str, str], bytes], Answer]:
    """Mutate the answers of one kind; the others are as they should be."""
    change = chance.choice(CHANGES)

    def mutate(path: str, status: int, headers: dict[str, str], body: bytes) -> Answer:
        if re.fullmatch(KINDS[kind], path) is None:
            return status, headers, body
        return change(chance, status, dict(headers), body)

    return mutate

"""`make stats`: the countable properties of the code, each beside its bar.

    python scripts/stats.py [--root CHECKOUT] [--json] [--list] [--static]

Exit code 1 when a bar is missed. `--static` reads the sources only; without it a server with the embedded
model is started, and one warm request is traced in all of its processes (`sys.setprofile`, installed by a
`sitecustomize` module on the children's path, so the code under measurement knows nothing of it).
"""

from __future__ import annotations

import argparse
import ast
import http.client
import json
import mmap
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUEST_PACKAGES = ("core", "frontend", "workers", "messages.py")
NOT_RUNTIME = {"gguf.py", "memory.py", "probe.py", "fingerprint.py", "dry_load.py"}  # at start-up only
# Bars of the tree as it is. They rise only in a commit that says for what.
MAX_FILES = 190
MAX_LINES = 44_000
MAX_REQUEST_LINES = 15_435
MAX_FUNCTION = 60
MAX_LITERALS = 41
MAX_TARGETS = 25  # of make
MAX_FRAMES = 4  # Prepare, Prepared, Submit, StepReport
MAX_ENTERED = 226  # functions, by one request
MAX_MODULES = 84  # in the HTTP process: each API has its own
MAX_TEST_LINES = 72_825
PLAIN_NUMBERS = {-1, 0, 1, 2}
FORBIDDEN = {
    "guess": r"guess",
    "park": r"(?<!s)park",  # not "spark"
    "told": r"told",
    "MOST_": r"most_(?!common)",  # not Counter.most_common
    "LEAST_": r"least_",
    "nobody, somebody, everybody": r"(?:no|some|every)body",
}
EXPECTED = ("speculative", "prefix cache", "preempt")
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}
NATIVE = ("llguidance", "cllm.backend.llama.library", "cllm.core", "cllm.engine.loop")
ROUNDS = 9
SETTLE_S = 0.3  # what a request leaves to be done after its answer
START_LIMIT_S = 180.0
CHATS = 101  # the first window of a chat with tools
COMPLETION = {"model": "default", "prompt": "Once upon a time", "max_tokens": 1}
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "tools": [{"type": "function", "function": TOOL}],
    "max_tokens": 1,
}
Function = tuple[str, str, int]  # file, qualified name, first line

# Runs in every process of the server. A byte that all processes map says what is recorded: the number of a
# window, 0 for none, 255 for "write what you have".
HOOK = """
import json, mmap, os, sys, threading, time
_dir = os.environ.get("CLLM_STATS_DIR")
if _dir:
    with open(os.path.join(_dir, "window"), "r+b") as _file:
        _window = mmap.mmap(_file.fileno(), 1)
    _root, _seen, _sent = os.environ["CLLM_STATS_ROOT"], set(), []

    def _hook(frame, event, arg):
        if event == "call" and _window[0] and frame.f_code.co_filename.startswith(_root):
            _seen.add((_window[0], frame.f_code))
            sends = frame.f_code.co_qualname in ("Channel.send", "WorkerProcess.send")
            if sends and frame.f_back.f_code.co_name != "beat":  # a heartbeat is of no request
                _sent.append(_window[0])

    def _report():
        while _window[0] != 255:
            time.sleep(0.05)
        sys.setprofile(None)
        found = [[w, c.co_filename, c.co_qualname, c.co_firstlineno] for w, c in list(_seen)]
        entry = {"argv": sys.argv, "seen": found, "sent": _sent, "modules": sorted(sys.modules)}
        path = os.path.join(_dir, f"{os.getpid()}.json")
        with open(path + ".part", "w") as file:
            json.dump(entry, file)
        os.replace(path + ".part", path)

    threading.Thread(target=_report, daemon=True).start()
    threading.setprofile(_hook)
    sys.setprofile(_hook)
"""


@dataclass
class Figure:
    """One row of the table."""

    name: str
    value: object
    bar: str = ""
    met: bool = True
    details: list[str] = field(default_factory=list)

    @classmethod
    def at_most(cls, name: str, value: float, bar: float, details: list[str] | None = None) -> Figure:
        return cls(name, value, f"≤ {bar:,}", value <= bar, details or [])


def lines_in(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions_in(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first line (of the decorators, as code objects have it) and length of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            yield node.name, first, (node.end_lineno or node.lineno) - node.lineno + 1


def carries_request(relative: Path) -> bool:
    """Part of what a request passes: scheduler, front end, processes, the backend at run time."""
    parts = relative.parts
    if parts[0] == "backend":
        runtime = parts[1:2] == ("llama",) and relative.name not in NOT_RUNTIME
        return relative.name == "base.py" or runtime
    return parts[0] in REQUEST_PACKAGES


def numeric_literals(path: Path) -> Iterator[tuple[int, int | float]]:
    """Line and value of every number that is not one of PLAIN_NUMBERS; `-x` is one number."""
    tree = ast.parse(path.read_text())
    negated = {
        id(node.operand)
        for node in ast.walk(tree)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            number: Any = node.value
            value = -number if id(node) in negated else number
            if value not in PLAIN_NUMBERS:
                yield node.lineno, value


def size_figures(root: Path, files: list[Path]) -> list[Figure]:
    """Files, lines and functions."""
    package = root / "cllm"
    sizes = sorted(((lines_in(path), str(path.relative_to(root))) for path in files), reverse=True)
    functions = sorted(
        (
            (length, f"{path.relative_to(root)}:{line} {name}")
            for path in files
            for name, line, length in functions_in(path)
        ),
        reverse=True,
    )
    request = sum(lines_in(path) for path in files if carries_request(path.relative_to(package)))
    too_long = [f"{length:4} {name}" for length, name in functions if length > 60]
    return [
        Figure.at_most("shipped files", len(files), MAX_FILES),
        Figure.at_most("shipped lines", sum(size for size, _ in sizes), MAX_LINES),
        Figure.at_most("lines, largest file", sizes[0][0], 600, [f"{n:4} {name}" for n, name in sizes[:12]]),
        Figure.at_most("… that carry a request", request, MAX_REQUEST_LINES),
        Figure.at_most("lines, longest function", functions[0][0], MAX_FUNCTION, too_long),
        Figure("lines, median function", statistics.median(length for length, _ in functions), "6–10"),
    ]


def name_figures(root: Path, files: list[Path]) -> list[Figure]:
    """Public classes of one name, make targets, and lines of what is not shipped."""
    names: dict[str, list[str]] = {}
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(str(path.relative_to(root)))
    twice = [f"{name}: {', '.join(places)}" for name, places in names.items() if len(places) > 1]
    shown = re.findall(r"(?m)^[a-z-]+:.*## ", (root / "Makefile").read_text())
    beside = [path for folder in ("tests", "proof", "bench") for path in (root / folder).rglob("*.py")]
    return [
        Figure.at_most("public class names used twice", len(twice), 0, twice),
        Figure.at_most("make targets shown", len(shown), MAX_TARGETS),
        Figure.at_most("lines of tests, proof and bench", sum(map(lines_in, beside)), MAX_TEST_LINES),
    ]


def literal_figure(root: Path) -> Figure:
    package = root / "cllm"
    core = package / "core" if (package / "core").is_dir() else package / "engine"
    found = [
        f"{path.relative_to(root)}:{line} {value!r}"
        for path in sorted(core.rglob("*.py"))
        for line, value in numeric_literals(path)
    ]
    return Figure.at_most(f"numeric literals in {core.name}/", len(found), MAX_LITERALS, found)


def word_figures(root: Path) -> list[Figure]:
    """Words that are to be gone, and words that are to be there."""
    counts: Counter[str] = Counter()
    places: dict[str, list[str]] = {word: [] for word in FORBIDDEN}
    expected: Counter[str] = Counter()
    for path in sorted((root / "cllm").rglob("*")):
        if path.suffix not in (".py", ".html", ".md", ".js"):
            continue
        for number, line in enumerate(path.read_text().lower().splitlines(), 1):
            for word, pattern in FORBIDDEN.items():
                if found := len(re.findall(pattern, line)):
                    counts[word] += found
                    places[word].append(f"{path.relative_to(root)}:{number} {line.strip()[:80]}")
            expected.update(word for word in EXPECTED if word in line)
    rows = [Figure.at_most(f"word: {word}", counts[word], 0, places[word]) for word in FORBIDDEN]
    return rows + [Figure(f"word: {word}", expected[word], "≥ 1", expected[word] > 0) for word in EXPECTED]


class TracedServer:
    """A server with the embedded model whose processes record which functions they enter."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        (folder / "sitecustomize.py").write_text(HOOK)
        (folder / "window").write_bytes(b"\0")
        with (folder / "window").open("r+b") as file:
            self._window = mmap.mmap(file.fileno(), 1)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{root}",
            "CLLM_CACHE_DISK_MB": "0",
            "CLLM_STATS_DIR": str(folder),
            "CLLM_STATS_ROOT": str(root / "cllm") + os.sep,
        }
        command = [sys.executable, "-m", "cllm", "serve", "--port", str(self._port)]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> TracedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connect(self) -> http.client.HTTPConnection:
        """A connection, once the server answers."""
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().read() and self._complete(connection):
                    return connection
            except (OSError, http.client.HTTPException):
                time.sleep(0.2)
        raise SystemExit(f"the server did not start:\n{(self._folder / 'log').read_text()[-2000:]}")

    def _complete(self, connection: http.client.HTTPConnection, *, chat: bool = False) -> bool:
        path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", COMPLETION)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return bool(answer.read()) and answer.status == 200

    def trace(self) -> list[dict[str, Any]]:
        """What each process recorded, four windows a round: idle, until the answer, what follows, a chat."""
        connection = self.connect()
        for number in range(6):
            assert self._complete(connection, chat=number % 2 == 1)
        time.sleep(1.0)
        for number in range(ROUNDS):
            self._window[0] = 3 * number + 1
            time.sleep(SETTLE_S)
            self._window[0] = 3 * number + 2
            assert self._complete(connection)
            self._window[0] = 3 * number + 3
            time.sleep(SETTLE_S)
            self._window[0] = CHATS + number
            assert self._complete(connection, chat=True)
            time.sleep(SETTLE_S)
            self._window[0] = 0
        self._window[0] = 255
        end = time.monotonic() + 20
        while len(found := list(self._folder.glob("*.json"))) < 3 and time.monotonic() < end:
            time.sleep(0.1)
        return [json.loads(path.read_text()) for path in found]


def role(argv: list[str]) -> str:
    """Which process this is, by its arguments: `… serve`, `… FD engine LEVEL`, `… FD text LEVEL`."""
    return next((word for word in ("serve", "engine", "text", "tokenizer") if word in argv), argv[0])


def entered(process: dict[str, Any], *, until_answer: bool = False) -> set[Function]:
    """The functions that most requests enter and an idle process does not."""
    windows: dict[int, set[Function]] = {}
    for window, file, name, line in process["seen"]:
        if name.rsplit(".", 1)[-1] not in COMPREHENSIONS:
            windows.setdefault(window, set()).add((file, name, line))
    often: Counter[Function] = Counter()
    for number in range(ROUNDS):
        idle, request, after = (windows.get(3 * number + kind, set()) for kind in (1, 2, 3))
        often.update((request if until_answer else request | after) - idle)
    return {function for function, count in often.items() if count > ROUNDS // 2}


def request_figures(root: Path) -> list[Figure]:
    """What the HTTP process loads, and the functions one request enters."""
    with tempfile.TemporaryDirectory() as folder, TracedServer(root, Path(folder)) as server:
        processes = server.trace()
    serving = next(process for process in processes if role(process["argv"]) == "serve")
    modules = [name for name in serving["modules"] if name == "cllm" or name.startswith("cllm.")]
    native = [name for name in NATIVE if name in serving["modules"]]
    program = (
        "import sys, cllm.server.app as _; print(*(m for m in sys.modules if m.split('.')[0] == 'cllm'))"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(root)}
    alone = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True).stdout.split()
    functions: set[Function] = set()
    before: set[Function] = set()
    details: list[str] = []
    lengths = {(str(path), line): length for path in files_of(root) for _, line, length in functions_in(path)}
    longest = (0, "")
    for process in sorted(processes, key=lambda process: role(process["argv"])):
        early = entered(process, until_answer=True)
        before |= early
        for file, name, line in sorted(entered(process)):
            relative = str(Path(file).relative_to(root))
            mark = "" if (file, name, line) in early else "  (after the answer)"
            details.append(f"{role(process['argv']):6} {relative}:{line} {name}{mark}")
            functions.add((file, name, line))
            longest = max(longest, (lengths.get((file, line), 1), f"{relative}:{line} {name}"))
    frames = [sum(each["sent"].count(CHATS + number) for each in processes) for number in range(ROUNDS)]
    return [
        Figure.at_most("cllm modules in the HTTP process", len(modules), MAX_MODULES, modules),
        Figure("… by `import cllm.server.app` alone", len(alone)),
        Figure("native or core modules there", len(native), "0", not native, native),
        Figure.at_most("functions entered by one request", len(functions), MAX_ENTERED, details),
        Figure("… until its answer is there", len(before)),
        Figure.at_most("lines, longest of them", longest[0], 60, [longest[1]]),
        Figure.at_most("frames of a chat with tools", statistics.median(frames), MAX_FRAMES, [str(frames)]),
    ]


def files_of(root: Path) -> list[Path]:
    return sorted((root / "cllm").rglob("*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--list", action="store_true", help="show what was counted")
    parser.add_argument("--static", action="store_true", help="read the sources only; start no server")
    options = parser.parse_args()
    root = options.root.resolve()
    files = files_of(root)
    figures = [*size_figures(root, files), *name_figures(root, files), literal_figure(root)]
    figures += word_figures(root)
    if not options.static:
        figures += request_figures(root)
    if options.json:
        keys = ("name", "value", "bar", "met", *(("details",) if options.list else ()))
        print(json.dumps([{key: getattr(figure, key) for key in keys} for figure in figures], indent=1))
    else:
        for figure in figures:
            value = f"{figure.value:,}" if isinstance(figure.value, int | float) else str(figure.value)
            mark = "" if figure.met else "  MISSED"
            print(f"{figure.name:36}{value:>10}  {figure.bar:>9}{mark}")
            if options.list:
                print("".join(f"      {line}\n" for line in figure.details), end="")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())

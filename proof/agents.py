"""Coding agents, as npm and PyPI have them, against a scripted model.

Each program has a text turn, a tool loop that changes a file, a session whose later prompts must come from
the prefix cache, and one that outgrows the context. With `--tiny`, a text turn on a random-weight model with
a context of 32 k too. Nothing leaves this machine. The programs are fetched first, unless
`--installed`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.command import conclude, run_command
from bench.report import Table
from cllm.errors import SetupError
from cllm.models.store import embedded_model
from cllm.testing import say
from proof.command import make_parser
from proof.shared.agent_programs import AFTER, BEFORE, PROGRAMS, Program, agents_folder, base_environment
from tests.driver.recorder import Exchange, Recorder
from tests.driver.server import Server
from tests.tiny_models import make_reader

SCRIPTED = ("import sys; from cllm.testing import main; sys.exit(main(sys.argv[1:]))", "serve")
CONTEXT = 600_000  # of a scripted request, whose tokens are bytes
ROOM_TO_GROW = 48_000  # of the session that outgrows its context, beyond its first prompt
TINY_CONTEXT = 32_768
MIN_CACHED = 0.95  # of the prompt tokens of later turns
TURNS = 4
PARTS = 6  # of the room, one a turn: programs compact before the last tenth is used
PADDING = "All of this is text that fills the context and says nothing at all. "


class Failed(Exception):
    """A scenario did not come out as it must; the message says how."""


@dataclass(slots=True)
class Run:
    """One program with a home of its own, its turns and what it sent."""

    program: Program
    home: Path
    recorder: Recorder
    limit_s: float
    turns: int = 0
    exchanges: list[list[Exchange]] = field(default_factory=list)  # by turn
    output: str = ""

    @property
    def file(self) -> Path:
        return self.home / "work" / "notes.txt"

    def turn(self, prompt: str, *, may_fail: bool = False) -> str:
        """Run the program for one prompt: what it printed. Raises Failed if it ends in error or too late."""
        first = len(self.recorder.exchanges)
        url = self.recorder.url
        command = self.program.command(prompt, self.home, url, later=self.turns > 0)
        variables = base_environment(self.home, url) | dict(self.program.environment(self.home, url))
        typed = prompt if self.program.prompt_on_stdin else ""
        code, self.output = run_group(command, self.home / "work", variables, self.limit_s, typed)
        self.turns += 1
        self.exchanges.append(self.recorder.exchanges[first:])
        if code and not may_fail:
            raise Failed(f"exit code {code}: {describe(self.exchanges[-1]) or self.output[-300:]}")
        return self.output

    def read_files(self, count: int, text: str) -> None:
        """One task: the model reads a file after another, all with that text, and answers.

        Each name makes it answer, too: a program that drops messages keeps the names of the files in them.
        """
        answer = "That was the last file."
        files = [self.home / "work" / f"part-{number} {say(answer)}" for number in range(count)]
        for file in files:
            file.write_text(text)
        self.expect("Read all parts.", *(self.program.change_file(file)[0] for file in files), answer)

    def expect(self, prompt: str, *answers: str) -> None:
        """A turn whose script is `answers`; the last must be shown."""
        if not shows(self.turn(f"{prompt} Answer={say(*answers)}"), answers[-1]):
            raise Failed(f"no answer: {describe(self.exchanges[-1]) or self.output[-300:]}")


def shows(output: str, answer: str) -> bool:
    """Whether a program's output has the answer: anywhere but in the prompt, which it may print too."""
    plain = output.replace("\\n", "\n")
    scripts = r"(\x02|\\+u0002|Answer=)[^\x03]*?(\x03|\\+u0003|\Z)"
    return answer in re.sub(scripts, "", plain)


def run_group(
    command: Sequence[str], folder: Path, variables: dict[str, str], limit_s: float, typed: str = ""
) -> tuple[int, str]:
    """Run a program in a process group of its own, which ends with it. Raises Failed after `limit_s`."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(typed.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {limit_s:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, output.decode(errors="replace")


def describe(exchanges: Sequence[Exchange]) -> str:
    """The refusals among exchanges, if any: status and message."""
    refused = [exchange for exchange in exchanges if exchange.status != 200]
    return "; ".join(f"{one.path} {one.status} {one.answer[:200].decode()}" for one in refused[:2])


def measure_cached(exchanges: Iterable[Exchange]) -> float:
    """The cached part of the prompt tokens of some exchanges."""
    sizes = [tokens for one in exchanges if (tokens := one.prompt_tokens) is not None and tokens.total]
    if not sizes:
        raise Failed("no later turn reached the model")
    return sum(tokens.cached for tokens in sizes) / sum(tokens.total for tokens in sizes)


def find_later(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """The answered requests that continue a conversation.

    A program may have another one beside it, which gives the session a title and has no tools: its requests
    come at any time, and the first of each has nothing to continue.
    """
    by_tools: dict[bool, list[Exchange]] = {}
    for one in exchanges:
        if one.prompt_tokens is not None:
            by_tools.setdefault(bool(one.json.get("tools")), []).append(one)
    return [one for conversation in by_tools.values() for one in conversation[1:]]


def measure_repeated(run: Run) -> float:
    """The part of later prompts by which one before them began, too: all that a cache can have."""
    bodies = [[one.json for one in turn if one.path.endswith("/chat/completions")] for turn in run.exchanges]
    url = f"{run.recorder.upstream.geturl()}/apply-template"
    prompts = [[httpx.post(url, json=body).json()["prompt"] for body in turn] for turn in bodies]
    earlier, repeated, total = list(prompts[0]), 0, 0
    for prompt in (prompt for turn in prompts[1:] for prompt in turn):
        repeated += max(_count_shared(prompt, other) for other in earlier)
        total += len(prompt)
        earlier.append(prompt)
    return repeated / total


def _count_shared(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def list_tokens(exchanges: Iterable[Exchange]) -> list[tuple[int, int]]:
    """Tokens of each answered prompt, and how many of them were cached."""
    return [(tokens.total, tokens.cached) for one in exchanges if (tokens := one.prompt_tokens)]


def prompt_sizes(exchanges: Sequence[Exchange]) -> list[int]:
    """Tokens of the prompts that were answered, in order. Raises Failed if there are none."""
    found = [one.prompt_tokens for one in exchanges]
    sizes = [tokens.total for tokens in found if tokens is not None and tokens.total]
    if not sizes:
        raise Failed("no answer said how large its prompt was")
    return sizes


# Scenarios: each returns a figure or "", and raises Failed ------------------------------------------


def text_turn(run: Run) -> str:
    run.expect("What colour is the sky?", "The sky is blue.")
    return f"{max(prompt_sizes(run.exchanges[0])):,} bytes"


def tool_loop(run: Run) -> str:
    run.file.write_text(BEFORE)
    steps = run.program.change_file(run.file)
    if run.program.edits_in_text:
        run.turn(f"Change notes.txt. Answer={say(*steps)}")
    else:
        run.expect("Change notes.txt.", *steps, "It is changed.")
    if (found := run.file.read_text()).strip() != AFTER.strip():
        raise Failed(f"the file says {found!r}")
    answered = [one for one in run.exchanges[0] if one.prompt_tokens is not None]
    later = find_later(answered)
    if later and measure_cached(later) < MIN_CACHED:
        raise Failed(f"{measure_cached(later):.1%} cached: {list_tokens(answered)}")
    return f"{len(answered)} requests" + (f", {measure_cached(later):.1%} cached" if later else "")


def long_session(run: Run) -> str:
    if run.program.one_task:
        run.read_files(TURNS, "")
        run.exchanges = [[one] for one in run.exchanges[0]]
    else:
        for turn in range(TURNS):
            run.expect(f"This is message {turn}.", f"This is answer {turn}.")
    cached = measure_cached(one for turn in run.exchanges[1:] for one in turn)
    repeated = measure_repeated(run) if run.program.moves_text else 1.0
    if cached < MIN_CACHED * repeated:
        raise Failed(f"{cached:.1%} cached: {list_tokens(one for turn in run.exchanges for one in turn)}")
    return f"{cached:.1%} cached" + (f" of {repeated:.1%} repeated" if run.program.moves_text else "")


def outgrown(run: Run) -> str:
    """Turns of a sixth of the room each, until the program has compacted: a prompt is smaller again.

    The user's messages fill the context, or a tool's results where a program keeps the user's own words.
    """
    parts = PARTS if run.program.compacts else 1
    filling = f"{PADDING}\n" * (ROOM_TO_GROW // parts // len(PADDING))
    if run.program.one_task:
        run.read_files(2 * PARTS, filling)
        return check_compacted(prompt_sizes(run.exchanges[-1]))
    file = run.home / "work" / "filling.txt"
    file.write_text(filling)
    sizes = [0]
    for turn in range(2 * PARTS):
        answer = f"This is answer {turn}."
        steps = run.program.change_file(file)[:1] if run.program.keeps_user_text else ()
        prompt = f"{'' if steps else filling}Message {turn}. Answer={say(*steps, answer)}"
        shown = run.turn(prompt, may_fail=True)  # opencode compacts on a refusal, and exits with 1
        if not run.program.compacts and not shows(shown, answer):
            return check_refusal(run)
        if not shows(shown, answer):
            raise Failed(f"no answer: {describe(run.exchanges[-1]) or shown[-300:]}")
        sizes += prompt_sizes(run.exchanges[-1])
        if is_compacted(sizes):
            break
    return check_compacted(sizes)


def is_compacted(sizes: Sequence[int]) -> bool:
    """Whether the last prompt is smaller than the largest, by half of what a turn adds."""
    return sizes[-1] < max(sizes) - ROOM_TO_GROW // PARTS // 2


def check_compacted(sizes: Sequence[int]) -> str:
    """The largest prompt and the last. Raises Failed unless that is smaller."""
    if not is_compacted(sizes):
        raise Failed(f"never compacted, the largest prompt was {max(sizes):,}")
    return f"{max(sizes):,} → {sizes[-1]:,} bytes"


def check_refusal(run: Run) -> str:
    """A library does not compact: the user must be shown the numbers."""
    found = re.search(r"prompt is too long: \d+ tokens > \d+ maximum", run.output)
    if not found:
        raise Failed(f"no refusal was shown: {run.output[-300:]}")
    return "shows the limit"


def noise_turn(run: Run) -> str:
    """A random-weight model: any answer will do, as long as nothing is refused."""
    run.turn("What colour is the sky?", may_fail=True)
    if refusal := describe(run.exchanges[0]):
        raise Failed(refusal)
    return f"{max(prompt_sizes(run.exchanges[0])):,} tokens"


Scenario = Callable[[Run], str]
SCENARIOS: dict[str, Scenario] = {
    "text": text_turn,
    "tools": tool_loop,
    "session": long_session,
    "compaction": outgrown,
    "tiny": noise_turn,
}


def serve_script(folder: Path, name: str, context: int) -> Server:
    """The scripted model with that limit of a request, its log in the folder."""
    size = ("--parallel", "4", "--ctx-size", str(4 * context), "--log-level", "info")
    return Server(folder / f"{name}.log", *size, program=SCRIPTED)


def serve_tiny(folder: Path) -> Server:
    """A random-weight model that reads and writes the embedded model's tokens."""
    model = make_reader(folder / "tiny.gguf", embedded_model(), context=TINY_CONTEXT)
    size = ("--parallel", "1", "--slots", "2", "--ctx-size", str(TINY_CONTEXT))
    return Server(folder / "tiny.log", str(model), *size, CLLM_LOG_LEVEL="info")


def keep_exchanges(folder: Path, run: Run) -> None:
    """Write what was said into a folder, for reading."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.txt").write_text(run.output)
    for number, exchange in enumerate(run.recorder.exchanges):
        (folder / f"{number:02}-request.json").write_bytes(exchange.body)
        (folder / f"{number:02}-answer-{exchange.status}.txt").write_bytes(exchange.answer)
    (folder / "refused.txt").write_text("\n".join(sorted(run.recorder.refused)))


@dataclass(slots=True)
class Arena:
    """The servers of a report: one scripted model for all, one for each context that is to be outgrown."""

    folder: Path
    limit_s: float
    keep: Path | None
    stack: ExitStack
    shared: Server | None = None
    tiny: Server | None = None
    first_prompts: dict[str, int] = field(default_factory=dict)  # by program

    def play(self, program: Program, name: str) -> str:
        """One scenario of one program: its figure. Raises Failed."""
        if name == "tiny":
            self.tiny = self.tiny or self.stack.enter_context(serve_tiny(self.folder))
            return self._play(program, name, self.tiny, TINY_CONTEXT)
        if name == "compaction":
            first = self.first_prompts.get(program.name) or self._measure_first(program)
            context = first + ROOM_TO_GROW
            with serve_script(
                self.folder, f"compaction-{program.package.replace('/', '-')}", context
            ) as server:
                return self._play(program, name, server, context)
        return self._play(program, name, self._get_shared(), CONTEXT)

    def _get_shared(self) -> Server:
        self.shared = self.shared or self.stack.enter_context(serve_script(self.folder, "scripted", CONTEXT))
        return self.shared

    def _measure_first(self, program: Program) -> int:
        self._play(program, "text", self._get_shared(), CONTEXT)
        return self.first_prompts[program.name]

    def _play(self, program: Program, name: str, server: Server, context: int) -> str:
        runs = agents_folder() / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=runs, ignore_cleanup_errors=True) as home,
            Recorder(server.url) as recorder,
        ):
            run = Run(program, Path(home), recorder, self.limit_s)
            run.file.parent.mkdir()
            run.file.write_text(BEFORE)
            program.configure(run.home, recorder.url, context)
            try:
                figure = SCENARIOS[name](run)
                if program.name not in self.first_prompts:  # a refused one has no size
                    self.first_prompts[program.name] = max(prompt_sizes(run.exchanges[0]))
                return figure
            finally:
                if self.keep is not None:
                    keep_exchanges(self.keep / f"{program.package.replace('/', '-')}-{name}", run)


def run_agents(
    program: Sequence[str] = (),
    scenario: Sequence[str] = (),
    installed: bool = False,
    limit_s: float = 300.0,
    keep: Path | None = None,
    out: Path | None = None,
    logs: Path | None = None,
) -> int:
    """Play the scenarios, print tables; 0 if all pass. Raises SetupError."""
    chosen = [one for one in PROGRAMS if not program or one.package in program]
    names = list(scenario or SCENARIOS)
    rows: list[Sequence[str]] = []
    failures: list[str] = []
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.log"):
            old.unlink()  # it names an address that is gone
        arena = Arena(folder, limit_s, keep, stack)
        for one in chosen:
            missing = prepare(one, install=not installed)
            cells = judge(arena, one, [] if missing else names, failures)
            failures += [f"{one.name}: {missing}"] if missing else []
            rows.append((f"{one.name} {one.version()}".strip(), *(cells.get(name, "–") for name in names)))
    verdict = "\n".join(f"FAIL: {line}" for line in failures) or "pass"
    text = f"{Table(('program', *names), rows).markdown()}\n\n{verdict}"
    return conclude("agents", text, rows, out, failed=bool(failures))


def prepare(program: Program, *, install: bool) -> str:
    """Install a program if that is wanted; why it cannot run, or ""."""
    try:
        if install:
            program.install()
    except SetupError as error:
        return f"cannot be installed here: {error}"
    return "" if program.version() else "not installed"


def judge(arena: Arena, program: Program, names: Sequence[str], failures: list[str]) -> dict[str, str]:
    """Play each scenario: its cell in the table; what went wrong is added to `failures`."""
    cells = {}
    for name in names:
        try:
            cells[name] = outcome = f"passed, {arena.play(program, name)}"
        except (Failed, SetupError) as error:
            cells[name], outcome = "failed", f"failed: {error}"
            failures.append(f"{program.name}, {name}: {error}")
        print(f"{program.name}, {name}: {outcome}", file=sys.stderr, flush=True)
    return cells


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        "--out",
        "--logs",
        limit_s=(300.0, "of one turn, seconds"),
        installed=(False, "use what is installed"),
    )
    programs, names = [one.package for one in PROGRAMS], list(SCENARIOS)
    parser.add_argument("--program", action="append", default=[], choices=programs, help="again for more")
    parser.add_argument("--scenario", action="append", default=[], choices=names, help="again for more")
    parser.add_argument("--keep", type=Path, help="folder to write requests and answers into")
    return run_command(parser, arguments, run_agents)

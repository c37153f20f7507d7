"""Exits: interpreters that end at a random moment while a model loads or computes; none may end by a signal.

    make proof ARGS="exits --count 200"

Each is a Python process that uses the embedded model in one way and ends in one way. What is counted is its
exit code: 0, 1 after an exception, 130 after Ctrl-C (as a shell shows it).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.errors import EngineNotReady
from proof.command import make_parser
from tests.driver.server import environment

CODES = {"end": 0, "exit": 0, "error": 1, "interrupt": 130}  # ways to end, with their exit codes
LIMIT_S = 90.0
MAX_DELAY_S = 0.6
SETTINGS: dict[str, Any] = {
    "parallel": 4,
    "ctx_size": 8192,
    "threads": int(os.environ.get("CLLM_THREADS", 2)),
}
ENDLESS = SamplingParams(temperature=1.0, ignore_eos=True)
LONG = "A long text that takes a while to be read. " * 20


class Moment:
    """The moment at which the interpreter is to end; the clock starts when the model is open."""

    def __init__(self, end: str, delay_s: float) -> None:
        self._end, self._delay_s = end, delay_s
        self._at = float("inf")

    def start(self) -> None:
        if self._end == "interrupt":
            threading.Thread(target=self._interrupt, daemon=True).start()
            self._at = time.monotonic() + LIMIT_S
        else:
            self._at = time.monotonic() + self._delay_s

    def _interrupt(self) -> None:
        time.sleep(self._delay_s)
        while True:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(LIMIT_S / 6)  # Python loses one that comes in a finaliser or at a fork

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())


def _open(model: str) -> LLM:
    return LLM(model, **SETTINGS).__enter__()  # and never closed


def _quietly(call: Callable[[], Any]) -> None:
    """In a thread, where closing ends the call with an error."""
    with contextlib.suppress(Exception):
        call()


def _start(call: Callable[[], Any], *, daemon: bool = True) -> None:
    threading.Thread(target=_quietly, args=(call,), daemon=daemon).start()


def _use(llm: LLM, times: float = float("inf")) -> None:
    while times > 0:
        llm.generate([LONG, "x", "y"], ENDLESS, max_tokens=200)
        times -= 1


def in_a_thread(model: str, moment: Moment) -> None:
    llm = _open(model)
    _start(partial(_use, llm))
    moment.start()
    time.sleep(moment.left_s)


def in_a_thread_that_python_waits_for(model: str, moment: Moment) -> None:
    llm = _open(model)
    _start(partial(_use, llm, 2), daemon=False)
    moment.start()
    time.sleep(moment.left_s)


def in_several_threads(model: str, moment: Moment) -> None:
    llm = _open(model)
    pool = ThreadPoolExecutor(2)
    pool.submit(_quietly, partial(_use, llm, 1))  # Python waits for it
    _start(partial(_use, llm))
    _start(lambda: [llm.embed([LONG] * 4) for _ in itertools.count()])
    _start(lambda: [llm.generate(LONG * 500, max_tokens=1) for _ in itertools.count()])
    moment.start()
    time.sleep(moment.left_s)


def streaming(model: str, moment: Moment) -> None:
    llm = _open(model)
    moment.start()
    for _ in llm.stream(LONG, ENDLESS, max_tokens=1000):
        if not moment.left_s:
            return


def loading(model: str, moment: Moment) -> None:
    llm = LLM(model, **SETTINGS)
    _start(llm.__enter__)
    moment.start()
    time.sleep(moment.left_s / 4)


def with_asyncio(model: str, moment: Moment) -> None:
    async def use() -> None:
        llm = await AsyncLLM(model, **SETTINGS).__aenter__()
        tasks = [asyncio.ensure_future(llm.generate(LONG, ENDLESS, max_tokens=1000)) for _ in range(4)]
        moment.start()
        await asyncio.wait(tasks, timeout=moment.left_s)

    asyncio.run(use())


def with_a_forked_child(model: str, moment: Moment) -> None:
    """The child is refused the model and ends cleanly, too."""
    llm = _open(model)
    _start(partial(_use, llm))
    moment.start()
    time.sleep(min(moment.left_s, MAX_DELAY_S) / 2)
    child = os.fork()
    if not child:
        with contextlib.suppress(EngineNotReady):
            llm.generate("x")
            os._exit(98)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    time.sleep(moment.left_s)


USES: dict[str, Callable[[str, Moment], None]] = {
    "thread": in_a_thread,
    "waited": in_a_thread_that_python_waits_for,
    "threads": in_several_threads,
    "stream": streaming,
    "load": loading,
    "asyncio": with_asyncio,
    "fork": with_a_forked_child,
}


def run_child(model: str, use: str, end: str, delay_s: float) -> None:
    """In the process itself: use the model, then end as asked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    USES[use](model, Moment(end, delay_s))
    if end == "exit":
        sys.exit(0)
    if end == "error":
        raise ValueError("an error of the program")


class Outcome(NamedTuple):
    use: str
    end: str
    delay_s: float
    code: int
    errors: str  # the end of its standard error

    @property
    def good(self) -> bool:
        wrong = "Fatal Python error" if CODES[self.end] else "Traceback"
        return self.code == CODES[self.end] and wrong not in self.errors


def run_one(model: str, use: str, end: str, delay_s: float) -> Outcome:
    """One interpreter, from start to end. A code above 128 is a signal, as a shell shows it."""
    command = [sys.executable, "-m", "proof", "exits", "--child", model, use, end, str(delay_s)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
    code = process.returncode
    return Outcome(use, end, delay_s, code if code >= 0 else 128 - code, errors[-2000:])


def plan(count: int, seed: int) -> Iterator[tuple[str, str, float]]:
    """Every use with every way to end, in turns, each at a random moment."""
    drawn = random.Random(seed)
    every = itertools.cycle(itertools.product(USES, CODES))
    for use, end in itertools.islice(every, count):
        yield use, end, drawn.uniform(0, MAX_DELAY_S)


def run_exits(count: int, *, model: str = "", seed: int = 1, at_once: int = 2) -> list[Outcome]:
    """Run that many interpreters and print how they ended. Returns those that did not end as they should."""
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(lambda each: run_one(model, *each), plan(count, seed)))
    counts = Counter((outcome.use, outcome.end, outcome.code) for outcome in outcomes)
    for (use, end, code), number in sorted(counts.items()):
        print(f"{use:>8} {end:<10} code {code:<4} {number:>4}{'' if code == CODES[end] else '  WRONG'}")
    bad = [outcome for outcome in outcomes if not outcome.good]
    for outcome in bad:
        print(
            f"\n{outcome.use} {outcome.end} after {outcome.delay_s:.3f} s: {outcome.code}\n{outcome.errors}"
        )
    print(f"{count} interpreters, {len(bad)} ended as they should not")
    return bad


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--child"]:
        model, use, end, delay_s = arguments[1:]
        run_child(model, use, end, float(delay_s))
        return 0
    parser = make_parser(
        __name__,
        __doc__,
        count=(200, "interpreters to start"),
        model=("", "GGUF file; none: the embedded model"),
        seed=(1, "of the moments"),
    )
    options = parser.parse_args(arguments)
    return bool(run_exits(options.count, model=options.model, seed=options.seed))

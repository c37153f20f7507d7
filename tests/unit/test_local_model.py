"""A local model is opened once and closed once: while it loads, at exit, and in a forked child."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cllm import LLM, AsyncLLM
from cllm.backend.base import ModelRunner
from cllm.config import EngineConfig
from cllm.errors import ConfigError, EngineNotReady, ModelFileError, ShuttingDown
from cllm.frontend.engine_client import EngineClient
from cllm.testing import CHAT_TEMPLATE, FakeRunner
from cllm.workers.engine_worker import ThreadExecutor
from tests.driver.server import environment, wait_for

PATIENCE_S = 20.0
QUESTION = [{"role": "user", "content": "hi"}]


def make_fake(_: EngineConfig) -> FakeRunner:
    return FakeRunner(chat_template=CHAT_TEMPLATE)


class SlowLoad:
    """A runner that takes until `finish` to load, and cannot be interrupted."""

    def __init__(self) -> None:
        self.begun, self.finish = threading.Event(), threading.Event()
        self.runner = FakeRunner()

    def __call__(self, _: EngineConfig) -> FakeRunner:
        self.begun.set()
        assert self.finish.wait(PATIENCE_S)
        return self.runner


@pytest.fixture
def slow() -> Iterator[SlowLoad]:
    load = SlowLoad()
    yield load
    load.finish.set()


def run(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Call it in a thread; the list gets what it raises."""
    raised: list[BaseException] = []

    def target() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, raised


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def count_engines() -> int:
    return sum(thread.name == "cllm-engine" for thread in threading.enumerate())


# Closing while the model loads -----------------------------------------------------------------------


def test_closing_while_the_model_loads_ends_the_loading() -> None:
    begun = threading.Event()

    def load(progress: Callable[[float], None]) -> ModelRunner:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            progress(0.5)
            begun.set()
            time.sleep(0.001)
        raise AssertionError("the loading was not ended")

    engine = EngineClient(ThreadExecutor(load, EngineConfig()))
    engine.start()
    assert begun.wait(PATIENCE_S)
    engine.stop()
    assert count_engines() == 0
    with pytest.raises(ShuttingDown, match="while the model was loading"):
        engine.wait_ready(0)


def test_closing_waits_for_a_loading_that_cannot_be_ended(slow: SlowLoad) -> None:
    llm = LLM(make_runner=slow)
    opener, raised = run(llm.__enter__)
    assert slow.begun.wait(PATIENCE_S)
    closer, _ = run(llm.close)
    wait_for(lambda: llm._closed, PATIENCE_S)
    closer.join(0.05)
    assert closer.is_alive() and not slow.runner.closed
    slow.finish.set()
    join(closer)
    join(opener)
    assert slow.runner.closed and count_engines() == 0
    assert isinstance(raised[0], ShuttingDown)


@pytest.mark.parametrize("debug", [False, True])
def test_an_async_model_can_be_closed_while_it_loads(slow: SlowLoad, debug: bool) -> None:
    async def use() -> None:
        llm = AsyncLLM(make_runner=slow)
        opening = asyncio.create_task(llm.__aenter__())
        assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
        closing = asyncio.create_task(llm.close())
        asyncio.get_running_loop().call_later(0.05, slow.finish.set)
        async with asyncio.timeout(PATIENCE_S):
            await closing
            with pytest.raises(ShuttingDown):
                await opening

    asyncio.run(use(), debug=debug)
    assert slow.runner.closed and count_engines() == 0


def test_a_cancelled_opening_closes_what_it_began(slow: SlowLoad) -> None:
    async def use() -> None:
        asyncio.get_running_loop().call_later(0.1, slow.finish.set)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), AsyncLLM(make_runner=slow):
                raise AssertionError("it is not loaded")

    asyncio.run(use())
    assert slow.runner.closed and count_engines() == 0


# Opened once -----------------------------------------------------------------------------------------


def test_a_second_entry_is_refused_and_leaves_the_first_alone() -> None:
    with LLM(make_runner=make_fake) as llm:
        with pytest.raises(RuntimeError, match="this LLM is open already"):
            llm.__enter__()
        assert count_engines() == 1
        assert llm.generate("hello", max_tokens=2)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.__enter__()
    assert count_engines() == 0


def test_a_second_entry_of_an_async_model_is_refused() -> None:
    async def use() -> None:
        async with AsyncLLM(make_runner=make_fake) as llm:
            with pytest.raises(RuntimeError, match="open already"):
                await llm.__aenter__()
            assert await llm.generate("hello", max_tokens=2)
        with pytest.raises(RuntimeError, match="closed"):
            await llm.__aenter__()

    asyncio.run(use())
    assert count_engines() == 0


def test_one_that_was_closed_before_it_was_opened_stays_closed() -> None:
    llm = LLM(make_runner=make_fake)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.__enter__()
    assert count_engines() == 0


def test_a_loading_that_fails_leaves_nothing_open() -> None:
    def fail(_: EngineConfig) -> FakeRunner:
        raise ModelFileError("no such file")

    llm = LLM(make_runner=fail)
    with pytest.raises(ModelFileError, match="no such file"):
        llm.__enter__()
    assert count_engines() == 0
    with pytest.raises(ShuttingDown, match="closed"):
        llm.generate("x")


def test_an_engine_that_cannot_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    llm = LLM(make_runner=make_fake)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            llm.__enter__()
    with pytest.raises(ShuttingDown, match="closed"):
        llm.generate("x")


USES: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("x"),
    "no prompts": lambda llm: llm.generate([]),
    "chat": lambda llm: llm.chat(QUESTION),
    "chat stream": lambda llm: llm.chat(QUESTION, stream=True),
    "stream": lambda llm: llm.stream("x"),
    "stream of a chat": lambda llm: llm.stream(QUESTION),
    "embed": lambda llm: llm.embed("x"),
    "no texts": lambda llm: llm.embed([]),
    "info": lambda llm: llm.info,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_says_whether_it_is_not_open_yet_or_closed(use: Callable[[LLM], Any]) -> None:
    llm = LLM(make_runner=make_fake)
    with pytest.raises(EngineNotReady, match=r"open it first: `with LLM\(...\) as llm`"):
        use(llm)
    with llm:
        use(llm)
    with pytest.raises(ShuttingDown, match="this LLM is closed"):
        use(llm)


def test_every_use_of_an_async_model_says_so_too() -> None:
    async def use(llm: AsyncLLM) -> None:
        for call in (llm.generate, llm.embed):
            await call("x")

    llm = AsyncLLM(make_runner=make_fake)
    with pytest.raises(EngineNotReady, match=r"open it first: `async with AsyncLLM\(...\) as llm`"):
        asyncio.run(use(llm))
    for call in (lambda: llm.chat(QUESTION), lambda: llm.stream("x"), lambda: llm.stream(QUESTION)):
        with pytest.raises(EngineNotReady, match="open it first"):
            call()


def test_a_stream_that_was_made_before_closing_says_so() -> None:
    with LLM(make_runner=make_fake) as llm:
        pieces, chunks = llm.stream("x"), llm.chat(QUESTION, stream=True)
    for late in (pieces, chunks):
        with pytest.raises(ShuttingDown, match="this LLM is closed"):
            next(iter(late))


# Settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("parallel", -1, "parallel is -1: expected `int` >= 0"),
        ("parallel", "4", "parallel is '4': expected `int`, got `str`"),
        ("ctx_size", -5, "ctx_size is -5: expected `int` >= 0"),
        ("batch_tokens", 0, "batch_tokens is 0: expected `int` >= 32"),
        ("cache_type_k", "nope", "cache_type_k is 'nope': expected `str` matching"),
        ("target_itl_ms", float("inf"), "target_itl_ms is inf: expected a finite number"),
        ("target_itl_ms", float("nan"), "target_itl_ms is nan: expected a finite number"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        LLM(make_runner=make_fake, **{setting: value})
    assert refusal.value.message.startswith(message)
    with pytest.raises(ConfigError):
        AsyncLLM(make_runner=make_fake, config=EngineConfig(**{setting: value}))


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"'paralel' \(did you mean 'parallel'\?\)"):
        LLM(make_runner=make_fake, paralel=2)


def test_the_model_of_a_configuration_counts_unless_another_is_given() -> None:
    asked: list[str] = []

    def make(config: EngineConfig) -> FakeRunner:
        asked.append(config.model)
        return FakeRunner()

    for model in ("", "other.gguf"):
        with LLM(model, config=EngineConfig(model="own.gguf"), make_runner=make):
            pass
    assert asked == ["own.gguf", "other.gguf"]


# Fork and exit ---------------------------------------------------------------------------------------

FORK = """
import os, sys, threading, time
from cllm import LLM, SamplingParams
from cllm.errors import EngineNotReady
from cllm.testing import FakeRunner

endless = SamplingParams(ignore_eos=True)

def make(config):
    return FakeRunner(step_s=0.002)

def refused(call):
    try:
        call()
    except EngineNotReady as error:
        assert "opened in another process" in str(error), error
        return True

with LLM(make_runner=make) as llm:
    pieces = llm.stream("hello", endless, max_tokens=400)
    next(pieces)
    threading.Thread(target=lambda: list(llm.stream("busy", endless, max_tokens=900)), daemon=True).start()
    for _ in range(3):
        child = os.fork()
        if not child:
            llm._engine._lock = threading.Lock()  # as if another thread had held it
            llm._engine._lock.acquire()
            assert refused(lambda: llm.generate("x")) and refused(lambda: llm.info)
            assert refused(lambda: list(pieces)) and refused(lambda: llm.embed("x"))
            with LLM(make_runner=make) as own:
                assert own.generate("x", max_tokens=2)
            sys.exit(7)  # through the end of the parent's `with`
        deadline = time.monotonic() + 20
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, 9)
            time.sleep(0.005)
        assert os.waitstatus_to_exitcode(ended[1]) == 7, ended
    assert llm.generate("x", max_tokens=2)
print("done")
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(),
    )


def test_a_forked_child_is_refused_at_once_and_can_open_its_own() -> None:
    done = run_script(FORK)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


INTERRUPTED = """
import os, signal, threading, time
from cllm import LLM
from cllm.testing import FakeRunner

class Runner(FakeRunner):
    def close(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        super().close()
        print("closed", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(make_runner=lambda _: Runner()).__enter__()
"""


def test_ctrl_c_while_a_model_is_closed_at_exit_does_not_cut_that_short() -> None:
    done = run_script(INTERRUPTED)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


EXIT = """
import sys, threading, time
from cllm import LLM, SamplingParams
from cllm.errors import ShuttingDown
from cllm.testing import FakeRunner

class Runner(FakeRunner):
    def close(self):
        super().close()
        sys.stdout.write("closed\\n")  # one write: `print` makes two, and threads mix them

def read():
    try:
        list(llm.stream("hello", SamplingParams(ignore_eos=True), max_tokens=900))
    except ShuttingDown:
        sys.stdout.write("ended\\n")

llm = LLM(make_runner=lambda _: Runner(step_s=0.005))
llm.__enter__()
if sys.argv[1] == "atexit":
    threading._threading_atexits.clear()
    threading.Thread(target=read, daemon=True).start()
else:
    threading.Thread(target=read).start()
time.sleep(0.05)
"""


@pytest.mark.parametrize("hook", ["threading", "atexit"])
def test_an_open_model_is_closed_at_exit_and_its_readers_end(hook: str) -> None:
    """Also where a thread that Python waits for at exit reads a stream."""
    done = run_script(EXIT, hook)
    # Python ends a daemon thread where it is: that of `atexit` may not come to print.
    wanted = {"closed", "ended"} if hook == "threading" else {"closed"}
    assert done.returncode == 0 and wanted <= set(done.stdout.split()), done.stderr
    assert not done.stderr

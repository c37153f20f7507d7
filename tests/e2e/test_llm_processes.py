"""`LLM` and `AsyncLLM` over worker processes: crashes, exits, Ctrl-C, forks, threads, running event loops."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.errors import ModelFileError, NotEnoughMemory, ShuttingDown
from cllm.testing import say
from tests.driver.fake_runner import expected_text
from tests.driver.server import PATIENCE_S, alive, environment, find_workers, wait_for

GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(ignore_eos=True, seed=1)
EXACT: dict[str, Any] = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
PROMPT = "Once upon a time"
SCRIPTED = "cllm.testing"


def find_both(pid: int) -> list[int]:
    return find_workers(pid, "engine") + find_workers(pid, "tokenizer")


# Crashes ---------------------------------------------------------------------------------------------


def test_an_answer_goes_on_when_its_engine_is_killed(tiny_model: Path) -> None:
    with LLM(tiny_model, parallel=2, ctx_size=4096, threads=1, **EXACT) as llm:
        (whole,) = llm.generate(PROMPT, GREEDY, max_tokens=900)
        (engine,) = find_workers(os.getpid(), "engine")
        stream = llm.stream(PROMPT, GREEDY, max_tokens=900)
        text = next(stream)
        os.kill(engine, signal.SIGKILL)
        text += "".join(stream)
        assert text == whole.text
        assert stream.usage is not None and stream.usage.completion_tokens == 900
        assert find_workers(os.getpid(), "engine") != [engine]


def test_an_async_answer_goes_on_when_its_engine_is_killed() -> None:
    async def use() -> None:
        async with AsyncLLM("5", worker=SCRIPTED) as llm:
            (engine,) = find_workers(os.getpid(), "engine")
            answers = asyncio.create_task(llm.generate(["a", "b"], ENDLESS, max_tokens=200))
            async for _ in llm.stream("c", ENDLESS, max_tokens=200):
                os.kill(engine, signal.SIGKILL)
                break
            texts = [answer.text for answer in await answers]
            assert texts == [expected_text(prompt, 200, 1, ends=False) for prompt in (b"a", b"b")]

    asyncio.run(use())


def test_a_killed_tokenizer_is_replaced() -> None:
    with LLM(worker=SCRIPTED) as llm:
        for number in range(2):
            assert llm.chat([{"role": "user", "content": say(f"{number}")}]).text == str(number)
            (tokenizer,) = find_workers(os.getpid(), "tokenizer")
            os.kill(tokenizer, signal.SIGKILL)


# Loading ---------------------------------------------------------------------------------------------


def test_what_keeps_a_model_from_loading_is_raised(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"no model" * 100)
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        LLM(other)
    with pytest.raises(NotEnoughMemory, match="not enough memory"):
        LLM(tiny_model, ctx_size=2**31 - 1)
    unchecked = LLM(other, worker="cllm.workers.engine_worker")  # so the worker finds it
    with pytest.raises(ModelFileError, match=r"llama\.cpp cannot load other\.gguf"):
        unchecked.__enter__()
    assert not find_both(os.getpid())


def test_closing_while_a_model_loads_ends_the_loading(tiny_model: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        llm = LLM(tiny_model, parallel=1, ctx_size=512, threads=1)
        opening = pool.submit(llm.__enter__)
        wait_for(lambda: find_workers(os.getpid(), "engine"))
        llm.close()
        with pytest.raises(ShuttingDown, match="while the model was loading"):
            opening.result(PATIENCE_S)
    assert not find_both(os.getpid())


# Threads and event loops -----------------------------------------------------------------------------


def test_threads_share_a_model() -> None:
    with LLM(worker=SCRIPTED) as llm:

        def use(number: int) -> None:
            prompt = f"client {number}"
            text = expected_text(prompt.encode(), 20, 1, ends=False)
            assert llm.generate(prompt, ENDLESS, max_tokens=20)[0].text == text
            assert "".join(llm.stream(prompt, ENDLESS, max_tokens=20)) == text

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(use, range(30)))


def test_a_model_is_used_where_an_event_loop_runs() -> None:
    """As in a notebook."""

    async def use() -> None:
        with LLM(worker=SCRIPTED) as llm:
            assert llm.generate(say("one"))[0].text == "one"
            assert "".join(llm.stream(say("two"))) == "two"
            async with AsyncLLM(worker=SCRIPTED) as other:
                assert (await other.generate(say("three")))[0].text == "three"

    asyncio.run(use())


# Programs: none has an `if __name__ == "__main__"` -----------------------------------------------------

PROGRAM = """
import asyncio, os, sys, threading, time
from cllm import LLM, AsyncLLM, SamplingParams
from cllm.errors import EngineNotReady
from cllm.testing import say

endless = SamplingParams(ignore_eos=True)
def say_so(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()
"""
OPEN = "llm = LLM('5', worker='cllm.testing').__enter__()\n"


@contextmanager
def start(*lines: str) -> Iterator[subprocess.Popen[str]]:
    """A program with a process group of its own, as a shell starts it."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + "".join(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


ENDS = {
    "idle": "",
    "in the middle of a stream": "stream = llm.stream('x', endless, max_tokens=900); next(stream)\n",
    "in a thread": """
def use():
    for _ in llm.stream('x', endless, max_tokens=900):
        begun.set()
begun = threading.Event()
threading.Thread(target=use, daemon=True).start()
begun.wait()
""",
    "with asyncio": """
async def use():
    other = await AsyncLLM('5', worker='cllm.testing').__aenter__()
    task = asyncio.ensure_future(other.generate('x', endless, max_tokens=900))
    await asyncio.sleep(0.1)
asyncio.run(use())
""",
    "in a thread that Python waits for": """
def use():
    assert len(llm.generate('x', endless, max_tokens=50)[0].text) == 50
threading.Thread(target=use).start()
""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_interpreter_with_an_open_model_exits_cleanly(end: str) -> None:
    with start(OPEN, end, "say_so('used'); time.sleep(0.3)") as process:
        assert read_line(process) == "used"
        workers = find_both(process.pid)
        assert process.communicate(timeout=PATIENCE_S) == ("", "") and process.returncode == 0
        assert len(workers) >= 2 and not any(map(alive, workers))


def test_workers_end_with_a_program_that_is_killed() -> None:
    with start(OPEN, "say_so('open'); time.sleep(60)") as process:
        assert read_line(process) == "open"
        workers = find_both(process.pid)
        process.kill()
        wait_for(lambda: not any(map(alive, workers)), 10)


INTERRUPTED = """
try:
    threading.Timer(0.2, say_so, ('begun',)).start()
    llm.generate(['x'] * 20, endless, max_tokens=900)
except KeyboardInterrupt:
    say_so('interrupted')
say_so(llm.generate(say('again'))[0].text)
"""


def test_ctrl_c_interrupts_a_call_and_not_the_workers() -> None:
    with start(OPEN, INTERRUPTED, "time.sleep(0.3)") as process:
        assert read_line(process) == "begun"
        workers = find_both(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert (read_line(process), read_line(process)) == ("interrupted", "again")
        assert find_both(process.pid) == workers
        assert process.communicate(timeout=PATIENCE_S) == ("", "") and process.returncode == 0


@pytest.mark.parametrize("call", ["list(llm.stream('x', endless, max_tokens=900))", "time.sleep(60)"])
def test_ctrl_c_ends_a_program_with_an_open_model(call: str) -> None:
    with start(OPEN, "threading.Timer(0.2, say_so, ('begun',)).start()\n", call) as process:
        assert read_line(process) == "begun"
        workers = find_both(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        # A call that had not begun leaves a warning behind it.
        assert process.returncode == -signal.SIGINT and "\nKeyboardInterrupt\n" in errors
        assert errors.count("Traceback") == 1 and not any(map(alive, workers))


FORK = """
def refused(call):
    try:
        call()
    except EngineNotReady as error:
        return "opened in another process" in str(error)

with LLM('5', worker='cllm.testing') as llm:
    stream = llm.stream('x', endless, max_tokens=200)
    text = next(stream)
    for _ in range(3):
        child = os.fork()
        if not child:
            assert refused(lambda: llm.generate('x')) and refused(lambda: llm.info)
            assert refused(lambda: list(stream)) and refused(lambda: llm.embed('x'))
            with LLM(worker='cllm.testing') as own:
                assert own.generate(say('own'))[0].text == 'own'
            sys.exit(7)  # through the end of the parent's `with`
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(text + ''.join(stream)) == 200
say_so('done')
"""


def test_a_forked_child_is_refused_and_leaves_its_parent_alone() -> None:
    with start(FORK) as process:
        assert process.communicate(timeout=PATIENCE_S) == ("done\n", "") and process.returncode == 0

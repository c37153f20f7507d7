"""Random histories of an engine that dies: each answer is the undisturbed one, with one end."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.frontend.request_queue import Stage
from cllm.messages import Command, Died, Report, StepReport, Submit
from cllm.testing import FakeVocabulary
from cllm.text.structured_output import GrammarCompiler
from cllm.types import (
    ConstraintKind,
    ConstraintSpec,
    FinishReason,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
)
from cllm.workers.executor import ProcessExecutor, Receive
from tests.driver.engine import Answer, StepDriver
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream, ThreadTokenizer
from tests.profiles import examples

SETTINGS: dict[str, Any] = {"cells": 70, "unified": True, "sequences": 3}  # so few that some are preempted
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": ("ab", "q", "zzz")},
    {"logprobs": 1},
    {"constraint": ConstraintSpec(ConstraintKind.REGEX, "[a-m]{8}[0-9]{12}"), "speculate": False},
    {"constraint": ConstraintSpec(ConstraintKind.REGEX, "[0-9]{9}", ("e", "t"))},
    {"prompt_logprobs": 1, "logprobs": 1},
    {"min_tokens": 12, "stop_token_ids": (ord("k"),)},
    {"sampling": SamplingParams(seed=5, ignore_eos=True)},
)
numbers = st.integers(0, 10**6)


@cache
def make_compiler() -> GrammarCompiler:
    """One for all engines: it takes a while to be made."""
    return GrammarCompiler(FakeVocabulary())


def make_driver() -> StepDriver:
    driver = StepDriver(FakeRunner(**SETTINGS))
    driver.core.preparation._compiler = make_compiler()
    return driver


@cache
def undisturbed(kind: int, prompt: int) -> Answer:
    driver = make_driver()
    driver.submit(make_request("r", kind, prompt))
    return driver.finish()["r"]


def make_request(name: str, kind: int, prompt: int) -> Request:
    fields = {"timeout_s": 3600.0, "max_tokens": 24, **FIELDS[kind]}
    return Request(id=name, prompt=Prompt(tuple(b"prompt %d" % prompt)), **fields)


class SteppedExecutor(ProcessExecutor):
    """An executor whose engine computes a step when the test says so, and dies when it says so."""

    tokenizer = ThreadTokenizer()

    def __init__(self) -> None:
        self.driver: StepDriver | None = None
        self.receive: Receive | None = None
        self.mute = False  # what is computed is lost

    def start(self, receive: Receive, delay_s: float = 0.0) -> None:
        self.driver = make_driver()
        self.receive, self.mute = receive, False
        self.driver.core._emit = self._emit
        receive(self.driver.core.ready)

    def _emit(self, report: Report) -> None:
        assert self.driver is not None and self.receive is not None
        self.driver._take(report)
        if not self.mute:
            self.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=StepReport))

    def send(self, command: Command) -> None:
        assert self.driver is not None
        if isinstance(command, Submit):
            self.driver.submit(command.request)
        else:
            self.driver.core._handle(command)

    def step(self) -> None:
        assert self.driver is not None
        self.driver.step()

    def die(self) -> None:
        assert self.receive is not None
        self.receive(Died("engine_died", "killed by the test"))

    def stop(self) -> None:
        pass


class ResumeMachine(RuleBasedStateMachine):
    """Clients compare what they read with the undisturbed answer."""

    def __init__(self) -> None:
        super().__init__()
        self.executor = SteppedExecutor()
        self.engine = BlockingEngine(self.executor)
        self.engine.start()
        self.streams: dict[str, BlockingOutputStream] = {}
        self.expected: dict[str, Answer] = {}
        self.answers: dict[str, Answer] = {}
        self.blamed: dict[str, int] = {}  # crashes that each was there at
        self.ended: set[str] = set()  # by the client or its deadline

    @rule(kind=st.integers(0, len(FIELDS) - 1), prompt=st.integers(0, 3), count=st.integers(1, 3))
    def ask(self, kind: int, prompt: int, count: int) -> None:
        """With `count`, as `n` choices: equal here, since the fake samples by the seed alone."""
        for _ in range(count):
            name = f"r{len(self.streams)}"
            self.expected[name], self.answers[name] = undisturbed(kind, prompt), Answer()
            self.streams[name] = self.engine.submit(make_request(name, kind, prompt), BlockingOutputStream)

    def living(self) -> list[str]:
        return [name for name, stream in self.streams.items() if not stream.finished]

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.executor.step()

    @precondition(lambda self: self.living())
    @rule(lost_steps=st.integers(0, 3))
    def the_engine_dies(self, lost_steps: int) -> None:
        """What its last steps computed reaches no client."""
        inside = [each.request.id for each in self.engine.requests if each.stage is Stage.ENGINE]
        self.executor.mute = True
        for _ in range(lost_steps):
            self.executor.step()
        for name in inside:
            self.blamed[name] = self.blamed.get(name, 0) + 1
        self.engine._backoff.progress()
        self.executor.die()

    @precondition(lambda self: self.living())
    @rule(number=numbers)
    def a_client_leaves(self, number: int) -> None:
        name = self.living()[number % len(self.living())]
        self.ended.add(name)
        self.engine.cancel(name)

    @precondition(lambda self: self.living())
    @rule(number=numbers)
    def time_is_up(self, number: int) -> None:
        name = self.living()[number % len(self.living())]
        self.ended.add(name)
        self.engine._time_out(self.engine._queue.states[name])

    @invariant()
    def what_is_read_is_the_undisturbed_answer(self) -> None:
        for name, stream in self.streams.items():
            while stream._newest is not None:
                self._check(name, stream.take())

    def _check(self, name: str, output: RequestOutput) -> None:
        answer, expected = self.answers[name], self.expected[name]
        answer.take(output)  # fails where something follows the end
        assert expected.text.startswith(answer.text)
        assert expected.tokens[: len(answer.tokens)] == answer.tokens
        if answer.tokens or answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert answer.prompt_logprobs == expected.prompt_logprobs, "once, and whole"
        if answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert answer.text == expected.text and answer.logprobs == expected.logprobs
            assert answer.finish_reason is expected.finish_reason
            work, undisturbed = answer.work, expected.work
            assert work.completion_tokens == undisturbed.completion_tokens == len(answer.tokens)
            assert (work.prompt_tokens, work.cached_tokens) == (undisturbed.prompt_tokens, 0)
        elif answer.finish_reason is FinishReason.ERROR and name not in self.ended:
            assert answer.error_code == "poison_request" and self.blamed[name] > 2

    def teardown(self) -> None:
        """No other crash: all that is left ends, and rightly."""
        for _ in range(2000):
            if not self.living():
                break
            self.executor.step()
        self.what_is_read_is_the_undisturbed_answer()
        assert not self.living() and self.engine.requests == ()
        for name, answer in self.answers.items():
            assert answer.finish_reason is not None
            if name not in self.ended and self.blamed.get(name, 0) < 3:
                assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert self.executor.driver is not None
        self.executor.driver.check_released()
        self.engine.stop()


TestResume = ResumeMachine.TestCase
TestResume.settings = settings(
    max_examples=examples(25), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)

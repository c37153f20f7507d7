"""Constrained answers: whatever the model wants, what comes out fits its grammar, or it is refused."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.errors import InvalidRequest
from cllm.limits import MAX_MASK_MS
from cllm.messages import Prepare, Report, StepReport
from cllm.testing import FakeVocabulary
from cllm.text import structured_output
from cllm.text.prompt import RawText
from cllm.text.structured_output import GrammarCompiler, MaskBuilder, _allocated_bytes
from cllm.types import (
    ConstraintKind,
    ConstraintSpec,
    Failure,
    FinishReason,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
)
from cllm.workers.tokenizer import TokenizerWorker
from tests.driver.fake_runner import FakeRunner
from tests.driver.masks import get_mask
from tests.profiles import examples

COMPILER, MASKS = GrammarCompiler(FakeVocabulary()), MaskBuilder(FakeVocabulary.size)


def spec(kind: str, source: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind(kind), source)


def answer(*specs: ConstraintSpec, max_tokens: int = 400, seed: int = 0) -> list[list[RequestOutput]]:
    """The deltas of one request per constraint, computed together."""
    reports: list[Report] = []
    loop = EngineCore(FakeRunner(sequences=4, cells=4096), EngineConfig(), reports.append)
    for number, constraint in enumerate(specs):
        loop.scheduler.add(
            Request(
                id=str(number),
                prompt=Prompt(tuple(b"prompt %d" % number)),
                max_tokens=max_tokens,
                sampling=SamplingParams(seed=seed),
                constraint=constraint,
            )
        )
    while loop.scheduler.live:
        loop.step()
    loop.scheduler.check_idle()
    deltas = [delta for report in reports if isinstance(report, StepReport) for delta in report.outputs]
    return [[delta for delta in deltas if delta.request_id == str(number)] for number in range(len(specs))]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"enum": [-9223372036854775808]}'),
        ("json_schema", ' {"const": {"a": [9007199254740993]}}'),
        ("json_schema", '{"type": "integer", "const": 1e30}'),
        (
            "json_schema",
            '{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}',
        ),
        ("tools", 'start: %json {"const": 100000000000000000000}'),
        ("grammar", 'start: %json {"enum": [-9223372036854775808]}'),
    ],
)
def test_a_number_that_cannot_be_written_exactly_is_refused(kind: str, source: str) -> None:
    """llguidance would write another one, or end the process."""
    with pytest.raises(InvalidRequest, match="beyond the numbers"):
        COMPILER.compile(spec(kind, source))
    COMPILER.compile(spec("json_schema", '{"enum": [9007199254740992, -1, 1e15]}'))


def text(deltas: list[RequestOutput]) -> str:
    return "".join(delta.text for delta in deltas)


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -5, "maximum": 90},
            {"type": "string", "maxLength": 6},
            {"type": "string", "pattern": "^[a-f]{2,4}$"},
            {"enum": ["red", "green", 7]},
            {"const": "fixed"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 3}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.dictionaries(st.sampled_from(["a", "bb", "c c"]), inner, min_size=1, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=examples(60))
@given(schema=SCHEMAS, seed=st.integers(0, 50))
def test_an_answer_validates_against_its_schema(schema: dict[str, Any], seed: int) -> None:
    (deltas,) = answer(spec("json_schema", json.dumps(schema)), seed=seed)
    assert deltas[-1].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(text(deltas)), schema)


def test_a_choice_is_taken_letter_by_letter() -> None:
    every = "".join(map(chr, range(0x20, 0x7F)))
    (deltas,) = answer(spec("choice", json.dumps([every])), max_tokens=200)
    assert text(deltas) == every


def test_each_kind_is_honoured_beside_the_others() -> None:
    regex, choice, gbnf, lark = answer(
        spec("regex", r"[0-9]{3}-[0-9]{4}"),
        spec("choice", json.dumps(["red", "gr-een (x)", "blue+"])),
        spec("grammar", 'root ::= "maybe" | "never"'),
        spec("grammar", 'start: "a"~3 "!"'),
    )
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", text(regex))
    assert text(choice) in ["red", "gr-een (x)", "blue+"]
    assert text(gbnf) in ["maybe", "never"]
    assert text(lark) == "aaa!"


def test_forced_tokens_are_not_computed_one_by_one() -> None:
    (deltas,) = answer(spec("choice", json.dumps(["a long text that leaves the model no choice at all"])))
    usage = deltas[-1].usage
    assert usage is not None and usage.completion_tokens == 50
    assert usage.steps < 10


def test_max_tokens_ends_a_constrained_answer_with_length() -> None:
    (deltas,) = answer(spec("regex", "[a-z]{100}"), max_tokens=10)
    assert deltas[-1].finish_reason is FinishReason.LENGTH and len(text(deltas)) == 10


@pytest.mark.parametrize(
    "bad",
    [
        spec("regex", "("),
        spec("grammar", "start: nothing_of_the_kind"),
        spec("grammar", "(" * 60_000),
        spec("json_schema", '{"type": "foo"}'),
        spec("json_schema", '{"$ref": "#/nowhere"}'),
        spec("json_schema", "[" * 10_000),
        spec("regex", "x" * 300_000),
    ],
    ids=lambda bad: bad.source[:12],
)
def test_what_cannot_be_honoured_is_refused(bad: ConstraintSpec) -> None:
    with pytest.raises(InvalidRequest):
        COMPILER.compile(bad)
    task = Prepare((RawText(("x",)),), constraint=bad)
    refused = TokenizerWorker(FakeVocabulary(), None).perform(task)
    assert isinstance(refused, Failure) and "\n" not in refused.message


OPTIONAL = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}


def test_a_grammar_that_fails_in_mid_answer_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_LIMITS", LLParserLimits(max_items_in_row=1000))
    bad = spec("json_schema", json.dumps(OPTIONAL))
    COMPILER.compile(bad)
    with pytest.raises(InvalidRequest, match=f"^{bad.field}: too complex to be followed") as refused:
        COMPILER.check(bad)
    assert refused.value.field == bad.field


def test_many_optional_properties_fail_nowhere() -> None:
    """Where the rehearsal did not come to them, an answer ended there with an error."""
    properties = {"a": {"type": "string", "minLength": 60, "maxLength": 60}, "b": OPTIONAL}
    late = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    matcher = COMPILER._compile(spec("json_schema", json.dumps(late)))
    for token in ('{"a":"' + "x" * 60 + '","b":{"p1":"c"').encode():
        matcher.compute_bitmask()
        assert matcher.consume_token(token) and not matcher.is_error()


def test_a_grammar_of_slow_masks_is_refused_by_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for step_s, refusal in ((MAX_MASK_MS / 1000, ""), (MAX_MASK_MS / 1000 + 0.001, "regex: 26 ms a mask")):
        ticks = itertools.count()
        clock = SimpleNamespace(thread_time=lambda step_s=step_s, ticks=ticks: next(ticks) * step_s)
        monkeypatch.setattr(structured_output, "time", clock)
        with pytest.raises(InvalidRequest, match=refusal) if refusal else nullcontext():
            GrammarCompiler(FakeVocabulary()).check(spec("regex", "[a-z]{3}"))


def test_a_mask_that_is_slow_once_refuses_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mask of the first answer takes long, and not when it is made again."""
    times = itertools.chain([0.0, 0.0, 0.0, 1.0], itertools.repeat(1.0))
    monkeypatch.setattr(structured_output, "time", SimpleNamespace(thread_time=lambda: next(times)))
    GrammarCompiler(FakeVocabulary()).check(spec("regex", "[a-z]{3}"))


def test_a_grammar_is_compiled_under_the_guard_of_its_thread() -> None:
    entered: list[str] = []

    @contextmanager
    def guard() -> Iterator[None]:
        entered.append(threading.current_thread().name)
        yield

    GrammarCompiler(FakeVocabulary(), guard=guard).check(spec("regex", "ab"))
    assert entered and all(name.startswith("cllm-compile") for name in entered)


def test_a_bad_grammar_that_reaches_the_engine_fails_alone() -> None:
    bad, good = answer(spec("regex", "("), spec("regex", "ok"))
    assert bad[-1].error is not None and bad[-1].error.code == "invalid_request"
    assert text(good) == "ok"


# The cache of compiled grammars -----------------------------------------------------------------------


def wide_schema(number: int, fields: int = 200) -> ConstraintSpec:
    """A schema that takes most of a megabyte when it is compiled."""
    names = [f"field{number}_{place}" for place in range(fields)]
    properties = {name: {"type": "integer"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def _fill_cache(limit: int) -> tuple[int, int, list[bool]]:
    """The bytes that a full cache takes, those that it says, and which of 24 grammars it keeps."""
    compiler = GrammarCompiler(FakeVocabulary(), limit)
    compiler.compile(wide_schema(0, 1))
    gc.collect()
    before = _allocated_bytes() - compiler.memory_bytes
    for number in range(24):
        compiler.compile(wide_schema(number))
        assert compiler.memory_bytes <= limit
    gc.collect()
    kept = [wide_schema(number) in compiler._cached for number in range(24)]
    return _allocated_bytes() - before, compiler.memory_bytes, kept


def test_the_cache_takes_no_more_than_its_bytes_and_says_what_it_takes() -> None:
    # In a process of its own: what other tests have left behind is freed at any time.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        taken, said, kept = alone.submit(_fill_cache, 4 << 20).result(timeout=60)
    if taken:  # where the C library says
        assert taken == pytest.approx(said, rel=0.2)
    assert 0 < sum(kept) < 24 and kept == sorted(kept)


def test_a_grammar_that_has_grown_makes_room_and_is_compiled_again() -> None:
    compiler = GrammarCompiler(FakeVocabulary(), 4 << 20)
    spec = ConstraintSpec(ConstraintKind.REGEX, "[a-z]{1,500}")
    used, other = compiler.compile(spec), wide_schema(1)
    compiler.compile(other)
    for _ in range(300):
        used.accept(ord("x"))
    compiler.compile(other)
    assert list(compiler._cached) == [other]
    again = compiler.compile(spec)
    assert all(get_mask(MASKS, constraint)[ord("x")] for constraint in (again, used))


def test_a_grammar_that_is_only_checked_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(FakeVocabulary())
    compiled: list[ConstraintSpec] = []
    compile_it = compiler._compile

    def counted(spec: ConstraintSpec) -> LLMatcher:
        compiled.append(spec)
        return compile_it(spec)

    monkeypatch.setattr(compiler, "_compile", counted)
    for _ in range(3):
        compiler.check(wide_schema(1))
        with pytest.raises(InvalidRequest):
            compiler.check(ConstraintSpec(ConstraintKind.REGEX, "(("))
    assert compiled.count(wide_schema(1)) == 1 and compiler.memory_bytes == 0


def test_a_grammar_that_grows_too_far_fails_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = LLParserLimits(max_lexer_states=200, verbose_errors=False)
    monkeypatch.setattr(structured_output, "_LIMITS", few)
    constraint = GrammarCompiler(FakeVocabulary()).compile(spec("regex", "[a-z]{1,500}"))
    with pytest.raises(InvalidRequest, match=r"more than 65536 states: use shorter repetitions"):
        for _ in range(400):
            get_mask(MASKS, constraint)
            constraint.accept(ord("x"))

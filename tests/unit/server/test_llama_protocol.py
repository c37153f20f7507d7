"""llama-server's bodies and responses: its forms, its names, its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import UNSET

from cllm.errors import (
    InvalidRequest,
)
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.app import add_defaults
from cllm.server.dialects import llama_body as answers
from cllm.server.dialects.llama_body import LlamaCompletionBody, split_inputs
from cllm.server.dialects.llama_server import LineLimits
from cllm.server.dialects.openai.embeddings import LlamaEmbeddingBody
from cllm.server.generation import GenerationBody
from cllm.server.timings import get_timings
from cllm.types import SEED_SPACE, Prompt, Request, SamplingParams, TokenLogprob, Usage


def body(**fields: Any) -> LlamaCompletionBody:
    return LlamaCompletionBody.parse({"prompt": "x", **fields})


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", [["a"]]),
        ("", [[""]]),
        ([1, 2], [[1, 2]]),
        (["a", 1, "b"], [["a", 1, "b"]]),
        (["a", "b"], [["a"], ["b"]]),
        ([[1, 2], "a", ["b", 3]], [[1, 2], ["a"], ["b", 3]]),
        ({"prompt_string": "a"}, [["a"]]),
        ([{"prompt_string": "a"}, [1]], [["a"], [1]]),
    ],
)
def test_forms_of_a_prompt(given: Any, prompts: list[list[str | int]]) -> None:
    assert body(prompt=given).prompts == prompts


@pytest.mark.parametrize(
    "given", [None, [], 5, [[]], {"text": "a"}, [-1], [1.5], [1, [2]], ["a"] * 257, [["a"] * 257]]
)
def test_what_is_no_prompt(given: Any) -> None:
    with pytest.raises(InvalidRequest):
        body(prompt=given)


@pytest.mark.parametrize(
    ("given", "stop"), [("x", "x"), ("", None), ([""], ()), (["a", "", "b"], ("a", "b")), (None, None)]
)
def test_forms_of_stop(given: Any, stop: Any) -> None:
    assert body(stop=given).stop == stop


def test_media_beside_a_prompt_are_taken_or_refused() -> None:
    """llama-server's form. Dropping them would answer another question."""
    given = {"prompt_string": "What is <__media__>?", "multimodal_data": ["aGVsbG8="]}
    for prompt in (given, [given]):
        with pytest.raises(InvalidRequest, match=r"multimodal_data is not supported.*text only") as refused:
            body(prompt=prompt).take_pictures(sees=False)
        assert refused.value.field == "prompt"
        seen = body(prompt=prompt)
        ((marker, data),) = seen.take_pictures(sees=True).items()
        assert seen.prompts == [[f"What is {marker}?"]] and data == "aGVsbG8="
    with pytest.raises(InvalidRequest, match="it has 1 times <__media__> for 2 pictures"):
        body(prompt={**given, "multimodal_data": ["AA==", "AA=="]}).take_pictures(sees=True)
    with pytest.raises(InvalidRequest, match="multimodal_data") as refused:
        LlamaEmbeddingBody.parse({"content": given})
    assert refused.value.field == "content"
    assert body(prompt={"prompt_string": "1+1=", "multimodal_data": []}).prompts == [["1+1="]]


def test_numbers_out_of_bounds_are_the_nearest_within() -> None:
    found = body(temperature=-1, top_p=1.5, top_k=-5, mirostat=9, repeat_penalty=99, n_predict=64.0)
    sampling = found.sampling(10)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.mirostat) == (0, 1, 0, 2)
    assert (sampling.repetition_penalty, found.n_predict) == (10, 64)


def test_an_empty_grammar_is_none_and_a_grammar_goes_before_a_schema() -> None:
    assert body(grammar="").constraint() is None
    constraint = body(grammar='root ::= "a"', json_schema={}).constraint()
    assert constraint is not None and constraint.kind.value == "grammar"


@pytest.mark.parametrize("bias", [{"5": 1.5, "7": False}, [[5, 1.5], [7, False]], [["5", 1.5], ["7", False]]])
def test_forms_of_logit_bias(bias: Any) -> None:
    assert GenerationBody.parse({"logit_bias": bias}).sampling(10).logit_bias == ((5, 1.5), (7, -100))


def test_a_bias_may_be_by_text() -> None:
    for bias in ([["ab", -1], ["7", 1], [3, 2], [7, 3]], {"ab": -1, "\0007": 1, "3": 2, "7": 3}):
        found = body(logit_bias=bias)
        assert found.biases == {"ab": -1, "7": 1}
        assert found.sampling(10).logit_bias == ((3, 2), (7, 3))


@pytest.mark.parametrize("seed", [None, -1, SEED_SPACE])
def test_random_seeds(seed: int | None) -> None:
    drawn = {GenerationBody.parse({"seed": seed}).sampling(1).seed for _ in range(3)}
    assert len(drawn) > 1


@pytest.mark.parametrize(
    "samplers", ["kt", ["top_k", "temperature"], ["top-k", "temp"], ["k", "t", "wibble"]]
)
def test_only_the_samplers_that_are_named(samplers: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.2,
        "repetition_penalty": 2.0,
        "seed": 1,
    }
    found = GenerationBody.parse({**fields, "samplers": samplers}).sampling(1)
    assert found == SamplingParams(temperature=0.5, top_k=7, top_p=1.0, min_p=0.0, seed=1)
    without = GenerationBody.parse({**fields, "samplers": ["top_k"]}).sampling(1)
    assert without.temperature == 1.0


@pytest.mark.parametrize(
    ("samplers", "target"), [(None, 0.4), (["top_k"], -1), ("ka", 0.4), (["adaptive_p"], 0.4)]
)
def test_adaptive_p_is_reported_where_it_draws(samplers: Any, target: float) -> None:
    found = body(adaptive_target=0.4, adaptive_decay=2, samplers=samplers).sampling(10)
    settings = answers.make_settings(Request(id="", prompt=Prompt(()), max_tokens=1, sampling=found))
    assert (settings["adaptive_target"], settings["adaptive_decay"]) == (target, 0.99)
    assert ("adaptive_p" in settings["samplers"]) is (target >= 0)


def test_defaults_fill_in_what_a_body_lacks() -> None:
    defaults = {"temperature": 0.5, "max_tokens": 9, "grammar": "G", "chat_template_kwargs": {"a": 1, "b": 1}}

    def filled(**given: Any) -> dict[str, Any]:
        found: dict[str, Any] = add_defaults(defaults, given)
        return found

    assert filled() == defaults
    assert filled(temperature=None)["temperature"] == 0.5 and filled(temperature=0)["temperature"] == 0
    assert "max_tokens" not in filled(n_predict=3) and filled(n_predict=-1)["max_tokens"] == 9
    assert "grammar" not in filled(response_format={"type": "json_object"})
    assert filled(chat_template_kwargs={"a": 2})["chat_template_kwargs"] == {"a": 2, "b": 1}
    assert add_defaults(defaults, [1]) == [1]


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("x\n  y\n    z", "x\n  y\n    z"),
        ("x\n  y\nz", "x\n  y\n"),
        ("  x\n y\n  z", "  x\n "),
        ("x\n  y\n\n  z", "x\n  y\n"),
        ("xyz", "xyz"),
    ],
)
def test_a_line_indented_by_too_little_ends_it(text: str, kept: str, pieces: bool) -> None:
    ended: list[bool] = []
    limits = LineLimits(2, 0, lambda: ended.append(True))
    parts = list(text) if pieces else [text]
    assert "".join(limits.cut(part, 0.0) for part in parts) == kept
    assert bool(ended) is limits.over is (kept != text)


def test_time_ends_it_at_a_line_break() -> None:
    ended: list[bool] = []
    limits = LineLimits(0, 1.0, lambda: ended.append(True))
    assert [limits.cut("a\n", 0.5), limits.cut("b", 2.0)] == ["a\n", "b"] and not ended
    assert [limits.cut("c\n", 2.0), limits.cut("d", 2.0)] == ["c\n", ""] and ended == [True]


@pytest.mark.parametrize(("generated", "speed"), [(0, 0.0), (1, 0.0), (5, 8.0)])
def test_the_first_token_comes_with_the_prompt(generated: int, speed: float) -> None:
    seconds = 0.5 if generated > 1 else 1e-6
    stream = AsyncOutputStream("r")
    stream.started, stream.first_token, stream.ended = 1, 3, 3 + seconds
    found = get_timings(stream, 8, Usage(prompt_tokens=8, completion_tokens=generated, cached_tokens=4))
    assert (found.predicted_per_second, found.prompt_per_second) == (speed, 2.0)
    assert found.prompt_per_token_ms == 500 and found.cache_n == 4


ENTRY = TokenLogprob(
    1,
    math.log(0.2),
    ((0, math.log(0.5)), (1, math.log(0.2)), (2, math.log(0.01))),
    (b"b", b"a", b"b", b"\xff"),
)


def test_probabilities_before_and_after_sampling() -> None:
    (before,) = answers.make_probabilities([ENTRY], top=1)
    assert before.logprob == math.log(0.2) and before.prob is UNSET
    assert isinstance(before.top_logprobs, list) and len(before.top_logprobs) == 1
    (after,) = answers.make_probabilities([ENTRY], SamplingParams(temperature=1.0, top_p=1.0, min_p=0.1))
    assert after.prob == pytest.approx(0.2 / 0.7) and isinstance(after.top_probs, list)
    assert [each.prob for each in after.top_probs] == [pytest.approx(0.5 / 0.7), pytest.approx(0.2 / 0.7)]
    (greedy,) = answers.make_probabilities([ENTRY], SamplingParams(temperature=0))
    assert isinstance(greedy.top_probs, list) and [each.prob for each in greedy.top_probs] == [1.0]


def test_settings_have_its_names() -> None:
    request = Request(id="", prompt=Prompt(()), max_tokens=3, sampling=SamplingParams(seed=5), stop=("x",))
    found = answers.make_settings(request)
    assert (found["repeat_penalty"], found["repeat_last_n"], found["seed"]) == (1.0, 64, 5)
    assert found["stop"] == ("x",) and "stop" not in answers.make_settings(request, brief=True)
    params = answers.make_params({"temperature": 0.25, "max_tokens": 4})
    assert (params["temperature"], params["n_predict"], params["seed"]) == (0.25, 4, SEED_SPACE)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", [["a"]]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], [["a"], ["b"]]),
        (["a", 5], [["a", 5]]),
        ([[1], "a", ["b", 2]], [[1], ["a"], ["b", 2]]),
        ({"content": "a"}, [["a"]]),
        ([{"content": "a"}, {"prompt_string": "b"}, "c"], [["a"], ["b"], ["c"]]),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [["ab"]]),
    ],
)
def test_forms_of_embedding_inputs(given: Any, inputs: list[list[str | int]]) -> None:
    assert split_inputs(LlamaEmbeddingBody.parse({"content": given}).content) == inputs


@pytest.mark.parametrize(
    "given", [[], "", [[]], [""], [["a"]], [1, [2]], [1, {}], ["a"] * 2049, [-1], {"content": ""}]
)
def test_what_is_no_embedding_input(given: Any) -> None:
    with pytest.raises(InvalidRequest):
        LlamaEmbeddingBody.parse({"content": given})

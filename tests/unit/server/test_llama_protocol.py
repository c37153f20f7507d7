"""llama-server's bodies and responses: its forms, its names, its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import UNSET
from pydantic import ValidationError

from cllm.server.app import add_defaults
from cllm.server.errors import error_body
from cllm.server.protocol import llama_responses as api
from cllm.server.protocol.base import make_timings
from cllm.server.protocol.embeddings import LlamaEmbeddingBody, RerankBody, split_inputs
from cllm.server.protocol.llama import LlamaCompletionBody, LlamaTokenizeBody
from cllm.server.protocol.sampling import SamplingBody
from cllm.server.routes.llama_completion import LineLimits
from cllm.types import SEED_SPACE, Request, SamplingParams, TokenLogprob


def body(**fields: Any) -> LlamaCompletionBody:
    return LlamaCompletionBody.model_validate({"prompt": "x", **fields})


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


@pytest.mark.parametrize("given", [None, [], 5, [[]], {"text": "a"}, [-1], [1.5], ["a"] * 257])
def test_what_is_no_prompt(given: Any) -> None:
    with pytest.raises(ValidationError):
        body(prompt=given)


@pytest.mark.parametrize(
    ("stop", "stops"), [("x", ("x",)), ("", ()), ([""], ()), (["a", "", "b"], ("a", "b")), (None, ())]
)
def test_forms_of_stop(stop: Any, stops: tuple[str, ...]) -> None:
    assert body(stop=stop).stops == stops


def test_null_is_what_was_left_out() -> None:
    nulls = dict.fromkeys(LlamaCompletionBody.model_fields, None)
    assert LlamaCompletionBody.model_validate({**nulls, "prompt": "x"}) == body()
    assert LlamaTokenizeBody.model_validate({"content": None}).content == ""


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
    assert SamplingBody.model_validate({"logit_bias": bias}).sampling(10).logit_bias == ((5, 1.5), (7, -100))


def test_a_bias_by_text_is_for_each_of_its_tokens() -> None:
    for bias in ([["ab", -1], ["7", 1], [3, 2]], {"ab": -1, "\0007": 1, "3": 2}):
        found = body(logit_bias=bias)
        ab, seven = found.bias_texts
        assert (found.bias_text(ab), found.bias_text(seven)) == ("ab", "7")
        assert found.sampling(10, {ab: (4, 5), seven: (6,)}).logit_bias == ((4, -1), (5, -1), (6, 1), (3, 2))


@pytest.mark.parametrize("seed", [None, -1, SEED_SPACE])
def test_random_seeds(seed: int | None) -> None:
    drawn = {SamplingBody.model_validate({"seed": seed}).sampling(1).seed for _ in range(3)}
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
    found = SamplingBody.model_validate({**fields, "samplers": samplers}).sampling(1)
    assert found == SamplingParams(temperature=0.5, top_k=7, top_p=1.0, min_p=0.0, seed=1)
    without = SamplingBody.model_validate({**fields, "samplers": ["top_k"]}).sampling(1)
    assert without.temperature == 1.0


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
    found = make_timings(prompt_tokens=8, generated=generated, prompt_s=2, generated_s=seconds, cached=4)
    assert (found.predicted_per_second, found.prompt_per_second) == (speed, 2.0)
    assert found.prompt_per_token_ms == 500 and found.cache_n == 4


ENTRY = TokenLogprob(
    1,
    math.log(0.2),
    ((0, math.log(0.5)), (1, math.log(0.2)), (2, math.log(0.01))),
    (b"b", b"a", b"b", b"\xff"),
)


def test_probabilities_before_and_after_sampling() -> None:
    (before,) = api.make_probabilities([ENTRY], top=1)
    assert before.logprob == math.log(0.2) and before.prob is UNSET
    assert isinstance(before.top_logprobs, list) and len(before.top_logprobs) == 1
    (after,) = api.make_probabilities([ENTRY], SamplingParams(temperature=1.0, top_p=1.0, min_p=0.1))
    assert after.prob == pytest.approx(0.2 / 0.7) and isinstance(after.top_probs, list)
    assert [each.prob for each in after.top_probs] == [pytest.approx(0.5 / 0.7), pytest.approx(0.2 / 0.7)]
    (greedy,) = api.make_probabilities([ENTRY], SamplingParams(temperature=0))
    assert isinstance(greedy.top_probs, list) and [each.prob for each in greedy.top_probs] == [1.0]


def test_response_fields() -> None:
    response = {"a": 1, "b": {"c": 2, "d": 3}}
    assert api.select_fields(response, ["a", "b/c", "b/x", "z"]) == {"a": 1, "b/c": 2}


def test_settings_have_its_names() -> None:
    request = Request(id="", prompt=(), max_tokens=3, sampling=SamplingParams(seed=5), stop=("x",))
    found = api.make_settings(request)
    assert (found["repeat_penalty"], found["repeat_last_n"], found["seed"]) == (1.0, 64, 5)
    assert found["stop"] == ("x",) and "stop" not in api.make_settings(request, brief=True)
    params = api.make_params({"temperature": 0.25, "max_tokens": 4})
    assert (params["temperature"], params["n_predict"], params["seed"]) == (0.25, 4, SEED_SPACE)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", "invalid_request_error"),
        (401, "invalid_api_key", "authentication_error"),
        (404, "not_found", "not_found_error"),
        (501, "not_supported", "not_supported_error"),
        (503, "engine_not_ready", "unavailable_error"),
        (500, "engine_died", "server_error"),
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/slots/3", "/chat/completions", "/v1/embedding"])
def test_the_shape_of_errors(path: str, status: int, code: str, kind: str) -> None:
    found = error_body(path, status, code, "m")["error"]
    assert (found == {"code": status, "message": "m", "type": kind}) is not path.startswith("/v1")


def test_a_prompt_that_is_too_long_says_its_length() -> None:
    message = "the prompt has at least 90 tokens, but this model's maximum context length is 64: at most"
    found = error_body("/completion", 400, "context_length_exceeded", message)["error"]
    assert found["type"] == "exceed_context_size_error"
    assert (found["n_prompt_tokens"], found["n_ctx"]) == (90, 64)


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
    assert split_inputs(LlamaEmbeddingBody.model_validate({"content": given}).content) == inputs


def test_texts_are_ranked_as_a_list() -> None:
    assert RerankBody.model_validate({"query": "q", "texts": ["a"]}).listed
    assert not RerankBody.model_validate({"query": "q", "documents": ["a"]}).listed

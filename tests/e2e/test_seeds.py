"""The earlier server's own cases, over HTTP, on the embedded model: there, these slowed down and crashed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.driver.server import Server
from tests.driver.slot_log import SlotLog

SUMS = ("1+1=", "2+2=", "3+3=")
TALK = ("Hello, how are you?", "What is AI?", "Tell me a joke.")
WORK = ("decoded_tokens", "steps", "ubatches", "cells", "prompt_tokens", "cached_tokens")


@pytest.fixture(autouse=True)
def clean(embedded: Server) -> Iterator[None]:
    """Cases d and e: after each, a lease and a release for every request, and nothing left in use."""
    before = len(embedded.log_text)
    accepted = embedded.metrics()["cllm_requests_accepted_total"]
    yield
    assert embedded.kv_is_zero()
    assert "inconsistent position" not in embedded.log_text
    requests = embedded.metrics()["cllm_requests_accepted_total"] - accepted
    ids = SlotLog(embedded.log_text[before:].splitlines())
    assert len(ids.leases) == requests and ids.find_faults(ids.leases) == []


def assert_valid(data: dict[str, Any], max_tokens: int) -> None:
    assert data["text"]
    assert data["generated_tokens"] == data["max_tokens"] == max_tokens
    assert data["finish_reason"] == "length"
    assert data["response_time"] > 0
    assert data["tokens_per_second"] > 0
    assert set(data) >= {"id", "text", "response_time", "tokens_per_second", "generated_tokens"}


@pytest.mark.parametrize("prompts", [SUMS, TALK, (*SUMS, *TALK[:2])], ids=["sums", "talk", "five"])
def test_requests_in_a_row_are_all_valid(embedded: Server, prompts: tuple[str, ...]) -> None:
    for prompt in prompts:
        assert_valid(embedded.generate(prompt, 16, ignore_eos=True), 16)
        assert embedded.kv_is_zero()


def test_five_concurrent_requests_are_all_valid(embedded: Server) -> None:
    with ThreadPoolExecutor(5) as pool:
        prompts = (*SUMS, *TALK[:2])
        for data in pool.map(lambda prompt: embedded.generate(prompt, 16, ignore_eos=True), prompts):
            assert_valid(data, 16)


def test_an_answer_may_be_empty(embedded: Server) -> None:
    """The end of a turn is made the likeliest token."""
    (end,) = embedded.post("/tokenize", {"content": embedded.get("/props")["eos_token"]}).json()["tokens"]
    data = embedded.generate(TALK[2], 16, logit_bias={str(end): 100})
    assert (data["text"], data["generated_tokens"], data["finish_reason"]) == ("", 0, "stop")


@pytest.mark.parametrize("max_tokens", [16, 1])
def test_ten_identical_requests_cost_exactly_the_same(embedded: Server, max_tokens: int) -> None:
    fixed: Any = {"ignore_eos": True, "speculate": False}  # whatever it says: so many tokens, one a step
    answers = [embedded.generate("Once upon a time", max_tokens, **fixed) for _ in range(10)]
    assert len({answer["text"] for answer in answers}) == 1
    assert len({tuple(answer["usage"][name] for name in WORK) for answer in answers}) == 1
    usage = answers[0]["usage"]
    assert usage["decoded_tokens"] == usage["prompt_tokens"] + max_tokens - 1
    assert usage["steps"] == usage["ubatches"] == max_tokens


def test_each_request_takes_the_same_empty_slot_again(embedded: Server) -> None:
    before = len(embedded.log_text)
    for _ in range(3):
        embedded.generate("1+1=", 2)
    slots = SlotLog(embedded.log_text[before:].splitlines()).slots
    assert len(slots) == 3 and len({seq_id for seq_id, _ in slots}) == 1

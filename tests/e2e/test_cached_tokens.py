"""The second turn of a conversation, on every route: what was cached, and from where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.driver.server import Server, wait_for

Ask = Callable[[str, Server], tuple[int, int, str]]  # prompt tokens, cached tokens, and their source


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def post(server: Server, path: str, **body: Any) -> Any:
    answer = server.post(path, {"max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask_chat(text: str, server: Server) -> tuple[int, int, str]:
    usage = post(server, "/v1/chat/completions", messages=messages(text))["usage"]
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], details["cached_tokens"], details["cached_from"]


def ask_completions(text: str, server: Server) -> tuple[int, int, str]:
    usage = post(server, "/v1/completions", prompt=text)["usage"]
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], details["cached_tokens"], details["cached_from"]


def ask_responses(text: str, server: Server) -> tuple[int, int, str]:
    usage = post(server, "/v1/responses", input=text, max_output_tokens=4)["usage"]
    details = usage["input_tokens_details"]
    return usage["input_tokens"], details["cached_tokens"], details["cached_from"]


def ask_messages(text: str, server: Server) -> tuple[int, int, str]:
    usage = post(server, "/v1/messages", messages=messages(text))["usage"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, "device" if cached else ""


def ask_llama(text: str, server: Server) -> tuple[int, int, str]:
    answer = post(server, "/completion", prompt=text)
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    return answer["tokens_evaluated"], timings["cache_n"], answer["cached_from"]


def ask_generate(text: str, server: Server) -> tuple[int, int, str]:
    usage = server.generate(text, 4)["usage"]
    return usage["prompt_tokens"], usage["cached_tokens"], usage["cached_from"]


ROUTES = (ask_chat, ask_completions, ask_responses, ask_messages, ask_llama, ask_generate)


def count_cached(server: Server) -> float:
    """Cached tokens of all tiers, as the metrics have them."""
    found = server.metrics().items()
    return sum(value for name, value in found if name.startswith("cllm_cached_tokens_total"))


@pytest.mark.parametrize("ask", ROUTES, ids=lambda ask: ask.__name__.removeprefix("ask_"))
def test_a_prompt_that_comes_again_is_cached_on_the_device(tiny: Server, ask: Ask) -> None:
    text = f"{ask.__name__}: " + "the quick brown fox jumps over the lazy dog. " * 4
    before, log_before = count_cached(tiny), len(tiny.log_text)
    first, again = ask(text, tiny), ask(text, tiny)
    assert first[0] == again[0] and first[1] < first[0] / 2
    assert again[1:] == (again[0] - 1, "device"), "one token is always computed"
    said = f"{again[0]} prompt tokens ({again[1]} cached from device)"
    wait_for(lambda: said in tiny.log_text[log_before:], 5)
    assert count_cached(tiny) == before + first[1] + again[1]


def test_a_request_that_declines_has_nothing_cached(tiny: Server) -> None:
    text = "a request that declines: " * 8
    for _ in range(2):
        usage = tiny.generate(text, 4, cache_prompt=False)["usage"]
        assert (usage["cached_tokens"], usage["cached_from"]) == (0, "")

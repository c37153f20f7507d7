"""Cached tokens, and the tier of the KV cache they came from, in the words of each API."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from cllm.chat.reply import ReplyBuilder
from cllm.server.dialects.anthropic import MessageRenderer
from cllm.server.dialects.llama_body import LlamaCompletionBody
from cllm.server.dialects.llama_server import Completions, LimitedStream
from cllm.server.dialects.openai.completions import make_usage
from cllm.server.dialects.responses import ResponseRenderer, echo
from cllm.server.dialects.responses_body import ResponsesBody
from cllm.types import FinishReason, Prompt, Request, RequestOutput, Usage

USAGE = Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=80, cached_from="ram")
LAST = RequestOutput(request_id="r", finish_reason=FinishReason.LENGTH, usage=USAGE)


def plain(response: object) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(response)
    return found


def test_of_several_choices_the_one_that_had_least_counts() -> None:
    other = Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=60, cached_from="device")
    assert plain(make_usage([USAGE, None, other], 90)) == {
        "prompt_tokens": 90,
        "completion_tokens": 8,
        "total_tokens": 98,
        "prompt_tokens_details": {"cached_tokens": 60, "cached_from": "device"},
    }
    assert make_usage([None], 90).prompt_tokens_details.cached_tokens == 0


def test_a_response_says_where_cached_tokens_came_from() -> None:
    body = ResponsesBody.parse({"input": "x"})
    response = plain(ResponseRenderer(ReplyBuilder(outputs=[LAST]), "resp_1", echo(body, "m")).whole())
    details = response["usage"]["input_tokens_details"]
    assert (details["cached_tokens"], details["cached_from"]) == (80, "ram")


def test_a_message_counts_cached_tokens_apart() -> None:
    usage = plain(MessageRenderer(ReplyBuilder(outputs=[LAST]), "msg_1", "m", 90).whole())["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (10, 80)


def test_the_timings_of_a_completion_say_where_cached_tokens_came_from() -> None:
    async def complete() -> dict[str, Any]:
        body = LlamaCompletionBody.parse({"prompt": "x"})
        request = Request(id="r", prompt=Prompt(()), max_tokens=4)
        call = Completions(body, request, "m", 100, [((), "x")])
        return plain(call.whole(0, LimitedStream("r"), [LAST]))

    timings = asyncio.run(complete())["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["cached_from"]) == (80, 10, "ram")

"""`/v1/chat/completions`: answers and chunks in OpenAI's words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from cllm.server.chat import ChatJob, Reply, new_call_id
from cllm.server.errors import failure_body
from cllm.server.openai import render
from cllm.server.sse import encode
from cllm.text.reply import AnswerText, CallArguments, CallBegun, ReasoningText, ReplyEvent
from cllm.types import Delta, FinishReason, TokenLogprob

ROUTE = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()
_CONTENT = b',"delta":{"content":'
_CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def finish_reason(reason: FinishReason | None, *, called: bool) -> str | None:
    """`tool_calls` where a call is how it ended."""
    if reason is None:
        return None
    return "tool_calls" if called and reason is FinishReason.STOP else reason.value


class ChatAnswer:
    """One call of the route, as a whole answer or as chunks. `top` is None where no logprobs are wanted."""

    def __init__(self, head: dict[str, Any], top: int | None, *, include_usage: bool = False) -> None:
        self._head = head
        self._top = top
        self._include_usage = include_usage
        # All chunks begin alike: that part is encoded once.
        self._prefix = b"data: " + _json.encode(self._chunk([]))[:-2]
        self._opening = self._prefix + b'{"index":'

    def _chunk(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", **more, "choices": choices}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._top is None else render.chat_logprobs(entries, self._top)

    def whole(self, replies: Sequence[Reply], prompt_tokens: int) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        choices = [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": self._logprobs(reply.logprobs),
                "finish_reason": finish_reason(reply.finish_reason, called=bool(reply.calls)),
            }
            for index, reply in enumerate(replies)
        ]
        used = render.usage([reply.usage for reply in replies], prompt_tokens)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": used}

    async def chunks(self, job: ChatJob) -> AsyncIterator[bytes]:
        """Chunks as they come, the usage if it was asked for, `[DONE]`; or an error, and the end."""
        count = len(job.streams)
        for index in range(count):
            yield self._encoded(index, {"role": "assistant", "content": ""})
        called = [False] * count
        ended = []
        async for index, events, delta in job.events():
            if delta.error is not None:
                yield encode(failure_body(ROUTE, delta.error))
                return
            if delta.finish_reason is None and not delta.logprobs and len(events) == 1:
                event = events[0]
                if type(event) is AnswerText:  # nearly all of them: put together as bytes
                    yield b"%b%d%b%b%b" % (self._opening, index, _CONTENT, _json.encode(event.text), _CLOSING)
                    continue
            called[index] = called[index] or any(isinstance(event, CallBegun) for event in events)
            if pieces := self._pieces(index, events, delta, called=called[index]):
                yield pieces
            if delta.finish_reason is not None:
                ended.append(delta.usage)
        if self._include_usage:
            yield encode(self._chunk([], usage=render.usage(ended, job.prompt_tokens)))
        yield DONE

    def _pieces(self, index: int, events: Sequence[ReplyEvent], delta: Delta, *, called: bool) -> bytes:
        """A step's chunks. Its log-probabilities go with the last of them that says something."""
        deltas = [_delta(event) for event in events]
        spoken = max(0, len(deltas) - 1)
        if delta.finish_reason is not None or (delta.logprobs and not deltas):
            deltas.append({})
        finish = finish_reason(delta.finish_reason, called=called)
        last = len(deltas) - 1
        return b"".join(
            self._encoded(
                index,
                each,
                delta.logprobs if place == spoken else (),
                finish if place == last else None,
            )
            for place, each in enumerate(deltas)
        )

    def _encoded(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        finish: str | None = None,
    ) -> bytes:
        told = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}
        return self._prefix + _json.encode(choice) + b"]}\n\n"


def _delta(event: ReplyEvent) -> dict[str, Any]:
    match event:
        case AnswerText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case CallBegun(index, name):
            function = {"name": name, "arguments": ""}
            return {
                "tool_calls": [
                    {"index": index, "id": new_call_id(), "type": "function", "function": function}
                ]
            }
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text if reply.text or not reply.calls else None,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.calls
        ]
    return message

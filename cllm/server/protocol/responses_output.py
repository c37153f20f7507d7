"""`/v1/responses`: answers and events in OpenAI's words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cllm.server.blocks import Begun, Block, BlockAnswer, BlockEvent, BlockKind, Ended, Event, Grew
from cllm.server.protocol.completions import chat_logprobs
from cllm.server.protocol.responses import ResponsesBody
from cllm.text.output_parser import OutputEvent
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob, Usage

_PREFIXES = {BlockKind.THOUGHTS: "rs", BlockKind.WORDS: "msg", BlockKind.CALL: "fc"}


def echo(body: ResponsesBody, model: str) -> dict[str, Any]:
    """What of a body the response repeats."""
    given = body.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p", "user"})
    wanted = body.tool_choice
    return {
        **given,
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": wanted if isinstance(wanted, str) else wanted.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "text": {"format": _format(body)},
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "metadata": body.metadata or {},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
    }


def _format(body: ResponsesBody) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)


class ResponseAnswer(BlockAnswer):
    """One response; its events are numbered. `top` is None where no log-probabilities are wanted."""

    def __init__(self, response_id: str, echoed: dict[str, Any], top: int | None = None) -> None:
        super().__init__()
        self._id = response_id
        self._echoed = echoed
        self._top = top
        self._created = int(time.time())
        self._failure: Failure | None = None
        self._sent = 0

    def start(self) -> list[Event]:
        return [
            self._numbered("response.created", response=self.body()),
            self._numbered("response.in_progress", response=self.body()),
        ]

    def add(self, events: Sequence[OutputEvent], delta: RequestOutput) -> list[Event]:
        told = [told for event in self._blocks.add(events, delta) for told in self._told(event)]
        if delta.error is not None:
            self._failure = delta.error
            failure = {"code": delta.error.code, "message": delta.error.message, "param": None}
            told.append(self._numbered("error", **failure))
        if delta.finish_reason is not None:
            told.append(self._numbered(f"response.{self._status}", response=self.body()))
        return told

    @property
    def _status(self) -> str:
        reason = self._blocks.finish_reason
        if reason is None:
            return "in_progress"
        if reason is FinishReason.STOP:
            return "completed"
        return "incomplete" if reason is FinishReason.LENGTH else "failed"

    def body(self) -> dict[str, Any]:
        status = self._status
        failure = self._failure
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if failure is None else {"code": "server_error", "message": failure.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self._echoed,
            "output": [self._item(block) for block in self._blocks.blocks],
            "usage": self._usage(self._blocks.usage),
        }

    def _usage(self, usage: Usage | None) -> dict[str, Any] | None:
        if usage is None:
            return None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._blocks.thought_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # Blocks as output items ---------------------------------------------------------------------------

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """A block that has ended, or one with another status."""
        status = status or ("incomplete" if block.cut else "completed")
        item: dict[str, Any] = {"id": _item_id(block), "status": status}
        begun = status == "in_progress"
        match block.kind:
            case BlockKind.THOUGHTS:
                content = [] if begun else [self._part(block)]
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case BlockKind.WORDS:
                content = [] if begun else [self._part(block)]
                return {**item, "type": "message", "role": "assistant", "content": content}
            case BlockKind.CALL:
                call = {"call_id": f"call_{block.id}", "name": block.name}
                return {**item, "type": "function_call", **call, "arguments": "" if begun else block.text}

    def _part(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        text = "" if begun else block.text
        if block.kind is BlockKind.THOUGHTS:
            return {"type": "reasoning_text", "text": text}
        part = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": [] if begun else self._logprobs(block.logprobs)}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        if self._top is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(entries, self._top)["content"]
        return content

    # Events -------------------------------------------------------------------------------------------

    def _numbered(self, kind: str, /, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event

    def _told(self, event: BlockEvent) -> list[Event]:
        """A block's event in OpenAI's words: items hold parts, parts hold text."""
        block = event.block
        item = {"output_index": block.index}
        within = {**item, "item_id": _item_id(block)}
        part = {**within, "content_index": 0}
        if isinstance(event, Begun):
            shown = self._item(block, "in_progress")
            told = [self._numbered("response.output_item.added", **item, item=shown)]
            if block.kind is not BlockKind.CALL:
                empty = self._part(block, begun=True)
                told.append(self._numbered("response.content_part.added", **part, part=empty))
            return told
        if isinstance(event, Grew):
            return [self._grew(event, within, part)]
        return [
            *self._ended(event, within, part),
            self._numbered("response.output_item.done", **item, item=self._item(block)),
        ]

    def _grew(self, event: Grew, within: dict[str, Any], part: dict[str, Any]) -> Event:
        match event.block.kind:
            case BlockKind.THOUGHTS:
                return self._numbered("response.reasoning_text.delta", **part, delta=event.text)
            case BlockKind.WORDS:
                logprobs = self._logprobs(event.logprobs)
                return self._numbered(
                    "response.output_text.delta", **part, delta=event.text, logprobs=logprobs
                )
            case BlockKind.CALL:
                return self._numbered("response.function_call_arguments.delta", **within, delta=event.text)

    def _ended(self, event: Ended, within: dict[str, Any], part: dict[str, Any]) -> list[Event]:
        block = event.block
        if block.kind is BlockKind.CALL:
            call = {"name": block.name, "arguments": block.text}
            return [self._numbered("response.function_call_arguments.done", **within, **call)]
        if block.kind is BlockKind.THOUGHTS:
            done = self._numbered("response.reasoning_text.done", **part, text=block.text)
        else:
            logprobs = self._logprobs(block.logprobs)
            done = self._numbered("response.output_text.done", **part, text=block.text, logprobs=logprobs)
        return [done, self._numbered("response.content_part.done", **part, part=self._part(block))]


def _item_id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.id}"

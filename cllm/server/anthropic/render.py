"""`/v1/messages`: answers and events in Anthropic's words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cllm.server.block_answer import BlockAnswer, Event
from cllm.server.blocks import Begun, Block, BlockEvent, BlockKind, Grew
from cllm.server.errors import failure_body
from cllm.text.reply import ReplyEvent
from cllm.types import Delta, FinishReason

ROUTE = "/v1/messages"


class MessageAnswer(BlockAnswer):
    """One message."""

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        super().__init__()
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens

    def start(self) -> list[Event]:
        return [{"type": "message_start", "message": self.body()}, {"type": "ping"}]

    def add(self, events: Sequence[ReplyEvent], delta: Delta) -> list[Event]:
        told = [_told(event) for event in self._blocks.add(events, delta)]
        if delta.error is not None:
            return [*told, failure_body(ROUTE, delta.error)]
        if delta.finish_reason is not None:
            told.append({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
            told.append({"type": "message_stop"})
        return told

    def body(self) -> dict[str, Any]:
        content = [_content(block) for block in self._blocks.blocks]
        return {**self._head, "content": content, **self._end(), "usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        return {"stop_reason": self._stop_reason, "stop_sequence": self._blocks.stop}

    @property
    def _stop_reason(self) -> str | None:
        reason = self._blocks.finish_reason
        if reason is None:
            return None
        if reason is not FinishReason.STOP:
            return "max_tokens"
        if self._blocks.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.called else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Input tokens are those that had to be read: what came from the cache is counted beside them."""
        usage = self._blocks.usage
        cached = usage.cached_tokens if usage is not None else 0
        return {
            "input_tokens": self._prompt_tokens - cached,
            "output_tokens": usage.completion_tokens if usage is not None else 0,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.THOUGHTS:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.WORDS:
            return {"type": "text", "text": block.text}
        case BlockKind.CALL:
            call = {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name}
            return {**call, "input": _object(block.text)}


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; none where they are not one, as when the answer was cut off within them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _told(event: BlockEvent) -> Event:
    """A block's event in Anthropic's words."""
    block = event.block
    if isinstance(event, Begun):
        empty = _content(Block(block.index, block.kind, block.id, block.name))
        return {"type": "content_block_start", "index": block.index, "content_block": empty}
    if isinstance(event, Grew):
        return {"type": "content_block_delta", "index": block.index, "delta": _delta(event)}
    return {"type": "content_block_stop", "index": block.index}


def _delta(event: Grew) -> dict[str, Any]:
    match event.block.kind:
        case BlockKind.THOUGHTS:
            return {"type": "thinking_delta", "thinking": event.text}
        case BlockKind.WORDS:
            return {"type": "text_delta", "text": event.text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": event.text}

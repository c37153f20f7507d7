"""From what a user wrote to the tokens a model reads: plain text, or messages through a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from cllm.errors import InvalidRequest
from cllm.text.template import ChatTemplate, Guard
from cllm.types import Vocabulary


class PromptBuilder:
    """Makes prompts for one model. Control tokens come from its template, never from a user's text."""

    def __init__(self, vocabulary: Vocabulary, template: str | None, guard: Guard = nullcontext) -> None:
        self._vocabulary = vocabulary
        self._template = ChatTemplate(template, guard) if template else None

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Any spelling of a control token, the longest first; matches nothing where there are none."""
        spellings = sorted(self._vocabulary.special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def from_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, with the opening of the assistant's turn at the end.

        Spellings of control tokens inside the messages are swapped for markers before the template sees
        them and put back as plain text after: so no message can close its own turn.
        """
        nonce = secrets.token_hex(8)
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"\ue000{nonce}:{len(hidden) - 1}\ue001"

        safe = [_mapped(message, lambda text: self._controls.sub(hide, text)) for message in messages]
        rendered = self.render(safe)
        tokens: list[int] = []
        for index, part in enumerate(re.split(f"\ue000{nonce}:(\\d+)\ue001", rendered)):
            if index % 2:
                tokens += self._vocabulary.tokenize(hidden[int(part)], add_special=False, parse_special=False)
            elif part:
                tokens += self._vocabulary.tokenize(part, add_special=index == 0, parse_special=True)
        return tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template makes of a conversation. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: send a plain prompt instead", field="messages"
            )
        return self._template.render(messages=messages, add_generation_prompt=True)


def _mapped(value: Any, change: Any) -> Any:
    """`value` with `change` applied to every string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value

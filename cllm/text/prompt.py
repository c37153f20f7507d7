"""From what a user wrote to the tokens a model reads: plain text, or messages through a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from cllm.errors import InvalidRequest
from cllm.text.reply import THINK, THOUGHT
from cllm.text.template import ChatTemplate
from cllm.types import Vocabulary


class ChatPrompt(NamedTuple):
    """The tokens of a conversation, and whether they end inside the model's thoughts."""

    tokens: list[int]
    thinking: bool = False


class PromptBuilder:
    """Makes prompts for one model. Control tokens come from its template, never from a user's text."""

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate | None, tool_template: ChatTemplate | None = None
    ) -> None:
        """`tool_template` is the one for conversations with tools, where the model has two."""
        self._vocabulary = vocabulary
        self._template = template
        self._tool_template = tool_template or template

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Any spelling of a control token, the longest first; matches nothing where there are none."""
        spellings = sorted(self._vocabulary.special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def from_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        opening: str = "",
        prefill: str = "",
        think: bool = True,
    ) -> ChatPrompt:
        """Tokens of a conversation, with the opening of the assistant's turn at the end.

        `tools` and `options` go to the template. `opening` is ours and may be a control token; `prefill` is
        the user's beginning of the answer. With `think` off, thoughts that the template opens are closed.

        Spellings of control tokens in what users sent are swapped for markers before the template sees
        them and put back as plain text after: so no message can close its own turn.
        """
        nonce = secrets.token_hex(8)
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"\ue000{nonce}:{len(hidden) - 1}\ue001"

        def safe(value: Any) -> Any:
            return _mapped(value, lambda text: self._controls.sub(hide, text))

        rendered = self.render(safe(list(messages)), tools=safe(list(tools)), options=safe(options or {}))
        thinking = rendered.rstrip().endswith(THINK)
        if thinking and not think:
            rendered = f"{rendered.rstrip()}\n\n{THOUGHT}\n\n"
        rendered += opening + safe(prefill)
        tokens: list[int] = []
        for index, part in enumerate(re.split(f"\ue000{nonce}:(\\d+)\ue001", rendered)):
            if index % 2:
                tokens += self._vocabulary.tokenize(hidden[int(part)], add_special=False, parse_special=False)
            elif part:
                tokens += self._vocabulary.tokenize(part, add_special=index == 0, parse_special=True)
        return ChatPrompt(tokens, thinking and think)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """What the template makes of a conversation. Raises InvalidRequest."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: send a plain prompt instead", field="messages"
            )
        own = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": True,
            "bos_token": self._vocabulary.begin_text,
            "eos_token": self._vocabulary.end_text,
        }
        variables = {**(options or {}), **own}
        try:
            return template.render(**variables)
        except InvalidRequest as error:
            refused = "refuses these messages" in error.message  # not: was stopped, cannot be used
            if refused and len(messages) > 1 and messages[0].get("role") == "system":
                template.render(**{**variables, "messages": messages[1:]})  # or the fault lies elsewhere
                hint = "it takes no system message: put that text into the first user message"
                raise InvalidRequest(f"{error.message} ({hint})", field="messages") from None
            raise


def _mapped(value: Any, change: Any) -> Any:
    """`value` with `change` applied to every string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value

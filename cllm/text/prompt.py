"""From what a user wrote to the tokens a model reads: plain text, or messages through a chat template."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cllm.errors import InvalidRequest
from cllm.types import Vocabulary

THINK, THOUGHT = "<think>", "</think>"


class ChatPrompt(NamedTuple):
    """The tokens of a conversation, and whether they end inside the model's thoughts."""

    tokens: list[int]
    thinking: bool = False


class PromptBuilder:
    """Makes prompts for one model. Control tokens come from its template, never from a user's text."""

    MOST_RENDERED = 8 << 20  # characters

    def __init__(self, vocabulary: Vocabulary, template: str | None) -> None:
        self._vocabulary = vocabulary
        self._template = _compile(template) if template else None

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
        if self._template is None:
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
        try:
            rendered = self._template.render({**(options or {}), **own})
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error.message}", field="messages"
            ) from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages ({type(error).__name__})",
                field="messages",
            ) from error
        if len(rendered) > self.MOST_RENDERED:
            raise InvalidRequest(
                f"the rendered conversation has {len(rendered)} characters, "
                f"over the limit of {self.MOST_RENDERED}",
                field="messages",
            )
        return rendered


def _compile(source: str) -> jinja2.Template:
    """A template in a sandbox, with the helpers that published templates expect."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: time.strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _mapped(value: Any, change: Any) -> Any:
    """`value` with `change` applied to every string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value

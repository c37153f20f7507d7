"""From what a user wrote to the tokens a model reads: plain text, or messages through a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from cllm.errors import InvalidRequest
from cllm.text.chat_template import ChatTemplate
from cllm.text.output_parser import THINK_END, THINK_START
from cllm.types import InfillTokens, Vocabulary


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
        thinking = rendered.rstrip().endswith(THINK_START)
        if thinking and not think:
            rendered = f"{rendered.rstrip()}\n\n{THINK_END}\n\n"
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


PROJECT = "myproject\n"  # what llama-server tells a model that wants names; nobody sends real ones
FILE = "filename\n"
BETWEEN_FILES = "\n\n--- snippet ---\n\n"  # for models without a mark for files


class Snippet(msgspec.Struct, frozen=True):
    """Another piece of the project, for the model to know."""

    text: str
    filename: str = "tmp"


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before and after the gap. `prompt` is the beginning of what goes into it.

    `snippets` is None where just a text has a gap, and a list (maybe empty) where a file of a project has.
    """

    prefix: str | tuple[int, ...]
    suffix: str
    prompt: str = ""
    snippets: tuple[Snippet, ...] | None = None


def infill_prompt(vocabulary: Vocabulary, gap: Gap, room: int = 0) -> list[int]:
    """The tokens that ask for what belongs into the gap. Raises InvalidRequest.

    With `room`, what does not fit is cut away from its far ends: the prefix keeps its end, the suffix its
    beginning (three parts to one, if both are too long), snippets get what is left.
    Only `prompt` may hold control tokens.
    """
    marks = vocabulary.infill
    if marks is None:
        raise InvalidRequest(
            "this model has no fill-in-the-middle tokens: send a plain prompt, without a suffix",
            field="suffix" if gap.snippets is None else "input_suffix",
        )

    def plain(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    prompt = vocabulary.tokenize(gap.prompt, add_special=False, parse_special=True)
    prefix = plain(gap.prefix) if isinstance(gap.prefix, str) else list(gap.prefix)
    suffix = plain(gap.suffix)
    around = _project(vocabulary, marks, gap.snippets) if gap.snippets is not None else []
    if room:
        left = max(0, room - len(prompt) - 3 - (marks.begin is not None))
        kept = max(min(len(suffix), left // 4), left - len(prefix))  # the suffix's part: what it may have
        suffix = suffix[: max(0, kept)]
        prefix = _last(prefix, left - len(suffix))
        around = _last(around, left - len(suffix) - len(prefix))
    begin = [] if marks.begin is None else [marks.begin]
    return [*begin, *around, marks.prefix, *prefix, *prompt, marks.suffix, *suffix, marks.middle]


def _project(vocabulary: Vocabulary, marks: InfillTokens, snippets: Sequence[Snippet]) -> list[int]:
    """The other files, then the name of this one, as models with such marks were taught."""

    def plain(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    tokens: list[int] = []
    if marks.repository is not None:
        tokens += [marks.repository, *plain(PROJECT)]
    for snippet in snippets:
        if marks.separator is not None:
            tokens += [marks.separator, *plain(f"{snippet.filename}\n")]
        else:
            tokens += plain(BETWEEN_FILES)
        tokens += plain(snippet.text)
    if marks.separator is not None:
        tokens += [marks.separator, *plain(FILE)]
    return tokens


def _last(tokens: list[int], count: int) -> list[int]:
    return tokens[len(tokens) - count :] if 0 < count < len(tokens) else tokens[: max(0, count)]

"""Prompts: tokens of a conversation (through the chat template) and of a fill-in-the-middle request."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from cllm.errors import ContextLengthExceeded, InvalidRequest
from cllm.text.chat_format import GENERIC, ChatFormat
from cllm.text.chat_template import ChatTemplate
from cllm.text.format_analysis import derive_format
from cllm.types import HasBound, InfillTokens, Vocabulary

DERIVE_LIMIT_S = 2.0  # CPU time


class ChatPrompt(NamedTuple):
    """The tokens of a conversation; `thinking`: they end inside the reasoning."""

    tokens: list[int]
    thinking: bool = False


class PromptBuilder:
    """Builds the prompts of one model. Control tokens come from its template, never from user text."""

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate | None, tool_template: ChatTemplate | None = None
    ) -> None:
        """`tool_template` is the template for conversations with tools, where the model has two."""
        self._vocabulary = vocabulary
        self._template = template
        self._tool_template = tool_template or template
        self._formats: dict[ChatTemplate, ChatFormat] = {}

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Matches the text of any control token, the longest first."""
        spellings = sorted(self._vocabulary.special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def describe(self, *, tools: bool) -> ChatFormat:
        """How the model writes an answer, by the template of conversations with or without tools."""
        template = self._tool_template if tools else self._template
        if template is None:
            return GENERIC
        if template not in self._formats:
            self._formats[template] = self._derive(template)
        return self._formats[template]

    def _derive(self, template: ChatTemplate) -> ChatFormat:
        vocabulary = self._vocabulary
        texts = {"bos_token": vocabulary.begin_text, "eos_token": vocabulary.end_text}
        started = time.thread_time()

        def render(**variables: Any) -> str:
            if time.thread_time() - started > DERIVE_LIMIT_S:
                raise InvalidRequest("the chat template is too slow to derive a format from it")
            return template.render(**texts, **variables)

        tokens: dict[str, int] = {}
        for text in vocabulary.special_texts:
            found = vocabulary.tokenize(text, add_special=False, parse_special=True)
            if len(found) == 1:
                tokens[text] = found[0]
        ends = [text for text, token in tokens.items() if vocabulary.is_end(token)]
        controls = {text: token for text, token in tokens.items() if vocabulary.is_control(token)}
        return derive_format(render, controls, ends)

    def from_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        opening: str = "",
        prefill: str = "",
        think: bool = True,
        max_tokens: int = 0,
    ) -> ChatPrompt:
        """Tokens of a conversation; they end where the assistant's message starts.

        Raises ContextLengthExceeded before a text is tokenised that cannot have `max_tokens` tokens or fewer.
        `tools` and `options` go to the template. `opening` comes from the server and may be a control token;
        `prefill` is the client's start of the answer. With `think` off, reasoning that the template opens is
        closed.

        The text of control tokens in client input is replaced by placeholders before the template renders,
        and restored as plain text afterwards. So no message can end its own turn.
        """
        nonce = secrets.token_hex(8)
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"\ue000{nonce}:{len(hidden) - 1}\ue001"

        def safe(value: Any) -> Any:
            return _map_strings(value, lambda text: self._controls.sub(hide, text))

        rendered = self.render(safe(list(messages)), tools=safe(list(tools)), options=safe(options or {}))
        known = self.describe(tools=bool(tools))
        thinking = any(rendered.rstrip().endswith(mark.strip()) for mark in known.reasoning_openings)
        if thinking and not think:
            closing = known.reasoning_closings[0] if known.exact else f"\n\n{known.reasoning_closings[0]}\n\n"
            rendered = rendered.rstrip() + closing
        rendered += opening + safe(prefill)
        parts = re.split(f"\ue000{nonce}:(\\d+)\ue001", rendered)
        parts[1::2] = [hidden[int(number)] for number in parts[1::2]]
        check_length(self._vocabulary, parts, max_tokens)
        tokens: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                tokens += self._vocabulary.tokenize(part, add_special=False, parse_special=False)
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
        """The conversation as the template renders it. Raises InvalidRequest."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequest("this model has no chat template: send a plain prompt", field="messages")
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
            refused = "refuses these messages" in error.message  # not: exceeded a limit, or does not compile
            if refused and len(messages) > 1 and messages[0].get("role") == "system":
                template.render(**{**variables, "messages": messages[1:]})  # raises if the reason is another
                hint = "it takes no system message: put that text into the first user message"
                raise InvalidRequest(f"{error.message} ({hint})", field="messages") from None
            raise


def check_length(vocabulary: HasBound, texts: Iterable[str], max_tokens: int) -> None:
    """Refuse texts of too many bytes before they are tokenised. Raises ContextLengthExceeded."""
    texts = tuple(texts)
    if not max_tokens or sum(map(len, texts)) <= max_tokens:
        return  # a bound costs a copy of the text, and the first one a look at each token
    if (count := vocabulary.bound.min_tokens(*texts)) > max_tokens:
        raise ContextLengthExceeded(count, max_tokens, at_least=True)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to each string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


PROJECT = "myproject\n"  # as llama-server has it: clients send no names
FILE = "filename\n"
BETWEEN_FILES = "\n\n--- snippet ---\n\n"  # for models without a file separator token


class Snippet(msgspec.Struct, frozen=True):
    """Text of another file of the project, as context."""

    text: str
    filename: str = "tmp"


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """The text before and after the gap; `prompt` starts the text that fills it.

    `snippets` is None for a gap in plain text, and a list (maybe empty) for a gap in a file of a project.
    """

    prefix: str | tuple[int, ...]
    suffix: str
    prompt: str = ""
    snippets: tuple[Snippet, ...] | None = None


def infill_prompt(vocabulary: Vocabulary, gap: Gap, max_tokens: int = 0) -> list[int]:
    """Tokens of a fill-in-the-middle prompt. Raises InvalidRequest.

    With `max_tokens`, the parts are cut to fit: the prefix keeps its end, the suffix its start (three to one,
    if both are too long), the snippets get the rest. Text that is cut away in any case is not tokenised.
    Only `prompt` may contain control tokens.
    """
    marks = vocabulary.infill
    if marks is None:
        field = "suffix" if gap.snippets is None else "input_suffix"
        raise InvalidRequest(
            "this model has no fill-in-the-middle tokens: send a prompt without suffix", field
        )

    def plain(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    if max_tokens:
        gap = _cut(gap, max_tokens * vocabulary.bound.longest)
    prompt = vocabulary.tokenize(gap.prompt, add_special=False, parse_special=True)
    prefix = plain(gap.prefix) if isinstance(gap.prefix, str) else list(gap.prefix)
    suffix = plain(gap.suffix)
    around = [] if gap.snippets is None else _project(plain, marks, gap.snippets)
    if max_tokens:
        left = max(0, max_tokens - len(prompt) - 3 - (marks.begin is not None))
        kept = max(min(len(suffix), left // 4), left - len(prefix))  # tokens of the suffix
        suffix = suffix[: max(0, kept)]
        prefix = _last(prefix, left - len(suffix))
        around = _last(around, left - len(suffix) - len(prefix))
    begin = [] if marks.begin is None else [marks.begin]
    return [*begin, *around, marks.prefix, *prefix, *prompt, marks.suffix, *suffix, marks.middle]


def _cut(gap: Gap, characters: int) -> Gap:
    """The gap with no more text in each of its parts than so many characters; 0: all of it.

    A token has at most as many characters as the longest one, so that more than these are cut away later.
    """
    if not characters:
        return gap
    prefix = gap.prefix[-characters:] if isinstance(gap.prefix, str) else gap.prefix
    snippets, left = gap.snippets, characters
    for index in reversed(range(len(snippets or ()))):  # the last ones are kept
        assert snippets is not None
        if (length := len(snippets[index].text)) >= left:
            first = msgspec.structs.replace(snippets[index], text=snippets[index].text[length - left :])
            snippets = (first, *snippets[index + 1 :])
            break
        left -= length
    return msgspec.structs.replace(gap, prefix=prefix, suffix=gap.suffix[:characters], snippets=snippets)


def _project(
    plain: Callable[[str], list[int]], marks: InfillTokens, snippets: Sequence[Snippet]
) -> list[int]:
    """The other files, then the name of this one, as models with such tokens were trained."""
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

"""Prompts: tokens of a conversation (through the chat template) and of a fill-in-the-middle request."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any

import msgspec

from cllm.errors import ContextLengthExceeded, InvalidRequest
from cllm.text.call_grammar import make_call_grammar
from cllm.text.chat_format import GENERIC, ChatFormat, Tool
from cllm.text.chat_template import BUILTIN_TEMPLATES, ChatTemplate, TemplateRefused, tojson
from cllm.text.format_analysis import derive_format
from cllm.text.message_rewrites import Message, TemplateRewrites, describe_tools, prepare, write_calls_as_text
from cllm.types import (
    ConstraintKind,
    ConstraintSpec,
    HasBound,
    InfillTokens,
    Prompt,
    ReasoningLimit,
    ReasoningMarks,
    Span,
    Vocabulary,
)

log = logging.getLogger(__name__)
DERIVE_LIMIT_S = 2.0  # CPU time
NO_SHAPE = "merging its system texts, equal roles and tool calls into other messages did not help"
# What templates call the switch of the reasoning, with the value that is off.
OFF = {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled", "thinking_budget": 0}
EFFORTS = ("reasoning_effort", "reasoning_strength", "thinking_effort")


class Chat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A conversation for the chat template, and how the prompt goes on after it."""

    messages: tuple[dict[str, Any], ...]  # as the client sent them
    tools: tuple[Tool, ...] = ()  # those that may be called
    forced: bool = False  # at least one must be called
    parallel: bool = True  # one reply may have several calls
    options: dict[str, Any] = {}  # variables of the template
    prefill: str = ""  # the client's start of the answer
    think: bool = True  # False: reasoning that the template opens is closed
    thoughts: str = ""  # the client's start of the reasoning
    reasoning_budget: int | None = None  # tokens of reasoning; None: no limit
    media: dict[str, Prompt] = {}  # items of pictures, by the markers that stand for them in the messages


class RawText(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A raw prompt: texts and token ids, one after the other."""

    pieces: tuple[str | int, ...]
    add_special: bool = True  # at the beginning of a text that is the first piece
    parse_special: bool = False  # True only where the client is trusted to write control tokens
    media: dict[str, Prompt] = {}  # as a `Chat` has them


class PreparedPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt, and what the template makes of the rest of the request."""

    prompt: Prompt
    thinking: bool = False  # the prompt ends inside the reasoning
    constraint: ConstraintSpec | None = None
    reasoning: ReasoningLimit | None = None
    chat_format: ChatFormat | None = None  # None: it is no conversation


class PromptParts:
    """Items of a prompt as they are put together: tokens of its texts, and items of its media."""

    def __init__(self, media: Mapping[str, Prompt]) -> None:
        self.items: list[int] = []
        self._media = media
        self._left = set(media)  # markers that have not come yet
        self._spans: list[Span] = []
        self._markers = re.compile(f"({'|'.join(map(re.escape, media))})") if media else None

    def split(self, text: str) -> Iterator[str]:
        """Yield the texts around the markers; the items of a marker are added when the next is asked for."""
        if self._markers is None:
            yield text
            return
        for part in self._markers.split(text):
            if (found := self._media.get(part)) is None:
                yield part
                continue
            at = len(self.items)
            replace = msgspec.structs.replace
            self._spans += [replace(each, begin=at + each.begin, end=at + each.end) for each in found.spans]
            self.items += found.items
            self._left.discard(part)

    def build(self) -> Prompt:
        """The prompt. Raises InvalidRequest where the template has dropped a marker."""
        if self._left:
            raise InvalidRequest(
                "the model's chat template leaves out a picture where it was sent", "messages"
            )
        return Prompt(tuple(self.items), tuple(self._spans))


class PromptBuilder:
    """Builds the prompts of one model. Control tokens come from its template, never from user text."""

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate | None, tool_template: ChatTemplate | None = None
    ) -> None:
        """`tool_template` is for conversations with tools, where the model has two; the default is ChatML."""
        self._vocabulary = vocabulary
        self._template = template or ChatTemplate(BUILTIN_TEMPLATES["chatml"])
        self._tool_template = tool_template or self._template
        self._find_rewrites = cache(self._derive_rewrites)
        self._find_format = cache(self._derive_format)

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Matches the text of any control token, the longest first."""
        spellings = sorted(self._vocabulary.special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def describe(self, *, tools: bool) -> ChatFormat:
        """How the model writes an answer, by the template of conversations with or without tools.

        It is derived once. A template that says nothing, or says it too slowly, has the generic format.
        """
        return self._find_format(self._tool_template if tools else self._template)

    def _derive_format(self, template: ChatTemplate) -> ChatFormat:
        started = time.thread_time()
        texts = {"bos_token": self._vocabulary.begin_text, "eos_token": self._vocabulary.end_text}

        def render(**variables: Any) -> str:
            if time.thread_time() - started > DERIVE_LIMIT_S:
                raise InvalidRequest("the chat template is too slow to derive a format from it")
            return template.render(**texts, **variables)

        def tokenize(text: str) -> tuple[int, ...]:
            return tuple(self._vocabulary.tokenize(text, add_special=False, parse_special=True))

        found = {text: tokenize(text) for text in self._vocabulary.special_texts}
        tokens = {text: ids[0] for text, ids in found.items() if len(ids) == 1}
        ends = [text for text, token in tokens.items() if token in self._vocabulary.ends]
        controls = {text: token for text, token in tokens.items() if self._vocabulary.is_control(token)}
        try:
            derived = derive_format(render, controls, ends)
        except InvalidRequest as error:
            log.warning("no tool-call format could be derived from the chat template: %s", error.code)
            return GENERIC
        return msgspec.structs.replace(
            derived,
            opening_ids=tokenize(derived.reasoning_openings[0].strip()),
            closing_ids=tokenize(derived.reasoning_closings[0].strip()),
        )

    def prepare(
        self,
        chat: Chat,
        form: ConstraintSpec | None,
        max_tokens: int,
        check: Callable[[ConstraintSpec], None],
    ) -> PreparedPrompt:
        """The prompt of a conversation, with the constraint and the limit of reasoning where they belong.

        `form`, which is compiled already, is for the text of the answer: a forced call drops it. `check`
        compiles the grammar of calls. Raises InvalidRequest, ContextLengthExceeded.
        """
        known = self.describe(tools=bool(chat.tools))
        constraint = self._constrain(chat, form, known, check)
        constrained = constraint is not None and not constraint.triggers
        prompt, thinking = self.tokenize(chat, max_tokens, opened=constrained)
        if constraint is not None:
            constraint = _place(constraint, known, thinking=thinking, forced=chat.forced)
        limit = None
        free = constraint is None or constraint.triggers
        if chat.reasoning_budget is not None and free and known.closing_ids:
            ids = {"opening": known.opening_ids, "closing": known.closing_ids}
            limit = ReasoningLimit(budget=chat.reasoning_budget, inside=thinking, **ids)
        return PreparedPrompt(prompt, thinking, constraint, limit, known)

    def _constrain(
        self,
        chat: Chat,
        form: ConstraintSpec | None,
        known: ChatFormat,
        check: Callable[[ConstraintSpec], None],
    ) -> ConstraintSpec | None:
        """The constraint on the whole answer: its form, the grammar of calls, or either of them."""
        if chat.forced:
            form = None
        # Beside a schema calls stay possible; any other form is the whole answer's.
        if not chat.tools or (form is not None and form.kind is not ConstraintKind.JSON_SCHEMA):
            return form
        free = form is None and not chat.forced
        calls = make_call_grammar(known, chat.tools, parallel=chat.parallel, forced=not free)
        if calls is None:
            return form
        constraint = calls if form is None else _make_either(calls, form)
        try:
            check(constraint)
        except InvalidRequest:
            if not constraint.triggers:
                raise
            log.debug("the schemas of the tools make no grammar: calls are not constrained")
            return None
        return constraint

    def tokenize(self, chat: Chat, max_tokens: int = 0, *, opened: bool = False) -> tuple[Prompt, bool]:
        """Items of a conversation up to the assistant's message, and whether they end inside the reasoning.

        `opened`: the prompt opens the reasoning of a model that would open it itself. Raises
        ContextLengthExceeded before a text is tokenised that cannot have `max_tokens` tokens or fewer.

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

        rendered, thinking = self._compose(chat, safe, opened=opened)
        parts = re.split(f"\ue000{nonce}:(\\d+)\ue001", rendered)
        parts[1::2] = [hidden[int(number)] for number in parts[1::2]]
        check_length(self._vocabulary, parts, max_tokens)
        found = PromptParts(chat.media)
        for index, part in enumerate(parts):
            for text in found.split(part):
                if index % 2:
                    found.items += self._vocabulary.tokenize(text, add_special=False, parse_special=False)
                elif text:
                    first = index == 0 and not found.items
                    found.items += self._vocabulary.tokenize(text, add_special=first, parse_special=True)
        return found.build(), thinking

    def render(self, chat: Chat) -> str:
        """The prompt of a conversation as text. Raises InvalidRequest."""
        return self._compose(chat, lambda value: _map_strings(value, str))[0]

    def _compose(self, chat: Chat, safe: Callable[[Any], Any], *, opened: bool = False) -> tuple[str, bool]:
        """The prompt, and whether it ends inside the reasoning; `safe` hides control tokens of a client."""
        rendered = self._render(chat, safe)
        known = self.describe(tools=bool(chat.tools))
        start, end = known.reasoning_openings[0], known.reasoning_closings[0]
        thinking = rendered.rstrip().endswith(start.strip())
        own = known.exact and known.reasoning_field and not (known.lead or known.text_openings)
        if opened and chat.think and own and not thinking and not chat.prefill:
            closed = rendered.rstrip().endswith(end.strip())  # a switch of the template did
            rendered, thinking = rendered + start * (not closed), not closed
        if chat.thoughts:
            before = rendered.rstrip() if thinking else rendered + start.rstrip()
            rendered, thinking = f"{before}\n{safe(chat.thoughts)}", True
        if thinking and (chat.prefill or not chat.think):
            blanks = "\n" if chat.thoughts else "\n\n"
            closing = end if known.exact and chat.thoughts else f"{blanks}{end.strip()}\n\n"
            rendered, thinking = rendered.rstrip() + closing, False
        return rendered + safe(chat.prefill), thinking

    def _render(self, chat: Chat, safe: Callable[[Any], Any]) -> str:
        """Render; with the tools in words where the template takes none, or refuses these."""
        known = self.describe(tools=bool(chat.tools))
        if not chat.tools or not known.takes_tools or known.calls == GENERIC.calls:
            return self._shape(chat, safe, known, in_words=bool(chat.tools))
        try:
            return self._shape(chat, safe, known, in_words=False)
        except InvalidRequest:  # some templates fail on a type that a parameter has
            with contextlib.suppress(InvalidRequest):
                return self._shape(chat, safe, known, in_words=True)
            raise

    def _shape(self, chat: Chat, safe: Callable[[Any], Any], known: ChatFormat, *, in_words: bool) -> str:
        """Render with the rewrites that the template needs; with others as well, while it refuses."""
        tools: Sequence[Mapping[str, Any]] = [tool.for_template() for tool in chat.tools]
        template = self._tool_template if tools else self._template
        rewrites, prepared = self._find_rewrites(template), prepare(chat.messages)
        generic = known.calls == GENERIC.calls
        if in_words:
            prepared, tools = describe_tools(prepared, tools, known.calls), ()
        if not (known.writes_calls or generic):
            prepared = write_calls_as_text(prepared, known.calls)
        variables = self._variables(safe(list(tools)), safe(self._switches(template, chat.options)))
        variables["tools"] = variables["tools"] or rewrites.no_tools
        refusal = ""
        for shape in rewrites.shapes(prepared, as_text=in_words and generic, tools=bool(chat.tools)):
            try:
                rendered = template.render(**{**variables, "messages": safe(shape)})
            except TemplateRefused as error:
                refusal = refusal or str(error)
            else:
                if refusal:
                    log.debug("a conversation was rewritten further than the template needs by itself")
                return rendered
        raise InvalidRequest(f"{refusal} ({NO_SHAPE})", field="messages")

    def _variables(self, tools: list[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Variables of a template, as Transformers and llama.cpp give them."""
        today = datetime.now()
        return {
            "enable_thinking": True,
            "documents": None,
            "date_string": today.strftime("%d %b %Y"),
            "datetime": today.strftime("%b %d %Y"),
            "functions": tojson(tools, indent=2) if tools else "",
            "add_generation_prompt": True,
            **options,
            "tools": tools,
            "bos_token": self._vocabulary.begin_text,
            "eos_token": self._vocabulary.end_text,
        }

    def _derive_rewrites(self, template: ChatTemplate) -> TemplateRewrites:
        """Find the rewrites that a template needs."""
        found = TemplateRewrites(lambda messages, tools: self._try(template, messages, tools))
        log.debug("the chat template needs these rewrites: %s", found)
        return found

    def _try(
        self, template: ChatTemplate, messages: list[Message], tools: list[Any] | None, **options: Any
    ) -> str | None:
        """Messages of our own through the template; None where it refuses them."""
        variables = self._variables(tools or [], options)
        try:
            return template.render(**{**variables, "tools": tools, "messages": _map_strings(messages, str)})
        except TemplateRefused:
            return None

    def _switches(self, template: ChatTemplate, options: Mapping[str, Any]) -> dict[str, Any]:
        """The client's variables; a switch of the reasoning under each of its names."""
        wanted = [options[name] for name in ("enable_thinking", "thinking") if name in options]
        switches = OFF if False in wanted else {"enable_thinking": True, "thinking": True} if wanted else {}
        effort = options.get("reasoning_effort")
        if not isinstance(effort, str):
            return {**switches, **options}
        question, tools = [{"role": "user", "content": ""}], self._find_rewrites(template).no_tools
        for value in _similar_efforts(effort, template.source):
            efforts = {**switches, **dict.fromkeys(EFFORTS, value)}
            if self._try(template, question, tools, **efforts) is not None:
                return {**efforts, **options, "reasoning_effort": value}
        return {**switches, **{key: value for key, value in options.items() if key != "reasoning_effort"}}


def _place(spec: ConstraintSpec, known: ChatFormat, *, thinking: bool, forced: bool) -> ConstraintSpec:
    """The constraint in force from where it belongs: after reasoning, or after the text's opening."""
    openings, closings = (
        tuple(map(str.strip, marks)) for marks in (known.reasoning_openings, known.reasoning_closings)
    )
    if spec.triggers:
        return msgspec.structs.replace(spec, reasoning=ReasoningMarks(openings, closings, thinking))
    triggers: tuple[str, ...] = closings if thinking else ()
    if known.lead and not (thinking or forced):  # its text has an opening
        triggers = tuple(mark.removeprefix(known.lead) for mark in known.text_openings)
    return msgspec.structs.replace(spec, triggers=triggers)


def _make_either(calls: ConstraintSpec, form: ConstraintSpec) -> ConstraintSpec:
    """The grammar of an answer that is calls, or JSON by the form's schema."""
    schema = json.loads(form.source)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
    rules = calls.source.replace("start:", "calls:", 1)
    source = f"start: calls | form\nform: %json {json.dumps(schema)}\n{rules}"
    return ConstraintSpec(ConstraintKind.TOOLS, source)


def _similar_efforts(effort: str, source: str) -> Iterator[str]:
    """The effort, and what a template may have in its place; no effort, only by a name that it knows."""
    if effort == "none":
        names = ("none", "no_think", "minimal")
        yield from (name for name in names if re.search(f"[\"']{name}[\"']", source))
    else:
        yield effort
    yield "low" if effort in ("none", "minimal", "low") else "high"


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


class Gap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The text before and after the gap; `prompt` starts the text that fills it.

    `snippets` is None for a gap in plain text, and a list (maybe empty) for a gap in a file of a project.
    """

    prefix: str | tuple[int, ...]
    suffix: str
    prompt: str = ""
    snippets: tuple[Snippet, ...] | None = None
    cut_to: int = 0  # tokens that the parts are cut to; 0 leaves them whole


PromptInput = Chat | RawText | Gap


def infill_prompt(vocabulary: Vocabulary, gap: Gap) -> list[int]:
    """Tokens of a fill-in-the-middle prompt. Raises InvalidRequest.

    With `cut_to`, the parts are cut to fit: the prefix keeps its end, the suffix its start (three to one,
    if both are too long), the snippets get the rest. Text that is cut away in any case is not tokenised.
    Only `prompt` may contain control tokens.
    """
    marks, max_tokens = vocabulary.infill, gap.cut_to
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
    """The gap with at most `characters` of text in each of its parts; 0 keeps all of it.

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

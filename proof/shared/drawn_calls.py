"""Tool calls drawn at random from their grammar, in any chat format, and what the output parser reads there.

Needs no weights: each token is one of those that the mask allows, and forced ones are taken, as an engine
does. Markers are continued and begun more often than by chance, so that texts end, and nearly end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cllm.errors import InvalidRequest
from cllm.testing import FakeVocabulary
from cllm.text.call_grammar import make_call_grammar
from cllm.text.chat_format import ChatFormat, Tool, WrittenCall, write_calls
from cllm.text.output_parser import OutputParser
from cllm.text.prompt import PromptBuilder
from cllm.text.structured_output import Constraint, GrammarCompiler, MaskBuilder
from cllm.types import ConstraintSpec, TokenBound, Vocabulary
from proof.schemas import check_value
from proof.shared.schema_maker import SchemaMaker
from tests.driver.forced_calls import CLOSED, PARAMETERS, find_controls
from tests.driver.masks import get_mask
from tests.driver.turns import ENDS, Family, Parts, collect

END_TEXT = "<end-of-answer>"
MAX_TOKENS = 20_000
WIDE_TOKENS = 200
# Of arguments: without quotes, which no model could write in Python or in tags.
KEYS = ("name", "id", "größe", "tags", "a b", "is_on", "x", "price", "when", "the/path", "日本", "$in")
NAMES = ("weather", "search-web", "files.read")
EXAMPLE = {"city": "Bern", "count": 12, "exact": True, "items": [1, {"a": "b"}]}


class FamilyVocabulary(FakeVocabulary):
    """Bytes, the control tokens of a chat template, and tokens that reach over the edges of its markers."""

    def __init__(self, family: Family) -> None:
        controls = [*(end for end in ENDS if end in family.source), END_TEXT]
        controls += sorted(find_controls(family) - set(controls))
        self._first_control = 256
        self._controls = controls
        self._pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))))
        written = write_calls(
            family.format.calls, [WrittenCall(name, EXAMPLE, "abc123def") for name in NAMES[:2]]
        )
        source = random.Random(family.name)
        texts = [part.encode() for part in self._pattern.split(written) if len(part) > 2]
        places = [(text, source.randrange(len(text) - 1)) for text in source.choices(texts, k=WIDE_TOKENS)]
        wide = {text[at : at + source.randint(2, 7)] for text, at in places} if texts else set()
        self._wide = sorted(wide, key=lambda piece: (-len(piece), piece))
        self._by_piece = {piece: 256 + len(controls) + at for at, piece in enumerate(self._wide)}
        self.size = 256 + len(controls) + len(self._wide)
        self.special_texts = frozenset(controls)
        self.begin_text, self.end_text = "", END_TEXT
        self.ends = frozenset(self._id(text) for text in controls if text in ENDS or text == END_TEXT)
        self.bound = TokenBound(longest=max(map(len, controls)))

    def _id(self, control: str) -> int:
        return 256 + self._controls.index(control)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        at, tokens = 0, list[int]()
        for found in self._pattern.finditer(text) if parse_special else ():
            tokens += [*self._spell(text[at : found.start()].encode()), self._id(found[0])]
            at = found.end()
        return [*tokens, *self._spell(text[at:].encode())]

    def _spell(self, data: bytes) -> Iterator[int]:
        at = 0
        while at < len(data):
            sizes = (size for size in range(7, 1, -1) if data[at : at + size] in self._by_piece)
            size = next(sizes, 1)
            yield self._by_piece[data[at : at + size]] if size > 1 else data[at]
            at += size

    def piece(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        wide = token - 256 - len(self._controls)
        return self._wide[wide] if wide >= 0 else b""

    def spelling(self, token: int) -> str:
        return self._controls[token - 256] if self.is_control(token) else ""

    def is_control(self, token: int) -> bool:
        return 256 <= token < 256 + len(self._controls)


def draw_tokens(
    constraint: Constraint, vocabulary: Vocabulary, source: random.Random, marks: Iterable[bytes], limit: int
) -> Iterator[int]:
    """Tokens of one answer, the end token among them where it is drawn. Raises InvalidRequest."""
    marks, masks = tuple(marks), MaskBuilder(vocabulary.size)
    longest = max(map(len, marks), default=0)
    data, forced = b"", list[int]()
    for _ in range(limit):
        if constraint.complete:
            return
        if not forced:
            mask = get_mask(masks, constraint)
            tail = data[-longest:]
            continued = {mark[size] for mark in marks for size in _begun_sizes(tail, mark)}
            wanted = [byte for byte in continued if mask[byte]]
            if not wanted and source.random() < 0.3:
                wanted = [mark[0] for mark in marks if mask[mark[0]]]
            often = wanted and source.random() < 0.7
            forced = [source.choice(wanted) if often else int(source.choice(np.flatnonzero(mask)))]
        token = forced.pop(0)
        yield token
        if token in vocabulary.ends:
            return
        constraint.accept(token)
        data += vocabulary.piece(token)
        forced = forced or list(constraint.forced())


def _begun_sizes(tail: bytes, mark: bytes) -> Iterator[int]:
    """How much of a mark a text may end with."""
    return (size for size in range(1, min(len(mark), len(tail) + 1)) if tail.endswith(mark[:size]))


@dataclass(slots=True)
class Drawn:
    """What became of the answers of one template."""

    complete: int = 0
    cut: int = 0  # too long for their limit
    calls: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CallDrawer:
    """Draws answers of calls in the format of one chat template, as the server derives it."""

    family: Family
    vocabulary: FamilyVocabulary = field(init=False)
    format: ChatFormat = field(init=False)
    compiler: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        self.vocabulary = FamilyVocabulary(self.family)
        self.format = PromptBuilder(self.vocabulary, self.family.template).describe(tools=True)
        self.compiler = GrammarCompiler(self.vocabulary)

    @property
    def marks(self) -> set[bytes]:
        texts = (*self.format.marker_texts, '"', "}", "]", "'", ")")
        parts = (part for text in texts for part in self.vocabulary._pattern.split(text))
        return {part.encode() for part in parts if part}

    def draw(self, seeds: Iterable[int]) -> Drawn:
        drawn = Drawn()
        for seed in seeds:
            try:
                self._draw_one(seed, drawn)
            except InvalidRequest as error:
                drawn.faults.append(f"{seed}: refused: {error}")
        return drawn

    def _draw_one(self, seed: int, drawn: Drawn) -> None:
        source = random.Random(f"{self.family.name}:{seed}")
        tools = make_tools(source, seed)
        before, spec, options = self._choose_mode(tools, seed)
        constraint = self.compiler.compile(spec)
        for token in before:
            if constraint.asleep:
                constraint.follow(token)
        if constraint.asleep:
            drawn.faults.append(f"{seed}: {spec.triggers} start no call")
            return
        tokens = list(draw_tokens(constraint, self.vocabulary, source, self.marks, MAX_TOKENS))
        complete = constraint.complete or tokens[-1] in self.vocabulary.ends
        drawn.complete += complete
        drawn.cut += not complete
        parts = self._read([*before, *tokens], tools, source, cut=not complete, **options)
        faults = find_faults(parts, tools, cut=not complete)
        drawn.calls += len(parts[2])
        shorter = [*before, *tokens[: source.randrange(len(tokens) + 1)]]
        cut = self._read(shorter, tools, source, cut=True, **options)
        faults += [f"cut: {fault}" for fault in find_faults(cut, tools, cut=True)]
        written = self._show([*before, *tokens])
        drawn.faults += [f"{seed}: {fault} in {written!r}" for fault in faults]

    def _choose_mode(
        self, tools: Sequence[Tool], seed: int
    ) -> tuple[list[int], ConstraintSpec, dict[str, Any]]:
        """The tokens before the constraint, the constraint, and the options of the parser."""
        known = self.format
        if seed % 5 == 4:
            spec = make_call_grammar(known, tools, parallel=True, forced=False)
            if spec is not None:
                return self._tokenize(spec.triggers[0]), spec, {}
        options = {"forced": True, "parallel": seed % 3 != 0}
        spec = make_call_grammar(known, tools, parallel=options["parallel"])
        assert spec is not None
        if seed % 5 == 3 and not known.lead:
            closing = known.reasoning_closings[0].strip()
            spec = ConstraintSpec(spec.kind, spec.source, (closing,))
            return self._tokenize(f"So{closing}"), spec, {**options, "thinking": True}
        return [], spec, options

    def _tokenize(self, text: str) -> list[int]:
        return self.vocabulary.tokenize(text, add_special=False, parse_special=True)

    def _show(self, tokens: Iterable[int]) -> str:
        """The text that a client's answer is read from: control tokens only where they are markers."""
        known, words = set(self.format.markers), self.vocabulary
        shown = (
            words.spelling(token).encode() if words.spelling(token) in known else words.piece(token)
            for token in tokens
        )
        return b"".join(shown).decode("utf-8", "ignore")

    def _read(
        self,
        tokens: Sequence[int],
        tools: Sequence[Tool],
        source: random.Random,
        *,
        cut: bool,
        **options: Any,
    ) -> Parts:
        text, at = self._show(tokens), 0
        parser = OutputParser(self.format, tools, **options)
        events: list[Any] = []
        while at < len(text):
            size = source.choice((1, 2, 3, 5, 8, 20, 200))
            events += parser.feed(text[at : at + size])
            at += size
        return collect([*events, *parser.finish(cut=cut)])


def make_tools(source: random.Random, seed: int) -> list[Tool]:
    """Every second time the same two; otherwise one to three with schemas of their own."""
    if seed % 2 == 0:
        return [Tool(name, "It is one.", PARAMETERS) for name in NAMES[:2]]
    maker = SchemaMaker(source.randrange(1 << 30), deepest=2, keys=KEYS)
    return [Tool(name, "It is one.", maker.make_parameters()) for name in NAMES[: source.randint(1, 3)]]


def find_faults(parts: Parts, tools: Sequence[Tool], *, cut: bool) -> list[str]:
    """What is wrong with an answer of calls; the last one may be cut."""
    _, text, calls = parts
    faults = [f"text {text!r}"] if text.strip() else []
    if not calls and not cut:
        faults.append("no call")
    schemas = {tool.name: CLOSED if tool.parameters is PARAMETERS else tool.parameters for tool in tools}
    for name, arguments in calls[: len(calls) - cut]:
        if name not in schemas:
            faults.append(f"{name!r} is no tool")
        elif (
            fault := "not an object"
            if not isinstance(arguments, dict)
            else check_value(schemas[name], arguments)
        ):
            faults.append(f"{name}({arguments!r}): {fault}")
    return faults

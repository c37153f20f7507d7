"""Structured output: grammars and JSON schemas as bitmasks over the vocabulary, by llguidance."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from cllm import limits
from cllm.errors import InvalidRequest
from cllm.text.detokenizer import count_possible
from cllm.text.json_schema import check_end, close_schemas, count_nesting, escape_regex, parse_schemas
from cllm.types import (
    GRAMMAR_CACHE_BYTES,
    ConstraintKind,
    ConstraintSpec,
    ReasoningMarks,
    TokenMask,
    Vocabulary,
)

STACK_BYTES = 256 << 20  # of native recursion; 64 MiB were not enough for sources within the limits
MIN_COMPILED_BYTES = 32 << 10
STATE_BYTES = 1000  # of such a state, as measured: 470 to 940
TOKEN_BYTES = 16_000  # by which a token of an answer makes its grammar grow, at most; usually by none
MAX_CHECKED = 1024  # grammars known to be valid
REHEARSALS, REHEARSED_TOKENS = 2, 24  # takes some 20 ms
_MARK = "\x02"  # a control character: no token has it together with other text
_EXHAUSTED = "the grammar allows no further token, but the answer is not complete"
_TOO_MANY_STATES = (
    f"the grammar needs more than {limits.MAX_LEXER_STATES} states: use shorter repetitions, "
    "or none (maxLength)"
)
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=limits.MAX_LEXER_STATES,
    max_grammar_size=200_000,
    max_items_in_row=5 * limits.MAX_PROPERTIES,  # four for each property that may come next
    verbose_errors=False,
)


Result = TypeVar("Result")
Guard = Callable[[], AbstractContextManager[None]]
_STACK_LOCK = threading.Lock()  # the size of new threads' stacks is one for the process


class CompiledGrammar:
    """A compiled grammar and the memory it takes. Its answers share a lexer, which grows with their text."""

    def __init__(self, matcher: LLMatcher, compiled_bytes: int) -> None:
        self.matcher = matcher
        self.compiled_bytes = compiled_bytes
        self.tokens = 0  # of all answers

    @property
    def memory_bytes(self) -> int:
        """An upper bound: llguidance does not say how far the lexer has grown."""
        return self.compiled_bytes + min(self.tokens * TOKEN_BYTES, limits.MAX_LEXER_STATES * STATE_BYTES)


class TriggerWatch:
    """Watches an answer for the texts that wake a constraint. Control tokens count by their spelling."""

    def __init__(
        self, triggers: Sequence[str], vocabulary: Vocabulary, reasoning: ReasoningMarks | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._triggers = _encode(triggers)
        openings, closings = (reasoning.openings, reasoning.closings) if reasoning is not None else ((), ())
        self._outside = self._triggers + _encode(openings)
        self._closings = _encode(closings)
        self._inside = reasoning is not None and reasoning.inside  # the reasoning: only its end counts
        self._begun = b""  # the end of the answer, where a mark may have begun with it

    @property
    def _marks(self) -> list[bytes]:
        return self._closings if self._inside else self._outside

    def spell(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        piece = vocabulary.piece(token)
        return vocabulary.spelling(token).encode() if not piece and vocabulary.is_control(token) else piece

    def push(self, token: int) -> int | None:
        """Count the bytes of a token after a trigger that it completes; None if it completes none."""
        piece = self._vocabulary.piece(token)
        if piece and not self._begun and not any(mark[0] in piece for mark in self._marks):
            return None  # nearly every token
        text = self._begun + self.spell(token)
        while found := [(at + len(mark), mark) for mark in self._marks if (at := text.find(mark)) >= 0]:
            end, mark = min(found)
            text = text[end:]
            if mark in self._triggers and not self._inside:
                return len(text)
            self._inside = not self._inside
        self._begun = text[len(text) - count_possible(text, self._marks) :]
        return None

    def count_before(self, tokens: Sequence[int]) -> int:
        """Count the tokens before the first that would complete a trigger."""
        before = self._begun, self._inside
        count = next((place for place, token in enumerate(tokens) if self.push(token) is not None), None)
        self._begun, self._inside = before
        return len(tokens) if count is None else count


def _encode(texts: Sequence[str]) -> list[bytes]:
    return [text.encode() for text in texts if text]


class Constraint:
    """Grammar state of one answer. With a `watch` it sleeps until a trigger was generated."""

    def __init__(
        self, grammar: CompiledGrammar, tokenizer: LLTokenizer, watch: TriggerWatch | None = None
    ) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._matcher = grammar.matcher.deep_copy()
        self.watch = watch

    @property
    def asleep(self) -> bool:
        return self.watch is not None

    def follow(self, token: int) -> Sequence[int] | None:
        """Watch a sampled token; None while the constraint sleeps on. Else these tokens are appended.

        A token may hold the end of a trigger and more. The rest must fit the grammar, or is left out:
        then the tokens are those that spell the first part.
        """
        assert self.watch is not None
        if (beyond := self.watch.push(token)) is None:
            return None
        spelled, self.watch = self.watch.spell(token), None
        begun, rest = spelled[: len(spelled) - beyond], spelled[len(spelled) - beyond :]
        tokens = self._tokenizer.tokenize_bytes(rest) if rest else []
        fits = self._matcher.validate_tokens(tokens) == len(tokens)
        if not fits or self._tokenizer.decode_bytes(tokens) != rest:
            return self._tokenizer.tokenize_bytes(begun) or (token,)
        self._matcher.consume_tokens(tokens)
        return (token,)

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        self._grammar.tokens += 1
        self._matcher.consume_token(token)
        self.check()

    def forced(self) -> Sequence[int]:
        """Tokens that the grammar leaves no choice about; the model need not be asked."""
        return [] if self.complete else self._matcher.compute_ff_tokens()

    @property
    def complete(self) -> bool:
        """The answer is complete: no token can follow."""
        return bool(self._matcher.is_stopped())

    def check(self) -> None:
        """Raise InvalidRequest if the grammar has failed, or allows no token."""
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            if "too many states" in reason:
                raise InvalidRequest(_TOO_MANY_STATES)
            raise InvalidRequest(_EXHAUSTED if "NoExtension" in reason else f"the grammar failed: {reason}")


class GrammarCompiler:
    """Grammar compiler for one vocabulary, with a cache of compiled grammars. One thread at a time.

    The cache takes at most `cache_bytes`; the least recently used grammar is evicted first, and compiled
    again when it is wanted. One that an answer uses is freed when the answer has ended.
    """

    def __init__(
        self, vocabulary: Vocabulary, cache_bytes: int = GRAMMAR_CACHE_BYTES, guard: Guard = nullcontext
    ) -> None:
        """`guard` is entered on the thread that compiles, to end what no limit does."""
        self._vocabulary = vocabulary
        self._guard = guard
        wrapper = TokenizerWrapper(_Tokenizer(vocabulary))
        self._tokenizer = LLTokenizer(wrapper, eos_token=sorted(vocabulary.ends))
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[ConstraintSpec, CompiledGrammar] = OrderedDict()
        self._checked: OrderedDict[bytes, None] = OrderedDict()  # digests

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory of the cached grammars."""
        return sum(grammar.memory_bytes for grammar in self._cached.values())

    def compile(self, spec: ConstraintSpec) -> Constraint:
        """A new constraint. Raises InvalidRequest for a grammar that is invalid or too complex."""
        triggers, reasoning = tuple(filter(None, spec.triggers)), spec.reasoning
        spec = ConstraintSpec(spec.kind, spec.source)
        if (grammar := self._cached.pop(spec, None)) is None:
            before = _allocated_bytes()
            matcher = self._compile(spec)
            # Other threads allocate and free at the same time: no less than such a source takes at least.
            usual = MIN_COMPILED_BYTES + 32 * len(spec.source)
            grammar = CompiledGrammar(matcher, max(usual, _allocated_bytes() - before))
        self._cached[spec] = grammar
        while self.memory_bytes > self._cache_bytes:
            self._cached.popitem(last=False)
        watch = TriggerWatch(triggers, self._vocabulary, reasoning) if triggers else None
        return Constraint(grammar, self._tokenizer, watch)

    def check(self, spec: ConstraintSpec) -> None:
        """Raise InvalidRequest where `compile` or an answer would. Keeps no grammar."""
        digest = hashlib.blake2b(f"{spec.kind}:{spec.source}".encode("utf-8", "surrogatepass")).digest()
        if digest not in self._checked:
            matcher = self._compile(spec)
            _run_on_large_stack(lambda: self._rehearse(matcher, spec.field), self._guard)
            self._checked[digest] = None
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)

    def _compile(self, spec: ConstraintSpec) -> LLMatcher:
        """Compile a source that is within the limits. Native code sees no other."""
        _check_size(spec)
        schemas = parse_schemas(spec)
        with suppress(TypeError, LookupError):  # no schema: the compiler says why
            for each in schemas:
                check_end(each.schema, spec.field)
        closed = close_schemas(spec, schemas)
        try:
            return _run_on_large_stack(lambda: self._make_matcher(spec, closed), self._guard)
        except InvalidRequest:  # a closed schema must not be what is refused
            return _run_on_large_stack(lambda: self._make_matcher(spec, spec.source), self._guard)

    def _make_matcher(self, spec: ConstraintSpec, source: str) -> LLMatcher:
        field = spec.field
        grammar = to_llguidance(ConstraintSpec(spec.kind, source))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"{field}: {_first_line(matcher.get_error())}", field)
        copy = matcher.deep_copy()
        if not any(copy.compute_bitmask()) or copy.is_error():  # for example with circular references
            raise InvalidRequest(f"{field}: no text matches it", field)
        return matcher

    def _rehearse(self, matcher: LLMatcher, field: str) -> None:
        """Follow a grammar for a few tokens, as answers would, and time the masks.

        Raises InvalidRequest for a grammar that fails on the way, or whose masks would hold up a step. The
        CPU time of this thread counts, not that of a busy machine. A mask that is slow is made once more,
        from the start: one sample may be a cold cache or a fault of a page.
        """
        draws = random.Random(0)
        for _ in range(REHEARSALS):
            answer, tokens = matcher.deep_copy(), list[int]()
            for _ in range(REHEARSED_TOKENS):
                words, mask_ms = _time_mask(answer)
                if answer.is_error():
                    reason = _first_line(answer.get_error())
                    if "NoExtension" in reason:
                        break  # these tokens lead nowhere; others may not
                    raise InvalidRequest(f"{field}: too complex to be followed: {reason}", field)
                if mask_ms > limits.MAX_MASK_MS:
                    again = matcher.deep_copy()
                    again.consume_tokens(tokens)
                    mask_ms = min(mask_ms, _time_mask(again)[1])
                advice = "use fewer alternatives and repetitions"
                limits.check(mask_ms, limits.MAX_MASK_MS, "ms a mask", field, advice)
                allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
                if not len(allowed) or answer.is_stopped():
                    break
                tokens.append(int(draws.choice(allowed)))
                answer.consume_token(tokens[-1])


def _time_mask(matcher: LLMatcher) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
    """The next token mask, and the milliseconds of CPU time that it takes."""
    began = time.thread_time()
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return mask, round(1000 * (time.thread_time() - began))


def _run_on_large_stack(task: Callable[[], Result], guard: Guard) -> Result:
    """Run a task, guarded, on a thread whose stack holds the deepest recursion that a source can cause.

    A schema within the limits may nest 64 deep between each two of its references. The usual 8 MiB overflow
    then, which ends the process.
    """

    def run() -> Result:
        with guard():
            return task()

    with _STACK_LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(1, "cllm-compile")
            future = pool.submit(run)
        finally:
            threading.stack_size(usual)
    with pool:
        return future.result()


def _check_size(spec: ConstraintSpec) -> None:
    """Raise InvalidRequest for a source that is too long, too deep, or has too many rules."""
    field = spec.field
    limits.check(len(spec.source), limits.MAX_SOURCE, "characters", field)
    if count_nesting(spec.source) > limits.MAX_NESTING:  # before native code reads it
        raise InvalidRequest(f"{field}: nested deeper than {limits.MAX_NESTING}", field)
    if spec.kind is ConstraintKind.GRAMMAR:
        bare = re.sub(r'"(?:\\.|[^"\\])*"', "", spec.source)
        rules = bare.count("::=") + bare.replace("::=", "").count(":")  # at most
        limits.check(rules, limits.MAX_RULES, "rules", field)


def to_llguidance(spec: ConstraintSpec) -> str:
    """The grammar in llguidance's own form. Raises InvalidRequest."""
    field = spec.field
    try:
        match spec.kind:
            case ConstraintKind.JSON_SCHEMA:
                # Compact: with free whitespace a model may write blanks without end.
                overrides = {"whitespace_flexible": False, "lenient": False}
                return LLMatcher.grammar_from_json_schema(spec.source, overrides=overrides)  # type: ignore[arg-type]
            case ConstraintKind.REGEX:
                return LLMatcher.grammar_from_regex(spec.source)
            case ConstraintKind.CHOICE:
                choices = json.loads(spec.source)
                return LLMatcher.grammar_from_regex("|".join(f"({escape_regex(each)})" for each in choices))
            case ConstraintKind.TOOLS:
                return LLMatcher.grammar_from_lark(spec.source)
            case ConstraintKind.GRAMMAR:
                lark = spec.source if is_lark_syntax(spec.source) else gbnf_to_lark(spec.source)
                return LLMatcher.grammar_from_lark(lark)
    except Exception as error:  # the converters raise any type
        raise InvalidRequest(f"{field}: {_first_line(str(error)) or type(error).__name__}", field) from None


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else ""


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; the fifth and the eighth number are bytes in use."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def _allocated_bytes() -> int:
    """Bytes that native code has allocated in this process; 0 where the C library does not say."""
    if (mallinfo := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return 0
    mallinfo.restype = _MallocInfo
    numbers = mallinfo().numbers
    return int(numbers[4] + numbers[7])  # mapped, and in the heap


class _Tokenizer:
    """Vocabulary in the interface that llguidance expects."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = min(vocabulary.ends)
        self.bos_token_id = None
        self.special_token_ids = [token for token in range(vocabulary.size) if vocabulary.is_control(token)]
        self.tokens = [*map(vocabulary.piece, range(vocabulary.size))]
        for token in self.special_token_ids:  # must not match its own text: no UTF-8 text starts with 0xFF
            self.tokens[token] = b"\xff[%d]" % token

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that spell the text exactly, as in the middle of a longer one.

        Some vocabularies put a blank before a text, some rewrite it. So it is tokenized behind a mark, too,
        that no token has in common with other text; what spells more or less than the text is not used.
        """
        wanted = text if isinstance(text, bytes) else text.encode()
        for before in ("", _MARK):
            plain = before + wanted.decode("utf-8", "replace")
            tokens = self._vocabulary.tokenize(plain, add_special=False, parse_special=False)
            pieces = [self.tokens[token] for token in tokens]
            extra = sum(map(len, pieces)) - len(wanted)
            ends = accumulate(map(len, pieces), initial=0)
            first = next((number for number, end in enumerate(ends) if end == extra), None)
            if first is not None and b"".join(pieces[first:]) == wanted:
                return tokens[first:]
        return self._tokenize_greedily(wanted)

    def _tokenize_greedily(self, wanted: bytes) -> list[int]:
        """The longest token at each place; ends where there is none."""
        tokens: list[int] = []
        begin = 0
        while begin < len(wanted):
            longest = min(self._longest, len(wanted) - begin)
            pieces = (wanted[begin : begin + length] for length in range(longest, 0, -1))
            if (piece := next((piece for piece in pieces if piece in self._by_piece), None)) is None:
                break
            tokens.append(self._by_piece[piece])
            begin += len(piece)
        return tokens

    @cached_property
    def _by_piece(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.tokens) if piece}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.tokens))


class MaskBuilder:
    """The masks of several constraints in one native call. Owner thread only."""

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(num_threads=max(1, (os.cpu_count() or 1) // 2))

    def masks(self, constraints: Sequence[Constraint]) -> list[TokenMask | InvalidRequest]:
        """The tokens that each constraint allows next, or the error of a grammar that is exhausted."""
        size = self._size
        words = allocate_token_bitmask(len(constraints), size)
        matchers = [(constraint._matcher, line) for line, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        found: list[TokenMask | InvalidRequest] = []
        for constraint, line in zip(constraints, bits, strict=True):
            mask = line[:size]
            try:
                constraint.check()
                found.append(mask if mask.any() else InvalidRequest(_EXHAUSTED))
            except InvalidRequest as error:
                found.append(error)
        return found

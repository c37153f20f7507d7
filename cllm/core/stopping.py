"""Stopping: what ends an answer, which tokens are forced into it, and the text that its tokens make."""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from cllm.backend.base import Sampler
from cllm.text.detokenizer import IncrementalDetokenizer
from cllm.text.structured_output import Constraint
from cllm.types import FinishReason, ReasoningLimit, Request, Vocabulary


class Appended(NamedTuple):
    """What an answer made of the tokens sampled for it."""

    tokens: tuple[int, ...]
    text: str | None  # None: no later token depends on it, so it is still to be detokenized
    reason: FinishReason | None  # set when it is over
    kept: int  # how many of the sampled tokens these begin with


class ReasoningBudget:
    """Counts the tokens of an answer's reasoning. Once the budget is spent, the closing marker is `due`."""

    def __init__(self, limit: ReasoningLimit) -> None:
        self._limit = limit
        self._inside = limit.inside
        self._left = limit.budget
        self._thought = 0  # tokens since the last opening marker
        self.due: list[int] = []  # tokens that must come next
        self._force_closing(())

    @property
    def draft_room(self) -> float:
        """How many draft tokens cannot spend the budget."""
        return self._left - 1 if self._inside else math.inf

    def follow(self, tokens: Tokens[int]) -> None:
        """A token was appended to these."""
        limit = self._limit
        if self.due:
            del self.due[0]
            self._inside = bool(self.due)
            return
        if self._inside and ends_with(tokens, limit.closing):
            self._inside = False
            self._left += len(limit.closing) - 1  # they were counted before they were known
        elif self._inside:
            self._left -= 1
            self._thought += 1
        elif limit.opening:
            self._inside, self._thought = ends_with(tokens, limit.opening), 0
        self._force_closing(tokens)

    def _force_closing(self, tokens: Tokens[int]) -> None:
        """Where the budget is spent, what is left of the closing marker must come."""
        closing = self._limit.closing
        if self._inside and self._left <= 0:
            begun = range(min(len(closing) - 1, self._thought), 0, -1)
            length = next((length for length in begun if ends_with(tokens, closing[:length])), 0)
            self.due = list(closing[length:])
            self._left += length


def ends_with(tokens: Tokens[int], last: Tokens[int]) -> bool:
    return len(tokens) >= len(last) > 0 and list(tokens[-len(last) :]) == list(last)


class Stopping:
    """The rules of one answer: end tokens, stop strings, its length, its grammar and its reasoning budget.

    It appends to the sequence's own list of tokens.
    """

    def __init__(self, request: Request, tokens: list[int], capacity: int) -> None:
        self._request = request
        self._tokens = tokens
        # Never more than fits: a full context ends with `length`.
        self.token_limit = min(len(request.prompt) + request.max_tokens, capacity)
        self.sampler: Sampler | None = None
        self.constraint: Constraint | None = None
        self.detokenizer = IncrementalDetokenizer(request.stop)
        self._reasoning = None if request.reasoning is None else ReasoningBudget(request.reasoning)
        self._markers: dict[int, bytes] | None = None if request.markers else {}
        self.masks = bool(request.constraint or request.reasoning or request.min_tokens)  # some of its tokens
        # Whether only its length and its end tokens can end it.
        self.plain = not (self.masks or request.stop or request.stop_token_ids)

    @property
    def grammar(self) -> Constraint | None:
        """The constraint on the next token, if there is one and it does not sleep."""
        return None if self.constraint is None or self.constraint.asleep else self.constraint

    @property
    def due(self) -> Tokens[int]:
        """Tokens that must come next: the end of a reasoning whose budget is spent."""
        return () if self._reasoning is None else self._reasoning.due

    @property
    def endable(self) -> bool:
        """Whether the answer has the tokens it must have before it may end."""
        return len(self._tokens) - len(self._request.prompt) >= self._request.min_tokens

    @property
    def draft_room(self) -> int:
        """How many draft tokens may be verified: none where a token is masked, or the prompt scored."""
        if self.grammar is not None or self.due or not self.endable or self._request.prompt_logprobs:
            return 0
        room = self.token_limit - len(self._tokens) - 1
        return room if self._reasoning is None else int(min(room, self._reasoning.draft_room))

    def append(self, sampled: Tokens[int], vocabulary: Vocabulary) -> Appended:
        """Append sampled tokens, and those that are then forced, until something ends the answer."""
        if self.plain and len(sampled) == 1:  # the usual case, which a GPU waits for
            if sampled[0] in vocabulary.ends and not self._request.sampling.ignore_eos:
                return Appended((), None, FinishReason.STOP, 0)
            self._tokens.append(sampled[0])
            full = len(self._tokens) >= self.token_limit
            return Appended((sampled[0],), None, FinishReason.LENGTH if full else None, 1)
        begin, kept = len(self._tokens), 0
        texts: list[str] = []
        reason: FinishReason | None = None
        left, constraint, request = list(sampled), self.constraint, self._request
        own = True  # what is left was sampled
        while left and reason is None:
            token = left.pop(0)
            ends = token in vocabulary.ends and not request.sampling.ignore_eos
            if ends or token in request.stop_token_ids:
                reason = FinishReason.STOP
                break
            grammar = self.grammar if constraint is not None else None
            if constraint is not None and grammar is None and (woken := constraint.follow(token)) is not None:
                left = []  # what came after was sampled without the grammar
                texts += [self._push(each, vocabulary) for each in self._wake(token, woken)]
                own = own and self._tokens[-1] == token
            else:
                texts.append(self._push(token, vocabulary))
            kept += own
            if grammar is not None:
                grammar.accept(token)
            if self.detokenizer.stopped_by is not None or (grammar is not None and grammar.complete):
                reason = FinishReason.STOP
            elif len(self._tokens) >= self.token_limit:
                reason = FinishReason.LENGTH
            elif constraint is not None or self._reasoning is not None:
                after = self._forced(left)
                left, own = after, own and after is left
        if reason is not None and request.stop:
            texts.append(self.detokenizer.finish())
        return Appended(tuple(self._tokens[begin:]), "".join(texts) if request.stop else None, reason, kept)

    def _push(self, token: int, vocabulary: Vocabulary) -> str:
        """Append a token; returns the text that is now final, where it may stop the answer."""
        self._tokens.append(token)
        if self._reasoning is not None:
            self._reasoning.follow(self._tokens)
        return self.detokenize((token,), vocabulary) if self._request.stop else ""

    def detokenize(self, tokens: Tokens[int], vocabulary: Vocabulary) -> str:
        """The text that is final with these tokens, which follow those of the last call."""
        if self._markers == {}:
            return self.detokenizer.push(b"".join(map(vocabulary.piece, tokens)))
        return self.detokenizer.push(b"".join(self._spell(token, vocabulary) for token in tokens))

    def _wake(self, token: int, instead: Tokens[int]) -> Tokens[int]:
        """A token has woken the constraint: what is appended for it, as much as there is room for."""
        if tuple(instead) != (token,) and self.sampler is not None:
            self.sampler.accept(instead)
        self._reasoning = None  # from here on the grammar says what comes
        return instead[: self.token_limit - len(self._tokens)]

    def _forced(self, left: list[int]) -> list[int]:
        """What is left to append, or the tokens that must come instead and need no sampling."""
        if due := self.due:
            return left if left == due else self._force(due)
        return left if left or (grammar := self.grammar) is None else self._force(grammar.forced())

    def _force(self, tokens: Tokens[int]) -> list[int]:
        """None where the client wants to see every token's probability: they are sampled from masks."""
        if self._request.logprobs:
            return []
        if tokens and self.sampler is not None:
            self.sampler.accept(tokens)
        return list(tokens)

    def _spell(self, token: int, vocabulary: Vocabulary) -> bytes:
        """The token's bytes; those of a control token only where the client asked to see its spelling."""
        if self._markers is None:
            spelled = {
                marker: vocabulary.tokenize(marker, add_special=False, parse_special=True)
                for marker in self._request.markers
            }
            self._markers = {
                tokens[0]: marker.encode()
                for marker, tokens in spelled.items()
                if len(tokens) == 1 and vocabulary.is_control(tokens[0])
            }
        return self._markers.get(token) or vocabulary.piece(token)

"""A small model that guesses for the large one. Its memory is its own and is kept in step with the texts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import msgspec

from cllm.backend.base import Batch, Drafter, ModelRunner, Row, StepStatus
from cllm.config import EngineConfig
from cllm.errors import ConfigError
from cllm.types import Limits, ModelInfo, SamplingParams, Vocabulary

log = logging.getLogger(__name__)
SLOTS = 2  # with more who generate, guesses cost the others more than they save
COMPARED_TOKENS = 1000


def draft_config(config: EngineConfig, request_tokens: int) -> EngineConfig:
    """How the small model is loaded: room for `SLOTS` requests of the large one, all else alike."""
    return msgspec.structs.replace(
        config,
        model=config.draft_model,
        draft_model="",
        chat_template="",
        pooling="",
        parallel=SLOTS,
        ctx_size=SLOTS * request_tokens,
        max_request_tokens=0,
        unified_kv=False,
    )


def check_cuttable(info: ModelInfo, which: str) -> None:
    """Raises ConfigError for a memory from which wrong guesses cannot be removed."""
    if info.recurrent or info.sliding_window:
        kind = "recurrent" if info.recurrent else "with a sliding window"
        raise ConfigError(f"draft_model: the {which} model is {kind}, so guesses could not be taken back")


def check_vocabulary(mine: Vocabulary, theirs: Vocabulary) -> None:
    """Raises ConfigError unless a token means the same in both, as far as a sample tells."""
    if mine.size != theirs.size:
        raise ConfigError(
            f"draft_model: its vocabulary has {theirs.size} tokens, that of the model {mine.size}; "
            "they must be the same"
        )
    if mine.ends != theirs.ends:
        raise ConfigError("draft_model: its end tokens are not those of the model")
    for token in range(0, mine.size, max(1, mine.size // COMPARED_TOKENS)):
        if mine.piece(token) != theirs.piece(token):
            raise ConfigError(
                f"draft_model: token {token} is {theirs.piece(token)!r} there, {mine.piece(token)!r} in the "
                "model; the vocabularies must be the same"
            )


class _Slot:
    """A sequence of the small model: what it holds, and for whom."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: list[int] = []
        self.settled = 0  # so many first tokens are the owner's for certain
        self.owner: weakref.ref[ModelDrafter] | None = None

    @property
    def free(self) -> bool:
        return self.owner is None or self.owner() is None


class DraftModel:
    """Owns the small model. Guesses for as many sequences as it has slots; whoever comes later gets none.

    Nothing that goes wrong in it goes further: then there is no guess.
    """

    def __init__(self, runner: ModelRunner, vocabulary: Vocabulary) -> None:
        """Takes the runner over, and closes it if it cannot guess for that vocabulary (ConfigError)."""
        try:
            check_cuttable(runner.info, "draft")
            check_vocabulary(vocabulary, runner.vocabulary)
        except ConfigError:
            runner.close()
            raise
        self._runner = runner
        self._sampler = runner.create_sampler(SamplingParams(temperature=0))
        self._slots = [_Slot(number) for number in range(runner.limits.sequences)]

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    def new_drafter(self) -> Drafter:
        return ModelDrafter(self)

    def close(self) -> None:
        self._sampler.close()
        self._runner.close()

    def propose(self, drafter: ModelDrafter, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """What the small model would say next; nothing while it has not caught up with a long prompt."""
        if len(tokens) + max_tokens > self.limits.request_tokens:
            return []
        slot = self._slot_of(drafter, tokens)
        if slot is None:
            return []
        try:
            return self._guess(slot, tokens, max_tokens)
        except Exception:
            log.exception("the draft model failed; its memory is made anew")
            self._empty(slot)
            return []

    def _slot_of(self, drafter: ModelDrafter, tokens: Sequence[int]) -> _Slot | None:
        for slot in self._slots:
            if slot.owner is not None and slot.owner() is drafter:
                return slot
        free = [slot for slot in self._slots if slot.free]
        if not free:
            return None
        slot = max(free, key=lambda slot: _common(slot.held, tokens, 0))
        slot.owner, slot.settled = weakref.ref(drafter), 0
        return slot

    def _guess(self, slot: _Slot, tokens: Sequence[int], max_tokens: int) -> list[int]:
        # The last token is always computed: what comes after it is wanted.
        common = min(_common(slot.held, tokens, slot.settled), len(tokens) - 1)
        if common < len(slot.held):
            common = self._runner.truncate(slot.number, common)
            del slot.held[common:]
        slot.settled = common
        pending = list(tokens[common : common + self.limits.batch_tokens])
        wanted = common + len(pending) == len(tokens)
        guesses: list[int] = []
        while pending and len(guesses) < max_tokens:
            row = Row(slot.number, len(slot.held), pending, int(wanted), self._sampler)
            result = self._runner.run(Batch((row,)))
            if result.status is not StepStatus.DONE:
                self._empty(slot)
                return guesses
            slot.held += pending
            pending = list(result.rows[0].tokens)
            guesses += pending
        return guesses

    def _empty(self, slot: _Slot) -> None:
        slot.held, slot.settled = [], 0
        self._runner.truncate(slot.number, 0)


class ModelDrafter:
    """One sequence's way to the draft model."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        return self._model.propose(self, tokens, max_tokens)


def _common(held: Sequence[int], tokens: Sequence[int], begin: int) -> int:
    """How many first tokens are the same; the first `begin` are known to be."""
    end = min(len(held), len(tokens))
    while begin < end and held[begin] == tokens[begin]:
        begin += 1
    return begin

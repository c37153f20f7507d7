"""Draft model: a small model that proposes draft tokens for the served one, with a KV cache of its own."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import msgspec

from cllm.backend.base import Batch, ModelRunner, Row, StepStatus
from cllm.backend.llama.gguf import TABLES
from cllm.backend.llama.placement import asked_layers
from cllm.config import EngineConfig
from cllm.errors import ConfigError
from cllm.types import ModelInfo, SamplingParams, Vocabulary

log = logging.getLogger(__name__)
SLOTS = 2  # sequences with drafts; more of them would cost the batch more than they save
COMPARED_TOKENS = 1000


def draft_config(config: EngineConfig, request_tokens: int) -> EngineConfig:
    """The draft model's configuration: `SLOTS` requests of the served model's length, all else alike.

    With layers of the served model on GPUs, one of these holds the whole draft model.
    """
    return msgspec.structs.replace(
        config,
        model=config.draft_model,
        parallel=SLOTS,
        ctx_size=SLOTS * request_tokens,
        gpu_layers=0 if asked_layers(config) == 0 else "all",
        override_tensor=(),
        override_kv=(),
        **TABLES["draft_model"],
    )


def check_cuttable(info: ModelInfo, which: str) -> None:
    """Raises ConfigError for a KV memory from which rejected drafts cannot be removed."""
    if info.recurrent or info.sliding_window:
        kind = "recurrent" if info.recurrent else "with a sliding window"
        raise ConfigError(f"draft_model: the {which} model is {kind}, so drafts could not be rolled back")


def check_vocabulary(served: Vocabulary, draft: Vocabulary) -> None:
    """Raises ConfigError unless both vocabularies agree on a sample of tokens."""
    if served.size != draft.size:
        raise ConfigError(
            f"draft_model: its vocabulary has {draft.size} tokens, that of the model {served.size}; "
            "they must be the same"
        )
    if served.ends != draft.ends:
        raise ConfigError("draft_model: its end tokens are not those of the model")
    for token in range(0, served.size, max(1, served.size // COMPARED_TOKENS)):
        if served.piece(token) != draft.piece(token):
            raise ConfigError(
                f"draft_model: token {token} is {draft.piece(token)!r} there, {served.piece(token)!r} in the "
                "model; the vocabularies must be the same"
            )


class _Slot:
    """A slot of the draft model."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tenant: str | None = None  # whose tokens are in it; with None, no other sequence may match them
        self.held: list[int] = []  # the tokens in KV
        self.settled = 0  # the first of them known to agree with its drafter's


class DraftModel:
    """Owns the draft model. Drafts for as many sequences as it has slots; further ones get no drafts.

    What a sequence leaves in a slot is matched by later ones of its tenant only: how soon drafts come would
    tell another tenant what it held.
    A failure of the draft model costs drafts and nothing else.
    """

    def __init__(self, runner: ModelRunner, vocabulary: Vocabulary) -> None:
        """Takes the runner over, and closes it if its vocabulary does not match (ConfigError)."""
        try:
            check_cuttable(runner.info, "draft")
            check_vocabulary(vocabulary, runner.vocabulary)
        except ConfigError:
            runner.close()
            raise
        self._runner = runner
        self.memory_bytes = sum(runner.memory_bytes().values())
        self._sampler = runner.create_sampler(SamplingParams(temperature=0))
        self._slots = [_Slot(number) for number in range(runner.limits.sequences)]
        self._taken: weakref.WeakKeyDictionary[ModelDrafter, _Slot] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        self._sampler.close()
        self._runner.close()

    def propose(self, drafter: ModelDrafter, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Draft tokens for the sequence; none while the draft model still prefills a long prompt."""
        if len(tokens) + max_tokens > self._runner.limits.request_tokens:
            return []
        if (slot := self._taken.get(drafter) or self._take_slot(drafter, tokens)) is None:
            return []
        try:
            return self._draft(slot, tokens, max_tokens)
        except Exception:
            log.exception("the draft model failed; its KV is cleared")
            self._empty(slot)
            return []

    def _take_slot(self, drafter: ModelDrafter, tokens: Sequence[int]) -> _Slot | None:
        taken = set(self._taken.values())
        tenant = drafter.tenant

        def usable(slot: _Slot) -> int:
            return _common(slot.held, tokens, 0) if tenant is not None and slot.tenant == tenant else 0

        slot = max((slot for slot in self._slots if slot not in taken), key=usable, default=None)
        if slot is None:
            return None
        if not usable(slot):
            self._empty(slot)
        self._taken[drafter], slot.tenant, slot.settled = slot, tenant, 0
        return slot

    def _draft(self, slot: _Slot, tokens: Sequence[int], max_tokens: int) -> list[int]:
        # The last token is always computed: its output is the first draft token.
        common = min(_common(slot.held, tokens, slot.settled), len(tokens) - 1)
        if common < len(slot.held):
            common = self._runner.truncate(slot.number, common)
            del slot.held[common:]
        slot.settled = common
        pending = list(tokens[common : common + self._runner.limits.batch_tokens])
        wanted = common + len(pending) == len(tokens)
        drafts: list[int] = []
        while pending and len(drafts) < max_tokens:
            row = Row(slot.number, len(slot.held), pending, int(wanted), self._sampler)
            result = self._runner.run(Batch((row,)))
            if result.status is not StepStatus.DONE:
                self._empty(slot)
                return drafts
            slot.held += pending
            pending = list(result.rows[0].tokens)
            drafts += pending
        return drafts

    def _empty(self, slot: _Slot) -> None:
        slot.held, slot.settled = [], 0
        self._runner.truncate(slot.number, 0)


class ModelDrafter:
    """The drafter of one sequence, backed by the shared draft model."""

    def __init__(self, model: DraftModel, tenant: str | None = "") -> None:
        """It starts from what sequences of the same tenant have left; with None, from nothing."""
        self._model = model
        self.tenant = tenant

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        return self._model.propose(self, tokens, max_tokens)


def _common(held: Sequence[int], tokens: Sequence[int], begin: int) -> int:
    """The length of the common prefix; the first `begin` tokens are known to agree."""
    end = min(len(held), len(tokens))
    while begin < end and held[begin] == tokens[begin]:
        begin += 1
    return begin

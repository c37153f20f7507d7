"""The model runner's interface: `submit(batch)`, then `collect() -> StepResult`.

Sampling happens inside the runner: token masks go in, several accepted tokens per row come out, logits never
do. The engine core knows nothing of llama.cpp and a runner knows nothing of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cllm.adapters import Adapter
from cllm.errors import NotSupported
from cllm.types import Limits, ModelInfo, SamplingParams, TokenLogprob, TokenMask, Vocabulary

SCORED_LOGITS = 1 << 22  # of the prompt tokens that are scored in one step: 16 MiB
KVState = bytes | memoryview
"""The KV memory of one sequence, saved."""


class BatchKind(StrEnum):
    GENERATE = "generate"
    EMBED = "embed"
    MEDIA = "media"


TokenRows = Callable[[Sequence[int]], npt.NDArray[np.float32]]  # what a model's input has for tokens


class MediaRows(NamedTuple):
    """Rows of embeddings that stand for consecutive parts of pictures and sounds, and for text beside them.

    Unless `causal` they are all of one picture: each attends to all of them.
    """

    rows: npt.NDArray[np.float32]  # one each, as wide as the model's input
    places: npt.NDArray[np.int64] | None = None  # as `Prompt.places` has them; None beside tokens
    causal: bool = True


class Sampler(Protocol):
    """Samples the tokens of one sequence and keeps their history. Owned: close it exactly once."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Add tokens to the history that penalties look back on (the prompt, usually)."""

    def skip(self, token: int) -> None:
        """Go on as if it had sampled this token: with its history, and with what was drawn for it."""

    def close(self) -> None:
        """Free it. Called on the owner thread; further use is a bug."""


class Drafter(Protocol):
    """Proposes draft tokens for one sequence."""

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """At most `max_tokens` draft tokens to follow `tokens`, which only ever grow between two calls."""


class Row(NamedTuple):
    """One sequence's part of a step: `tokens` go to positions `position`, `position + 1`, …

    The last `outputs` tokens yield output: 0 in mid-prompt, 1 when a token is wanted, more for speculative
    decoding. Then the tokens after the first output are drafts to be verified.

    `scored` are the tokens that follow as many tokens directly before the outputs: their log-probabilities
    are wanted, with `scored_top` alternatives each.

    With `media` its rows are computed in place of the tokens, which are then pseudo ids.
    """

    seq_id: int
    position: int
    tokens: Sequence[int]
    outputs: int
    sampler: Sampler | None
    mask: TokenMask | None = None
    logprobs: int = 0
    scored: Sequence[int] = ()
    scored_top: int = 0
    media: MediaRows | None = None


class Batch(NamedTuple):
    """The rows of one step, in ascending order of seq_id, one row per id.

    In an EMBED batch ids mean nothing beyond the step, and rows with `outputs` yield an embedding. A row
    starts at position 0 and is whole; or it is a chunk of a long input, alone in its batch, and its memory
    stays until the chunk that wants output. Whatever else is in that memory when a step ends is cleared.

    In a MEDIA batch every row has media, and one that is not causal is alone.

    `padding` has tokens by id that are discarded: after those of a row, so that rows are equally long, or of
    a slot between the rows that is empty or takes no part, so that the ids have no gaps. It holds afterwards
    what it would hold without, whatever the outcome of the step.

    `adapter` is the key of the set of adapters that all rows are computed with; changing it takes time.
    """

    rows: tuple[Row, ...]
    kind: BatchKind = BatchKind.GENERATE
    padding: Mapping[int, int] = {}
    adapter: str = ""

    @property
    def token_count(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class StepStatus(Enum):
    """The outcome of a step, by the return code of `llama_decode`."""

    DONE = 0  # every row was computed
    NO_ROOM = 1  # no KV cells for this batch; memory is as before
    ABORTED = 2  # stopped in the middle; memory may hold part of the step
    BAD_BATCH = -1  # refused; memory is as before
    FAILED = -2  # any other code: memory may hold part of the step

    @classmethod
    def _missing_(cls, value: object) -> StepStatus:
        return cls.FAILED


class RowResult(NamedTuple):
    """The tokens accepted for a row, oldest first; empty when it wanted no output."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None  # no token could be sampled for this row; its memory is as computed
    scored: tuple[TokenLogprob, ...] = ()  # one for each of `Row.scored`
    embedding: bytes = b""  # float32, of an EMBED row
    sample_s: float = 0.0  # its part of the step's `sample_s`, but for what was scored


class StepResult(NamedTuple):
    """`rows` matches `Batch.rows` when `status` is DONE and is empty otherwise."""

    status: StepStatus
    rows: tuple[RowResult, ...] = ()
    code: int = 0
    ubatches: int = 0
    compute_s: float = 0.0  # inside the native decode
    sample_s: float = 0.0  # sampling
    period_s: float = 0.0  # since the result before, where no idle time lies between: the host's part, too


RECORDED_AFTER = 3  # plain steps: CUDA repeats one from its recording when it has seen two that are alike


class DraftCost(NamedTuple):
    """Cost of drafts in decode steps of one row, in plain ones: of verifying at all, and of each token.

    It is that of a step between others with drafts.
    """

    verify: float = 0.75  # as of one kind of CPU, where it is not measured
    token: float = 0.2
    begin: float = 0.0  # on a GPU: what the first step of a run of drafts and those after it take longer
    head: float = 0.0  # of the model's head, for each token that it drafts


class ModelRunner(Protocol):
    """A model and its KV memory. The owner thread's, but for what says that it may be called from any."""

    info: ModelInfo
    limits: Limits
    vocabulary: Vocabulary
    draft_cost: DraftCost = DraftCost()  # as measured at load
    stream_copy_s: float | None = None  # to copy a slot's KV stream on a device; None if it was not measured
    asynchronous: bool = False  # `submit` returns before the device is done
    encoding: bool = False  # pictures are encoded meanwhile: on a CPU, cores are left to that
    adapters: Mapping[str, int] = {}  # bytes of the loaded adapters, by digest
    media_width: int = 0  # elements of a media row
    token_rows: TokenRows | None = None  # None: text beside media takes a step of its own
    has_head: bool = False  # a layer of the model's that drafts (MTP): see `draft`
    draft_gaps: int = 0  # how often that lacked KV or a hidden row of a sequence

    def submit(self, batch: Batch) -> None:
        """Start computing a batch. On a GPU this returns before the device is done, on a CPU after.

        One batch at a time: `collect` comes before the next `submit`. Positions count its tokens from here
        on. Raises nothing a status can say.
        """

    def collect(self) -> StepResult:
        """Wait for the submitted batch, sample where asked, and return the outcome."""

    def run(self, batch: Batch) -> StepResult:
        """Submit a batch and collect its result at once."""
        self.submit(batch)
        return self.collect()

    def interrupt(self, stop: bool) -> None:
        """From any thread: end the running step early, ABORTED (True), or let steps run again (False).

        A runner that cannot stop in the middle of a step ignores it.
        """
        return

    def create_sampler(self, params: SamplingParams) -> Sampler:
        """A new sampler. From any thread, as its first `accept`: what looks back may take long to build."""

    def next_position(self, seq_id: int) -> int:
        """Position of the sequence's next token: the highest one in memory plus one, 0 if empty."""

    def min_length(self, seq_id: int) -> int:
        """The shortest prefix, other than none, that the sequence can be cut to without a checkpoint."""
        return 0

    def checkpoint(self, seq_id: int) -> KVState | None:
        """Save what cutting back to this length will take: recurrent states, cells of a sliding window.

        It is good for as long as the sequence keeps its other cells up to here, in whatever slot.
        """
        return None

    def truncate(self, seq_id: int, length: int, checkpoint: KVState | None = None) -> int:
        """Cut the sequence to its first `length` tokens; returns what usably remains.

        That is `length`, or 0 where the memory cannot be cut there (recurrent models, a sliding window
        already moved on) and no checkpoint of this very length is given: then the sequence has been removed
        whole and must be recomputed.
        """

    def settle(self, seq_id: int) -> bool:
        """Make a sequence that was cut safe to leave alone in later steps. False if it is lost."""
        return True

    def copy(self, source: int, target: int, length: int) -> int:
        """Give the empty `target` the first `length` tokens of `source`; returns what it usably holds.

        That is `length`, or 0 where the memory cannot be cut there: then `target` is still empty.
        """

    def save(self, seq_id: int) -> KVState | None:
        """The sequence's memory as bytes, or None where that is not possible."""

    def state_bytes(self, seq_id: int) -> int:
        """Size of what `save` would return, in bytes."""
        return 0

    def restore(self, seq_id: int, state: KVState) -> bool:
        """Put saved memory into an empty sequence; False (and still empty) if it does not fit."""

    def memory_bytes(self) -> dict[str, int]:
        """Allocated bytes by part: model, kv, buffers."""
        return {}

    def state_fingerprint(self) -> str:
        """Fingerprint of saved memory: that of another model, build or layout must not be restored."""
        return ""

    def open_embedding(self) -> None:
        """Allocate what EMBED batches need, from any thread; idempotent. Raises CllmError where it cannot."""

    def reset_embedding(self) -> None:
        """Drop an input of which only the first chunks were computed."""

    def check_adapter(self, adapter: Adapter) -> Adapter:
        """Read the file of an adapter, from any thread, and return it with its digest.

        Raises AdapterRefused for what is no adapter of this model, or not the file that the digest is of.
        """
        raise NotSupported("this runner has no adapters")

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter that was checked, unless its digest is loaded. Raises AdapterRefused."""

    def unload_adapter(self, digest: str) -> None:
        """Free an adapter that no sequence needs; one that is not loaded is left alone."""

    def create_drafter(self, tenant: str | None) -> Drafter | None:
        """A drafter backed by a draft model, for one sequence; None where there is no draft model.

        It uses no KV of another tenant's sequences; with None, that of no other sequence.
        """
        return None

    def draft(self, newest: Mapping[int, int], length: int) -> dict[int, list[int]]:
        """Drafts of this length by the model's head, to follow the newest token of each id, its next item.

        None of an id whose head lacks KV.
        """
        return {}

    def close(self) -> None:
        """Free everything native. Idempotent."""


def count_ubatches(rows: Iterable[Row], ubatch_tokens: int, *, unified: bool) -> int:
    """Count the physical batches (ubatches) that llama.cpp splits these rows into.

    Unified KV: by size alone. Split KV: a ubatch takes a run of consecutive ids and the same number of
    tokens of each, so gaps between ids and rows of unequal length cost extra.
    """
    left: Counter[int] = Counter()
    for row in rows:
        left[row.seq_id] += len(row.tokens)
    if unified:
        return -(-sum(left.values()) // ubatch_tokens)
    if set(left.values()) == {1} and max(left) - min(left) + 1 == len(left) <= ubatch_tokens:
        return 1  # decode only, and no id is missing
    count = 0
    while left:
        first = min(left)
        run = [first]
        while run[-1] + 1 in left and len(run) < ubatch_tokens:
            run.append(run[-1] + 1)
        take = min(min(left[i] for i in run), max(1, ubatch_tokens // len(run)))
        for seq_id in run:
            left[seq_id] -= take
            if not left[seq_id]:
                del left[seq_id]
        count += 1
    return count

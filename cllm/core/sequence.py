"""One request in the engine: its tokens, how many of them are computed, and the slot it holds."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cllm.backend.base import KVState, MediaRows, ModelRunner, Row, TokenRows
from cllm.core.drafts import DraftState, common_length
from cllm.core.kv_cache.disk_cache import Loading
from cllm.core.kv_cache.prefix_index import Checkpoint, Match
from cllm.core.kv_cache.tiers import Entry
from cllm.core.preparation import RequestParts
from cllm.core.slot_pool import CellSegment, SlotLease
from cllm.core.step_cost import TILE
from cllm.core.stopping import Stopping
from cllm.errors import EngineError, InvalidRequest
from cllm.types import Request, Span, TokenLogprob, TokenMask, Usage, Vocabulary

Rows = npt.NDArray[np.float32]


class Sequence:
    """A request's tokens catching up with the model: there is no prefill mode and no decode mode.

    `tokens` is the prompt and what was generated; the first `num_computed` of them are in KV memory, in the
    slot of the lease. The rest is pending. A token is wanted whenever nothing would stay pending.
    """

    def __init__(self, request: Request, capacity: int, arrival: int = 0) -> None:
        self.request = request
        self._media: dict[str, Rows] = {}  # rows of its pictures and sounds
        self._token_rows: TokenRows | None = None
        self.id = request.id
        self.arrival = arrival  # its number: a lower one came before
        self.tokens: list[int] = [*request.prompt.items, *request.generated_prefix]
        self.known = len(self.tokens)  # when it came
        self.num_computed = 0
        self.segments = [CellSegment(0)]  # of its cells, in order; what it computes next is in the last
        self.preempted = False  # it ran, and waits for cells to go on
        self.lease: SlotLease | None = None
        self.stopping = Stopping(request, self.tokens, capacity)
        self.preparing: Future[RequestParts] | None = None  # done before it may start
        self.loading: Loading | None = None  # its prefix is being read from disk
        self.loaded: Match[Entry] | None = None  # what was read
        self.load_by: float | None = None  # when to compute it instead
        self.swapped: KVState | None = None  # KV memory while preempted
        self.cached_tokens = 0  # taken from the prefix cache instead of being computed
        self.cached_from = ""  # the tier they were in
        self.checkpoints: list[Checkpoint] = []  # shortest first, all within what is computed
        self.stops: list[int] = []  # lengths at which a checkpoint is wanted, the next first
        self.drafts: DraftState | None = None
        self.prompt_logprobs: list[TokenLogprob] = []  # not yet reported
        self.unscored = 0  # tokens of the prompt that still want theirs
        if request.prompt_logprobs and not request.generated_prefix:
            self.score([TokenLogprob(request.prompt.items[0], 0.0)], len(request.prompt))
        self.mask_s = 0.0  # its last token mask
        self.sample_s = 0.0  # its last step beside the model: mask, sampler, log-probabilities
        self.deferred = 0  # steps in a row that it took no part in because of that
        self.decoded_tokens = self.steps = self.ubatches = 0

    @property
    def seq_id(self) -> int:
        assert self.lease is not None, "a seq_id exists only inside a lease"
        return self.lease.seq_id

    @property
    def position(self) -> int:
        """Where its next item goes."""
        prompt = self.request.prompt
        return prompt.position(self.num_computed) if prompt.spans else self.num_computed

    @property
    def next_position(self) -> int:
        """The next position that the KV memory has to report."""
        prompt = self.request.prompt
        return prompt.next_position(self.num_computed) if prompt.spans else self.num_computed

    @property
    def spans(self) -> Tokens[Span]:
        """Pictures and sounds that are not computed yet, or not whole."""
        return [span for span in self.request.prompt.spans if span.end > self.num_computed]

    @property
    def media_end(self) -> int:
        """Where a step of media rows ends at most that begins at its next item; 0 before text.

        Less than a tile of text beside a causal picture goes with it where the runner can: a step less.
        """
        prompt, begin, end = self.request.prompt, self.num_computed, 0
        if not prompt.spans or begin >= prompt.spans[-1].end:
            return 0
        for span in self.spans:
            beside = TILE if span.causal and self._token_rows is not None else 0
            if span.begin - max(begin, end) > beside or (end and not span.causal):
                return end
            end = span.end
        left = len(prompt) - end
        return end + left if left < beside and not self.stopping.masks else end

    def check_media(self, runner: ModelRunner) -> None:
        """Read its rows. Raise unless they can be computed in steps of this runner."""
        request, width, batch_tokens = self.request, runner.media_width, runner.limits.batch_tokens
        row_bytes = width * np.dtype(np.float32).itemsize
        self._token_rows = runner.token_rows if not request.prompt.adapter else None
        for span in request.prompt.spans:
            count, rows = span.end - span.begin, request.media.get(span.media)
            if rows is None or len(rows) != count * row_bytes:
                raise EngineError("the rows of a picture or sound are missing, or of another model")
            if not span.causal and count > batch_tokens:
                raise InvalidRequest(
                    f"a picture of this model is computed whole: it has {count} rows, and a step at most "
                    f"{batch_tokens}; start the server with --batch-tokens {count}"
                )
            if span.end == len(request.prompt):
                raise InvalidRequest("the prompt ends with a picture or sound; let text follow it")
            self._media[span.media] = np.frombuffer(rows, np.float32).reshape(count, width)
        if request.prompt.spans and request.prompt_logprobs:
            raise InvalidRequest("a prompt with pictures or sound has no log-probabilities", "logprobs")

    def truncate(self, runner: ModelRunner, length: int) -> None:
        """Cut its KV to the first `length` items, or before the picture or sound that this would cut.

        To none where the memory cannot be cut there.
        """
        length = self.request.prompt.floor(length)
        position = self.request.prompt.next_position(length)
        self.cut_to(length if runner.truncate(self.seq_id, position) == position else 0)

    @property
    def adapter(self) -> str:
        """Key of the set of adapters that its next tokens are computed with."""
        prompt = self.request.prompt
        return prompt.adapter if self.num_computed >= prompt.adapter_from else ""

    @property
    def keyed(self) -> Tokens[int]:
        """Its tokens as the prefix cache has them."""
        return self.request.prompt.keyed(self.tokens)

    @property
    def pending(self) -> int:
        """How many tokens are known but not computed; at least 1 while running."""
        return len(self.tokens) - self.num_computed

    @property
    def startable(self) -> bool:
        """Whether what it waits for, if anything, is prepared (or refused)."""
        prepared = self.preparing is None or self.preparing.done()
        return prepared and (self.loading is None or not self.loading.left_s)

    @property
    def computable(self) -> int:
        """How many pending tokens may go into one step: none beyond a checkpoint or a border."""
        prompt, end = self.request.prompt, len(self.tokens)
        if prompt.spans or prompt.adapter_from or self.stops:
            media = [self.media_end or span.begin for span in self.spans]
            borders = (*media, prompt.adapter_from, *self.stops[:1], end)
            end = min(border for border in borders if border > self.num_computed)
        return end - self.num_computed

    def score(self, entries: Tokens[TokenLogprob], unscored: int) -> None:
        """Add log-probabilities of the next tokens of its prompt, where `unscored` of them want theirs."""
        self.prompt_logprobs += entries[:unscored]
        self.unscored = unscored - len(entries[:unscored])

    def _scored(self, end: int) -> Tokens[int]:
        """The tokens that follow those computed next, up to `end`, where they are to be scored."""
        if not self.unscored:
            return ()
        prompt = self.request.prompt.items
        scored = prompt[max(self.num_computed + 1, len(prompt) - self.unscored) : end + 1]
        # What follows the last is unknown: it stands for itself where no token is sampled there.
        return (*scored, prompt[-1]) if end == len(prompt) and not self.request.max_tokens else scored

    def cut_to(self, length: int) -> None:
        """Its KV has been cut; what it computes next goes to cells that no other sequence has."""
        self.num_computed = length
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.length <= length]
        self.segments = [segment for segment in self.segments if segment.begin < length]
        if not self.segments or self.segments[-1].shared:
            self.segments.append(CellSegment(length))

    def row(self, count: int, drafts: Tokens[int] = (), mask: TokenMask | None = None) -> Row:
        """Its part of a step: the next `count` pending tokens, and what is wanted after the last of them.

        `drafts` follow them, to be verified: only where a token is wanted.
        """
        begin, request, lease = self.num_computed, self.request, self.lease
        assert lease is not None, "a seq_id exists only inside a lease"
        end = begin + count
        wants_output = end == len(self.tokens) and request.max_tokens > 0
        assert wants_output or not drafts
        tokens = self.tokens[begin:end]
        media = self._media_rows(begin, end) if self.media_end else None
        return Row(
            lease.seq_id,
            self.position,
            [*tokens, *drafts] if drafts else tokens,
            wants_output + len(drafts),
            self.stopping.sampler,
            mask,
            request.logprobs,
            self._scored(end) if self.unscored else (),
            request.prompt_logprobs,
            media,
        )

    def _media_rows(self, begin: int, end: int) -> MediaRows:
        """Rows of its items from `begin` to `end`: of pictures, and of text beside them."""
        prompt, rows, places = self.request.prompt, [], []
        borders = {border for span in self.spans for border in (span.begin, span.end) if begin < border < end}
        for first, last in pairwise(sorted({begin, end} | borders)):
            if (span := prompt.span_at(first)) is not None:
                rows.append(self._media[span.media][first - span.begin : last - span.begin])
            elif self._token_rows is not None:
                rows.append(self._token_rows(self.tokens[first:last]))
            places.append(prompt.places(first, last))
        return MediaRows(np.concatenate(rows), np.concatenate(places, axis=1), self.spans[0].causal)

    def resume(self, vocabulary: Vocabulary) -> None:
        """Bring all that follows the answer to the end of what was delivered. Raises CllmError.

        Each token is appended as if it had been sampled again, with those that are then forced.
        """
        request, whole, stopping = self.request, [*self.tokens], self.stopping
        del self.tokens[len(request.prompt) :]
        while len(self.tokens) < len(whole):
            token = whole[len(self.tokens)]
            if stopping.sampler is not None:
                stopping.sampler.skip(token)
            if stopping.append((token,), vocabulary).reason is not None:
                break
        if self.tokens != whole:
            raise EngineError("the answer could not be resumed after a crash of the engine")
        if not request.stop:  # else that has been done
            stopping.detokenize(request.generated_prefix, vocabulary)

    @property
    def continues(self) -> bool:
        """After its next token, unless that is an end, it wants one more, and nothing else is to be done."""
        more = len(self.tokens) + 1 < self.stopping.token_limit
        return self.stopping.plain and more and not self.stops and not self.unscored

    def shared_with(self, keyed: Tokens[int]) -> int:
        """Length of the common prefix, at most all but this one's last token (that must be computed)."""
        limit = max(0, min(len(self.tokens) - 1, len(keyed)))
        return common_length(self.keyed[:limit], keyed)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.tokens) - len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            cached_from=self.cached_from,
            decoded_tokens=self.decoded_tokens,
            steps=self.steps,
            ubatches=self.ubatches,
            cells=self.num_computed,
            drafted_tokens=self.drafts.drafted if self.drafts is not None else 0,
            accepted_tokens=self.drafts.accepted if self.drafts is not None else 0,
            drafter=self.drafts.drafter if self.drafts is not None and self.drafts.drafted else "",
            predicted_tokens=len(self.request.prediction),
        )

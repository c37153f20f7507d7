"""The types every layer shares: requests (`Request`) and what comes back (`RequestOutput`).

All are frozen `msgspec.Struct`s, because they cross the process boundary as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from enum import Enum, StrEnum
from typing import Annotated, Literal, Protocol, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from cllm.adapters import make_salt
from cllm.errors import CllmError, ContextLengthExceeded, from_code
from cllm.limits import MAX_BIASED_TOKENS, MAX_BIASES

MAX_INT32 = 2**31 - 1
SEED_SPACE = 2**32 - 1  # llama.cpp draws a random seed when given 2**32 - 1
TokenMask = npt.NDArray[np.bool_]
"""Over the vocabulary; True where a token is allowed."""


class Health(Enum):
    """Of an engine, as its clients see it."""

    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"  # not loaded until the next request
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a request left the engine; every accepted request gets exactly one."""

    STOP = "stop"  # an end-of-generation token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the client went away or asked for it
    ERROR = "error"  # see RequestOutput.error


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is sampled. Defaults are llama.cpp's; bounds and descriptions are those of the API.

    Applied in this order: logit_bias, penalties (repetition, frequency, presence), DRY, top_n_sigma,
    top_k, typical_p, top_p, min_p, XTC, temperature, draw. Mirostat replaces everything between
    temperature and draw, adaptive-p the draw alone. `temperature` 0 is greedy: the most likely token, ties
    to the lowest id.
    """

    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.8
    dynatemp_range: Annotated[float, Meta(ge=0, le=10)] = 0.0
    dynatemp_exponent: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 40
    top_p: Annotated[float, Meta(ge=0, le=1)] = 0.95
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.05
    typical_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] = -1.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    penalty_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT32)] = 64
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.0
    dry_base: Annotated[float, Meta(ge=1, le=100)] = 1.75
    dry_allowed_length: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 2
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT32)] = -1
    dry_sequence_breakers: Annotated[tuple[str, ...], Meta(max_length=8)] = ("\n", ":", '"', "*")
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.1
    mirostat: Annotated[int, Meta(ge=0, le=2)] = 0
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] = 5.0
    mirostat_eta: Annotated[float, Meta(ge=0, le=1)] = 0.1
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] = -1.0
    adaptive_decay: Annotated[float, Meta(ge=0, le=0.99)] = 0.9
    logit_bias: Annotated[
        tuple[tuple[int, Annotated[float, Meta(ge=-100, le=100)]], ...],
        Meta(max_length=MAX_BIASES + MAX_BIASED_TOKENS),
    ] = ()
    ignore_eos: bool = False
    # The caller draws one where there is none, so that a replayed request samples the same.
    seed: Annotated[int, Meta(ge=0)] | None = None

    @property
    def greedy(self) -> bool:
        """True when sampling is the plain argmax of the model's own logits."""
        return self.temperature <= 0 and not (self.mirostat or self.logit_bias or self.looks_back)

    @property
    def looks_back(self) -> bool:
        """True when the tokens so far change the next one's logits."""
        return self.penalises or self.dry_multiplier > 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


GRAMMAR_CACHE_BYTES = 48 << 20  # of compiled grammars, in the engine


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, each as an option of its own."""

    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    logit_bias: Sequence[tuple[int, float]]
    ignore_eos: bool
    seed: int | None


class ConstraintKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # GBNF or Lark
    CHOICE = "choice"  # a JSON list of texts
    TOOLS = "tools"  # a Lark grammar of tool calls

    @property
    def field(self) -> str:
        """The field of a request that carries it; names it in refusals."""
        return "response_format" if self is ConstraintKind.JSON_SCHEMA else self.value


class ReasoningMarks(msgspec.Struct, frozen=True):
    """The texts around reasoning; `inside`: the prompt ends between them."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    inside: bool = False


class ConstraintSpec(msgspec.Struct, frozen=True):
    """The structured output of an answer: a schema, regular expression, grammar or list of choices.

    With `triggers` it applies from right after the first of these texts that is generated, be it as text or
    as a control token; without, to the whole answer. One that `reasoning` speaks of does not count.
    """

    kind: ConstraintKind
    source: str
    triggers: tuple[str, ...] = ()
    reasoning: ReasoningMarks | None = None
    origin: str = ""  # the field of the request that it comes from

    @property
    def field(self) -> str:
        """The field that refusals name."""
        return self.origin or self.kind.field


class ReasoningLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of an answer's reasoning; when it is spent, the closing marker is forced. Token ids."""

    budget: int  # tokens between the markers, in all; 0: reasoning ends at once
    closing: tuple[int, ...]  # the closing marker
    opening: tuple[int, ...] = ()  # the opening marker; empty: reasoning begins in the prompt only
    inside: bool = False  # the prompt ends inside the reasoning


class Pooling(StrEnum):
    """How the states of an input's tokens become one embedding."""

    MEAN = "mean"
    CLS = "cls"  # the first token's
    LAST = "last"  # the last token's
    RANK = "rank"  # a reranker: its head turns them into a score
    NONE = "none"  # not at all: an embedding for each token


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Items of a prompt that stand for one picture or sound: KV is not cut inside of them."""

    begin: int
    end: int
    positions: int  # that they take up together; fewer than items where several share one
    media: str  # digest of what they stand for
    columns: int = 0  # of a picture with M-RoPE, all of whose rows are at its first position; 0: it has none
    causal: bool = True  # a row attends to those before it only, so that the rows may be computed in chunks


def make_pseudo_ids(media: str, count: int) -> tuple[int, ...]:
    """Items for `count` rows of a picture or sound: negative, and with high probability of it alone."""
    numbers = np.frombuffer(hashlib.shake_128(media.encode()).digest(4 * count), "<u4") & MAX_INT32
    return tuple((-1 - numbers.astype(np.int64)).tolist())


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is computed before an answer. An item is a token id, or the pseudo id (negative) of a media row.

    The index of an item is not its position: that is what `position` says. KV is cached under a `key`.
    """

    items: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()  # in order; all items beside them are text
    adapter: str = ""  # key of the set of adapters it is computed with; empty for the model as it is
    adapter_from: int = 0  # the item from which on it is, of an aLoRA

    def __len__(self) -> int:
        return len(self.items)

    @property
    def text(self) -> tuple[int, ...]:
        """Its tokens, without the items of media."""
        return tuple(item for item in self.items if item >= 0) if self.spans else self.items

    def span_at(self, index: int) -> Span | None:
        """The span that an item belongs to."""
        return next((span for span in self.spans if span.begin <= index < span.end), None)

    def position(self, length: int) -> int:
        """Where the next item goes after the first `length`; an answer goes on as text."""
        if not self.spans:
            return length
        ended = (span for span in self.spans if span.end <= length)
        position = length - sum(span.end - span.begin - span.positions for span in ended)
        inside = self.span_at(length)
        return position if inside is None or not inside.columns else position - (length - inside.begin)

    def next_position(self, length: int) -> int:
        """What the KV memory has as its next position after the first `length` items.

        That is one beyond the last item's: `position`, but for a picture with M-RoPE.
        """
        last = self.span_at(length - 1)
        return self.position(length) if last is None or not last.columns else self.position(last.begin) + 1

    def places(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Positions of items of one span, or of text: their time, row, column, and one that is not used.

        The rows of a picture with M-RoPE are all at one time.
        """
        span, position, items = self.span_at(begin), self.position(begin), np.arange(begin, end)
        time = down = across = position + items - begin
        if span is not None and span.columns:
            down, across = position + np.stack(np.divmod(items - span.begin, span.columns))
            time = np.full_like(down, position)
        return np.stack((time, down, across, np.zeros_like(time)))

    def floor(self, length: int, cached: Collection[Span] | None = None) -> int:
        """The longest prefix of at most `length` items that cuts no span.

        With `cached`, the spans of equal items in KV, nor has it other media than those: ids may collide.
        """
        for span in self.spans:
            if span.begin < length and (span.end > length or (cached is not None and span not in cached)):
                return span.begin
        return length

    def key(self, tenant: str) -> str:
        """What keeps its KV apart from that of others with the same items."""
        return f"{tenant}\0{self.adapter}" if self.adapter and not self.adapter_from else tenant

    def keyed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Its items and the answer as the prefix cache has them under the `key`.

        An aLoRA's key is the base's, whose prefix it shares. What it computes itself is salted.
        """
        if not self.adapter_from:
            return tokens
        salt = make_salt(self.adapter)
        return [token if at < self.adapter_from else token ^ salt for at, token in enumerate(tokens)]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, or one call for embeddings; tokenised and validated. Nothing in it refers to HTTP."""

    id: str
    prompt: Prompt = Prompt()
    generated_prefix: tuple[int, ...] = ()  # of the answer: delivered before by an engine that died
    max_tokens: int  # 0: only the prompt is computed
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    logprobs: int = 0  # how many alternatives to report per token; 0 = none
    prompt_logprobs: int = 0  # the same for the tokens of the prompt; then no prefix is reused
    constraint: ConstraintSpec | None = None
    reasoning: ReasoningLimit | None = None
    min_tokens: int = 0  # tokens before an end token or one of `stop_token_ids` may come
    stop_token_ids: tuple[int, ...] = ()  # end the answer, as end tokens do
    prediction: tuple[int, ...] = ()  # what the answer is expected to be, as draft tokens
    markers: tuple[str, ...] = ()  # control tokens whose spelling is part of the answer's text
    timeout_s: float | None = None  # from acceptance to the last token
    priority: int = 0  # higher goes first
    tenant: str = ""  # shares are fair between tenants; prefixes are not shared across them
    backlogged: bool = False  # beside other tenants', more of its tenant's waited for a slot when it was sent
    streamed: bool = True  # the answer is read as it is written, so the inter-token target holds
    speculate: bool = True  # allow speculative decoding; the text is the same either way
    adapter: str = ""  # key of the adapters that its prompt is to be computed with
    reuse: bool = True  # use the prefix cache: match from it and store to it
    embed: tuple[tuple[int, ...], ...] = ()  # inputs to embed; then nothing is generated
    media: dict[str, bytes] = {}  # rows of the prompt's spans by their digests, as 32-bit floats

    @property
    def input_tokens(self) -> int:
        """The tokens of the prompt or of all inputs."""
        return len(self.prompt) + sum(map(len, self.embed))


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may ask for. 0 means no limit; the defaults limit nothing."""

    name: str = ""  # empty: the one tenant of a server without keys
    role: Literal["user", "admin"] = "user"
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # its share when several tenants want the machine
    requests_per_s: Annotated[float, Meta(ge=0)] = 0.0
    tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0  # prompt and generated together
    concurrent: Annotated[int, Meta(ge=0)] = 0  # waiting and running together
    # Up to this its requests go before other tenants'; None orders its own requests alone by their priority.
    max_priority: Annotated[int, Meta(ge=-100, le=100)] | None = None

    @property
    def admin(self) -> bool:
        return self.role == "admin"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a token under the model's own distribution (before any sampler)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens, best first
    pieces: tuple[bytes, ...] = ()  # of the token, then of each in `top`; filled in by the scheduler


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost. The work counters must not depend on how many requests came before."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cached_from: str = ""  # where they were: "device", "ram" or "disk"; "+checkpoint" where one was put back
    decoded_tokens: int = 0  # tokens that went through the model for it
    steps: int = 0  # native decode calls it took part in
    ubatches: int = 0  # physical batches these calls were cut into
    cells: int = 0  # KV cells it held at its end
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were accepted
    drafter: str = ""  # that proposed them: "ngram", "prediction", "model" or "mtp"
    predicted_tokens: int = 0  # of the prediction that the request came with


class Failure(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """An error on its way between processes; `code` names a class of `cllm.errors`."""

    code: str
    message: str
    field: str | None = None  # of the request
    counts: tuple[int, ...] = ()  # of a prompt that is too long: its tokens, and the limit

    @classmethod
    def of(cls, error: CllmError) -> Failure:
        counts = (error.prompt_tokens, error.limit) if isinstance(error, ContextLengthExceeded) else ()
        return cls(error.code, error.message, getattr(error, "field", None), counts)

    def error(self) -> CllmError:
        return from_code(self.code, self.message, self.field, self.counts)


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one request. The one with a `finish_reason` is its last."""

    request_id: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the whole prompt, once; its first token has none: 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None  # set on the last
    usage_so_far: Usage | None = None  # on the first and after drafts: lost otherwise if the engine dies
    error: Failure | None = None  # set when finish_reason is error
    stop: str | None = None  # the stop string that ended it, if one did
    embeddings: tuple[bytes, ...] = ()  # float32, one for each input in its order; on the last


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model; shown at /model/info."""

    name: str
    architecture: str
    description: str
    parameters: int
    size_bytes: int
    vocabulary_size: int
    context_train: int
    embedding_length: int
    layers: int
    chat_template: str | None = None
    tool_template: str | None = None  # the one for conversations with tools, where there are two
    recurrent: bool = False
    sliding_window: int = 0
    generates: bool = True  # False for encoders, which only embed
    pooling: Pooling = Pooling.MEAN
    vector_length: int = 0  # floats of an embedding; of a reranker, scores of a pair
    file: str = ""  # its name, without the folder
    begin_text: str = ""  # how its first and its last token are written; see `Vocabulary`
    end_text: str = ""
    sees: bool = False  # it takes pictures: it has an mmproj for them
    hears: bool = False


class EmbedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one embedding step. Its memory is apart from the KV cells of generation."""

    tokens: int = 0  # of one input
    batch_tokens: int = 0  # of several inputs together, or of a chunk of one
    rows: int = 1  # inputs of a step
    chunked: bool = False  # a long input may be computed over several steps (causal attention only)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a loaded runner, as its context has them."""

    sequences: int  # slots: ids 0 .. sequences - 1
    parallel: int = 0  # sequences that run at a time; 0: as many as there are slots
    cells: int  # KV cells in all
    sequence_cells: int  # of one sequence
    request_tokens: int  # of one request, prompt and answer
    batch_tokens: int  # of one forward
    rollback_tokens: int = 0  # of the last step, that memory which cannot be cut takes back
    unified: bool = False  # one pool of KV cells, or one KV stream per sequence
    target_itl_ms: int = 0  # inter-token latency that prefill keeps; 0: not known
    max_itl_ms: int = 0  # its limit where keeping the target would cost too much throughput
    embed: EmbedLimits = EmbedLimits()

    @property
    def max_running(self) -> int:
        """Number of sequences that run at a time."""
        return self.parallel or self.sequences


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, as /debug/kv shows it."""

    seq_id: int
    request_id: str
    tokens: int  # known tokens, prompt and answer
    position: int  # where the next token goes, read from the KV memory itself
    state: str
    age_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: not computed, but taken from the prefix cache


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine between two steps."""

    number: int = 0  # of this snapshot, since the engine started
    sequences_total: int
    cells_total: int
    cells_used: int  # of running requests
    cells_cached: int  # beside those: what free slots keep
    slots_cached: int  # slots that keep something
    leases: tuple[SlotInfo, ...]
    waiting: tuple[str, ...]
    cached: dict[int, int] = {}  # tokens that free slots keep, by slot
    preempted: tuple[SlotInfo, ...] = ()  # these hold no slot: seq_id is -1
    leased_total: int
    released_total: int
    cleared_cells_total: int
    integrity_failures: int = 0


class InfillTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The control tokens of a model that fills in the middle of a text."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None  # before the name of a project
    separator: int | None = None  # before the name of a file
    begin: int | None = None  # what every text of this model begins with


class TokenBound(msgspec.Struct, frozen=True):
    """A lower bound on the tokens of a text, by its bytes alone: no token stands for more than `longest`.

    Only for vocabularies that keep a text as it is; without one (`longest` 0) any text may have no tokens.
    """

    longest: int = 0  # bytes of the longest token
    dropped: bytes = b""  # bytes that no token stands for; the tokenizer leaves them out

    def min_tokens(self, *texts: str) -> int:
        """The fewest tokens that these texts can have together."""
        if not self.longest:
            return 0
        return -(-sum(map(self._count_bytes, texts)) // self.longest)

    def _count_bytes(self, text: str) -> int:
        if text.isascii() and not any(chr(byte) in text for byte in self.dropped if byte < 0x80):
            return len(text)  # without a copy of it
        return len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped))


class HasBound(Protocol):
    """A vocabulary, or the client of one in another process."""

    @property
    def bound(self) -> TokenBound: ...


class Vocabulary(HasBound, Protocol):
    """Token look-ups. Read-only and safe from any thread."""

    @property
    def size(self) -> int: ...

    @property
    def special_texts(self) -> frozenset[str]:
        """Spellings of control tokens: never parsed out of a user's text."""

    @property
    def begin_text(self) -> str:
        """The spelling of the token a text begins with; empty where there is none."""

    @property
    def end_text(self) -> str:
        """The spelling of the token a text ends with; empty where there is none."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokens of `text`; what the vocabulary has tokens for is kept. Never adds a second BOS."""

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        """A query and a document as a reranker reads them; nothing in either is a control token."""

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; empty for control tokens."""

    def spelling(self, token: int) -> str:
        """How a token is written in a prompt; that of control tokens, too."""

    def is_control(self, token: int) -> bool:
        """True for tokens that stand for no text of their own."""

    @property
    def ends(self) -> frozenset[int]:
        """Every end-of-generation token."""

    @property
    def infill(self) -> InfillTokens | None:
        """The control tokens of infill; None for a model without them."""

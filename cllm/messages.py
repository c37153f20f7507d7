"""Messages between processes: commands and reports of the engine, tasks and answers of the other workers.

They travel as MessagePack through a socket.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from cllm import types
from cllm.adapters import Adapter
from cllm.errors import ContextLengthExceeded
from cllm.text.prompt import Chat, Gap, PreparedPrompt, PromptInput, RawText, check_length

SlotAction = Literal["save", "restore", "erase"]

# To the engine --------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: types.Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Take a snapshot between two steps; answered with Inspection."""

    call_id: int


class UseSlot(msgspec.Struct, frozen=True, tag=True):
    """Save what a slot holds under a name, restore it to RAM, or forget it; answered with CacheDone."""

    call_id: int
    action: SlotAction
    slot: int
    name: str = ""


class ClearCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached prefix, in all tiers; answered with CacheDone."""

    call_id: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter; answered with AdapterDone. With a digest, only the file that it is of."""

    call_id: int
    adapter: Adapter


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free a LoRA adapter that no request needs; answered with AdapterDone."""

    call_id: int
    adapter: Adapter


class Encoding(msgspec.Struct, frozen=True, tag=True):
    """The media worker begins to encode beside the engine, or has ended."""

    active: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Something that a request waits for is done: look again. The engine sends it to itself."""


Command = (
    Submit | Cancel | Inspect | UseSlot | ClearCache | LoadAdapter | UnloadAdapter | Encoding | Stop | Wake
)

# From the engine ------------------------------------------------------------------------------------


class StepStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work done since the last report, and the engine's state at its end."""

    steps: int = 0
    tokens: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    sample_s: float = 0.0
    transfer_s: float = 0.0  # of KV memory, to RAM and back
    running: int = 0
    leases: int = 0
    cells_used: int = 0
    cells_cached: int = 0  # beside those: what free slots keep
    integrity_failures: int = 0
    interrupted: int = 0  # steps ended early since the start, because a client in them left
    prefix_hits: int = 0  # requests that began with a cached prefix
    prefix_tokens: int = 0  # tokens they did not have to compute
    prefix_saves: int = 0  # states put into RAM
    prefix_evictions: int = 0  # states evicted from it
    disk_loads: int = 0  # states read from disk
    disk_writes: int = 0  # and written to it
    disk_failures: int = 0  # that could not be written
    slot_evictions: int = 0  # cached prefixes evicted from their slots
    prefix_bytes: int = 0
    disk_bytes: int = 0
    swapped_bytes: int = 0
    draft_bytes: int = 0  # of n-gram indexes
    draft_gaps: int = 0  # how often the MTP head lacked something of a sequence
    preemptions: int = 0  # requests preempted because KV was full
    swap_ins: int = 0  # preempted requests that went on from their saved state


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step, for all requests together."""

    outputs: tuple[types.RequestOutput, ...]
    stats: StepStats
    spent: dict[str, float] = {}  # seconds that requests took of steps; where there are several tenants


class Inspection(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    snapshot: types.Snapshot


class CacheDone(msgspec.Struct, frozen=True, tag=True):
    """The result of a UseSlot or a ClearCache."""

    call_id: int
    prefixes: int = 0
    tokens: int = 0
    size: int = 0  # bytes of the file
    failure: types.Failure | None = None


class AdapterDone(msgspec.Struct, frozen=True, tag=True):
    """The result of a LoadAdapter or an UnloadAdapter."""

    call_id: int
    adapter: Adapter  # as it was read
    loaded_bytes: int = 0  # of all adapters
    failure: types.Failure | None = None


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    fraction: float  # 0 to 1


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: types.ModelInfo
    limits: types.Limits
    memory: dict[str, int] = {}  # bytes, by part


class Unready(msgspec.Struct, frozen=True, tag=True):
    """A cluster has no replica now; `Ready` follows when it has. `given_up`: requests wait no longer."""

    message: str
    given_up: bool = False


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of a cluster, as metrics show it."""

    name: str
    ready: bool = False
    requests: int = 0
    slots: int = 0
    cells: int = 0
    cells_used: int = 0
    generated: int = 0  # tokens, since it joined


class ClusterReport(msgspec.Struct, frozen=True, tag=True):
    """The replicas of a cluster, and the number of requests moved between them since the start."""

    replicas: tuple[ReplicaStatus, ...]
    moved: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    step_age_s: float  # how long the running step has run; 0 between steps


class Died(msgspec.Struct, frozen=True, tag=True):
    """A worker ended. It says so itself while it can, else its supervisor does."""

    code: str
    message: str
    signal: int = 0  # the one that ended the process


Report = (
    StepReport | Inspection | CacheDone | AdapterDone | LoadProgress | Ready | Unready | ClusterReport | Died
)

# To the tokenizer. A prompt of more than `max_tokens` tokens is refused there (0: no limit): tokens that are
# refused anyway need not cross to the parent.


class Prepare(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Make the prompts of a request, and all else that its text decides; answered with Prepared."""

    inputs: tuple[PromptInput, ...]
    max_tokens: int = 0
    constraint: types.ConstraintSpec | None = None  # of the answer; refused where it cannot be compiled
    texts: tuple[str, ...] = ()  # tokenised as they are: a prediction, texts with a bias


class TokenizeTexts(msgspec.Struct, frozen=True, tag=True):
    """Texts to embed; answered with TokenLists."""

    texts: tuple[str, ...]
    max_tokens: int = 0
    field: str = "input"  # names them in a refusal


class TokenizePairs(msgspec.Struct, frozen=True, tag=True):
    """A query with each document, as a reranker reads them; answered with TokenLists."""

    query: str
    documents: tuple[str, ...]
    max_tokens: int = 0


class RenderChat(msgspec.Struct, frozen=True, tag=True):
    """A conversation as its template writes it; answered with Text."""

    chat: Chat


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    """Token ids back to text; answered with Text."""

    tokens: tuple[int, ...]


class SpellTokens(msgspec.Struct, frozen=True, tag=True):
    """The bytes of each token, of control tokens their spelling; answered with Pieces."""

    tokens: tuple[int, ...]


class EncodeMedia(msgspec.Struct, frozen=True, tag=True):
    """Turn pictures into items and rows, in the media worker; answered with EncodedMedia."""

    pictures: tuple[str, ...]  # files in base64, or their addresses
    tenant: str = ""  # rows are not shared across tenants
    rows: bool = True  # False counts the items only
    streams: bool = False  # the engine computes answers meanwhile
    forget: bool = False  # cached rows are removed before


TokenizerTask = Prepare | TokenizeTexts | TokenizePairs | RenderChat | Detokenize | SpellTokens | EncodeMedia


def check_task(task: TokenizerTask, vocabulary: types.HasBound) -> None:
    """Refuse a task whose text has too many bytes, before it is tokenised. Raises ContextLengthExceeded.

    Not a conversation: its template may leave text out, so it is checked when it is rendered.
    """
    match task:
        case Prepare(inputs, max_tokens):
            for each in inputs:
                parts: Iterable[object] = ()
                if isinstance(each, RawText):
                    parts = each.pieces
                elif isinstance(each, Gap):
                    parts = [each.prompt]
                    if not each.cut_to:
                        snippets = [snippet.text for snippet in each.snippets or ()]
                        parts = [each.prompt, each.suffix, *snippets, each.prefix]
                check_length(vocabulary, [part for part in parts if isinstance(part, str)], max_tokens)
        case TokenizeTexts() | TokenizePairs():
            query, texts, field = (
                ((task.query,), task.documents, "documents")
                if isinstance(task, TokenizePairs)
                else ((), task.texts, task.field)
            )
            for index, text in enumerate(texts):
                try:
                    check_length(vocabulary, (*query, text), task.max_tokens)
                except ContextLengthExceeded as error:
                    raise ContextLengthExceeded.of_input(
                        index, error.prompt_tokens, task.max_tokens, field, at_least=True
                    ) from None


# From the tokenizer ---------------------------------------------------------------------------------


class TokenizerReady(msgspec.Struct, frozen=True, tag=True):
    """The first report of a tokenizer worker: its vocabulary is loaded."""

    bound: types.TokenBound


class Prepared(msgspec.Struct, frozen=True, tag=True):
    prompts: tuple[PreparedPrompt, ...]
    texts: tuple[tuple[int, ...], ...] = ()


class TokenLists(msgspec.Struct, frozen=True, tag=True):
    lists: tuple[tuple[int, ...], ...]


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class Pieces(msgspec.Struct, frozen=True, tag=True):
    pieces: tuple[bytes, ...]


class EncodedMedia(msgspec.Struct, frozen=True, tag=True):
    """Pictures as parts of a prompt, and the rows of their spans by digest, as 32-bit floats."""

    prompts: tuple[types.Prompt, ...]
    rows: dict[str, bytes] = {}
    encoded: int = 0  # pictures that were not in the cache


TokenizerAnswer = Prepared | TokenLists | Text | Pieces | EncodedMedia | types.Failure


class TokenizerCall(msgspec.Struct, frozen=True):
    """A task on its way to the tokenizer worker."""

    call_id: int
    task: TokenizerTask


class TokenizerReply(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    answer: TokenizerAnswer

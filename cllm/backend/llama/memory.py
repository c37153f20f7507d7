"""Memory fit: one sum over everything that takes memory, before any of it is allocated."""

from __future__ import annotations

import logging
from bisect import bisect_left as bisect
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cllm.adapters import parse_adapter
from cllm.backend.llama.context import CELL_BLOCK, DEFAULT_REQUEST_CELLS, request_share, used_outputs
from cllm.backend.llama.draft_model import draft_config
from cllm.backend.llama.dry_load import HOST, DryLoad, Sizes
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.placement import (
    DEVICE_RESERVE,
    Device,
    Place,
    Placement,
    Placer,
    asked_layers,
    list_devices,
    mib,
)
from cllm.config import GPU_BATCH_TOKENS, EngineConfig, get_cache_ram_mb, settle_itl
from cllm.errors import ConfigError, ModelFileError, NotEnoughMemory
from cllm.process import read_available_memory
from cllm.types import GRAMMAR_CACHE_BYTES, EmbedLimits

log = logging.getLogger(__name__)
_MIB = 1 << 20
RUNTIME = 190 * _MIB  # Python and libraries of the three processes, as measured
MEDIA_RUNTIME = 384 * _MIB  # of the media worker beside the mmproj: Python, the cache of rows, a picture
MEDIA_CONTEXT = 1024 * _MIB  # of a GPU, for its second process: a context of the driver, and a picture
VOCABULARY_BYTES = 1400  # of a token's tables in the engine and in the tokenizer worker, as measured
GRAMMAR_SCRATCH = 16 * _MIB  # while a grammar is compiled, at its largest
GRAMMAR_TABLE_PER_TOKEN = 512  # bytes of the grammar compiler's table of the vocabulary, as measured
DEFAULTS = EngineConfig()
GPU_THREADS = 2  # of the host, with all layers on GPUs
MAX_SHARE = 32768  # cells of a slot that are chosen without being asked for
MAX_PARALLEL = 8
# A coding agent's first message (16,000 tokens) and the answer to it: a second slot must not cost that.
AGENT_SHARE = 20480
MIN_SHARE = 512
HEADS = ("glm4moe", "qwen35", "qwen35moe")  # architectures whose head drafts without being asked for
HEAD_ROLLBACK = 3  # tokens: more drafts of a head seldom all come true, and each takes a state a slot
# Where a model is prepared beside others, by device: bytes it may take, and how many others free before that.
ROOM: dict[str, tuple[int, int]] = {}
MAX_MORE_CPU_LAYERS = 1.25  # times as many on the CPU, which the time of a step follows, for `AGENT_SHARE`


def available_memory() -> int | None:
    """Bytes that are available to this model, or None where the system does not say."""
    available = read_available_memory()
    limit, freed = ROOM.get("host", (1 << 62, 0))
    return None if available is None else min(limit, available + freed)


def list_free_devices() -> list[Device]:
    """The GPUs, with the memory that is left to this model."""
    rooms = [(device, *ROOM.get(device.name, (device.free, 0))) for device in list_devices()]
    return [device._replace(free=min(limit, device.free + freed)) for device, limit, freed in rooms]


def read_adapter_bytes(text: str) -> int:
    """Bytes of an adapter of the settings; 0 where there is no file: its load says what is wrong."""
    path = Path(parse_adapter(text).file)
    return path.stat().st_size if path.is_file() else 0


class EmbeddingMemory(NamedTuple):
    """Memory of the embedding context, bytes. An upper estimate: llama.cpp reports it only afterwards."""

    kv: int
    logits: int  # llama.cpp reserves them for every token
    attention: int

    @classmethod
    def of(cls, header: GgufHeader, limits: EmbedLimits, cell_bytes: int, *, flash: bool) -> EmbeddingMemory:
        """`cell_bytes` of KV are those of a token in the context for generation."""
        widest = limits.batch_tokens if limits.chunked else limits.tokens
        heads = 1 if flash else header.number("attention.head_count", 1)
        return cls(
            kv=cell_bytes * limits.tokens if limits.chunked else 0,
            logits=header.vocabulary * widest * 4 * (2 if limits.chunked else 1),
            attention=heads * widest * limits.tokens * 4,
        )

    def check(self) -> None:
        """Raises NotEnoughMemory with the sum."""
        if (available := available_memory()) is not None and sum(self) > available:
            raise NotEnoughMemory(
                f"not enough memory for embeddings: KV {mib(self.kv)} + logits {mib(self.logits)} "
                f"+ attention {mib(self.attention)}, available {mib(available)}; "
                "try a smaller --embed-tokens"
            )


class MemoryFit:
    """The memory a model needs, part by part, against what is available; and the context that fits.

    Weights, KV cells, recurrent states and compute buffers are allocated at once: in the host's memory, the
    first of the `places`, and in that of each GPU. RAM for saved states, embeddings and grammars is allocated
    on use: where it does not fit, there is less RAM for states, which costs only time. `parallel`, `share`
    (cells of a slot) and the layers on GPUs (`placement`) are as asked for, or else chosen.
    """

    def __init__(
        self,
        header: GgufHeader,
        config: EngineConfig,
        devices: Sequence[Device] = (),
        *,
        dry: DryLoad | None = None,
        scale: float = 1.0,
    ) -> None:
        """`devices` are the GPUs here. `scale` is the size of other weights, relative to those of the file.

        Raises SetupError.
        """
        self._header, self._config, self._scale = header, config, scale
        self.adapters = sum(map(read_adapter_bytes, config.adapter))  # of those from the start
        self._placer = Placer(header, config, devices)
        self.available = available_memory()  # bytes of the host's; None where they are unknown
        self._asked = config.parallel or min(config.slots, MAX_PARALLEL)  # requests at a time; 0 if any
        # The most cells that a slot gets without being asked for.
        tokens = min(config.max_request_tokens or MAX_SHARE, header.context_train)
        self._longest = max(CELL_BLOCK, request_share(tokens, 1))
        with ExitStack() as stack:
            self._dry = dry or stack.enter_context(DryLoad())
            self.parallel, self.share, self.placement = self._choose()
            self.places = self._sum_up(self.parallel, self.share, self.placement)
        self.slots = max(config.slots, self.parallel)
        self.cells = config.ctx_size or self.parallel * self.share  # of the requests; other slots add theirs
        self.on_gpu = self.placement.gpu_layers > 0
        self.model = sum(place.model for place in self.places)
        self.kv = sum(place.kv for place in self.places)
        self.compute = sum(place.compute for place in self.places)
        self.needed = sum(place.needed - place.shared for place in self.places)
        tokens = min(config.embed_tokens or self.share, header.context_train)
        step = min(config.batch_tokens, tokens)
        limits = EmbedLimits(tokens=tokens, batch_tokens=step, chunked=header.generates)
        cell_bytes = self.kv // (self.share * self.slots)
        self.embedding = sum(EmbeddingMemory.of(header, limits, cell_bytes, flash=True))
        # A compiler each in the engine and in the tokenizer worker, which keeps no grammars.
        compiling = 2 * (header.vocabulary * GRAMMAR_TABLE_PER_TOKEN + GRAMMAR_SCRATCH)
        self.grammars = compiling + GRAMMAR_CACHE_BYTES
        self.states = max(get_cache_ram_mb(config), config.swap_space_mb) * _MIB
        # Everything in the host's memory, at its largest.
        embedding = 0 if self.placement.complete else self.embedding
        self.total = self.places[0].needed + embedding + self.grammars + self.states

    def _choose(self) -> tuple[int, int, Placement]:
        """Requests at a time, cells of each, and layers on GPUs.

        Fewer requests come before less context, and less context before fewer layers on a GPU, down to
        `DEFAULT_REQUEST_CELLS`. Where many layers stay with the CPU anyway, there is context for an agent's
        first message: see `MAX_MORE_CPU_LAYERS`.
        """
        config, longest, asked = self._config, self._longest, self._asked
        layers = asked_layers(config)
        whole = self._placer.place(self._placer.total if layers is None else layers)
        if config.ctx_size:
            parallel = asked or min(MAX_PARALLEL, max(1, config.ctx_size // DEFAULT_REQUEST_CELLS))
            slots = max(config.slots, parallel)
            share = request_share(config.ctx_size * slots // parallel, slots)
            return parallel, share, whole if layers is not None else self._max_layers(parallel, share)
        parallel, share = self._choose_context(whole)
        if layers is not None or not whole.gpu_layers:
            return parallel, share, whole
        small = min(DEFAULT_REQUEST_CELLS, longest)
        if share >= small and self._fits(parallel, share, whole):
            return parallel, share, whole
        if self._fits(asked or 1, small, whole):
            return asked or 1, small, whole
        fewer, wanted = self._max_layers(asked or 1, small), small
        long = self._max_layers(asked or 1, min(AGENT_SHARE, longest))
        if long.slow_layers <= MAX_MORE_CPU_LAYERS * fewer.slow_layers:
            fewer, wanted = long, min(AGENT_SHARE, longest)
        parallel, share = self._choose_context(fewer)
        if share < wanted and fewer.gpu_layers and self._fits(asked or 1, wanted, fewer):
            parallel, share = asked or 1, wanted
        return parallel, share, fewer

    def _choose_context(self, placement: Placement) -> tuple[int, int]:
        """Requests at a time and cells of each: fewer requests before less context, see `AGENT_SHARE`."""
        longest, asked = self._longest, self._asked
        if self.available is None and not placement.gpu_layers:
            return asked or MAX_PARALLEL, min(DEFAULT_REQUEST_CELLS, longest)
        if asked:
            return asked, self._largest_share(asked, placement)
        several = range(2, MAX_PARALLEL + 1)
        if more := bisect(several, True, key=lambda n: not self._fits(n, longest, placement, roomy=True)):
            return several[more - 1], longest
        if (share := self._largest_share(2, placement)) >= min(AGENT_SHARE, longest):
            return 2, share
        return 1, self._largest_share(1, placement)

    def _max_layers(self, parallel: int, share: int) -> Placement:
        """As many layers on GPUs as fit beside such a context. What the host holds does not decide.

        Experts of the first layers stay with the host before whole layers do: most of the weights, and little
        of the work.
        """
        place, total, experts = self._placer.place, self._placer.total, 0
        fits = partial(self._fits, parallel, share, host=False)
        if self._placer.chooses_experts:
            experts = bisect(range(total), True, key=lambda count: fits(place(total, count)))
            if experts < total:
                return place(total, experts)
            experts -= 1  # of all layers but the output
        layers = bisect(range(1, total + 1), True, key=lambda count: not fits(place(count, experts)))
        return place(layers, experts)

    def _largest_share(self, parallel: int, placement: Placement) -> int:
        """The most cells that each of `parallel` slots can have, in whole blocks."""
        fits = partial(self._fits, parallel, placement=placement, roomy=True)
        blocks = range(1, self._longest // CELL_BLOCK + 1)
        affordable = bisect(blocks, True, key=lambda count: not fits(count * CELL_BLOCK))
        return max(min(MIN_SHARE, self._longest), affordable * CELL_BLOCK)

    def _fits(
        self, parallel: int, share: int, placement: Placement, *, host: bool = True, roomy: bool = False
    ) -> bool:
        """True if it fits everywhere; if `roomy`, with KV in at most half of what the rest leaves free."""
        with suppress(NotEnoughMemory):
            places = self._sum_up(parallel, share, placement)[0 if host else 1 :]
            return all(place.is_roomy if roomy else place.fits for place in places)
        return False

    def _sum_up(self, parallel: int, share: int, placement: Placement) -> tuple[Place, ...]:
        """Memory of the host and of each GPU: llama.cpp's sums, and what it does not count."""
        header = self._header
        config = msgspec.structs.replace(
            self._config,
            model=str(header.path),
            parallel=parallel,
            ctx_size=self._config.ctx_size or parallel * share,
            **self._placer.settings(placement),
        )
        found, drafts = self._dry.measure(config), {}
        if config.draft_model:
            drafts = self._dry.measure(draft_config(config, config.max_request_tokens or share))

        weights = sum(sizes.model for sizes in found.values())
        used = placement.devices if placement.gpu_layers else ()
        mmproj = Path(config.mmproj).stat().st_size if config.mmproj else 0
        encoder = used[0].name if used else HOST

        def place(name: str, free: int | None, more: int, reserve: int = 0) -> Place:
            sizes, draft = found.get(name, Sizes()), sum(drafts.get(name, Sizes()))
            if not any(sizes) and not draft:
                return Place(name, free)
            # An adapter lies where the weights are that it changes.
            model = int(sizes.model * (self._scale + self.adapters / max(1, weights)))
            media = mmproj + (MEDIA_CONTEXT if used else 0) if mmproj and name == encoder else 0
            return Place(name, free, model, sizes.kv, sizes.compute + more, draft, media, reserve)

        scratch = self._placer.converted(share * max(config.slots, parallel))
        devices = [place(device.name, device.free, scratch, DEVICE_RESERVE) for device in used]
        if config.split_mode in ("row", "tensor") and devices:  # not counted where they will lie
            uses = Sizes._fields if config.split_mode == "tensor" else ("model",)
            counted = [place(name, None, scratch) for name in found if name != HOST]
            parts = [part / sum(self._placer.parts) for part in self._placer.parts]
            sums = {use: sum(getattr(each, use) for each in counted) for use in uses}
            for index, part in enumerate(parts):
                shares: dict[str, Any] = {use: int(part * size) for use, size in sums.items()}
                devices[index] = devices[index]._replace(**shares, reserve=DEVICE_RESERVE)
        # The tables of the vocabulary in the processes, and logits as they are handed out.
        tables = header.vocabulary * (VOCABULARY_BYTES + 4 * used_outputs(config, header.vocabulary))
        host = place(HOST, self.available, RUNTIME + tables + (MEDIA_RUNTIME if mmproj else 0))
        shared = sum(one.needed for one, device in zip(devices, used, strict=True) if device.integrated)
        return (host._replace(shared=shared), *devices)

    @property
    def by_device(self) -> dict[str, int]:
        """All bytes that the model takes at its largest, by device: the one figure that is shown."""
        return {HOST: self.total, **{place.name: place.needed for place in self.places[1:] if place.needed}}

    @property
    def fits(self) -> bool:
        """True if the needed part fits, on each device; the rest uses what is left."""
        return all(place.fits for place in self.places)

    def ready(self, config: EngineConfig) -> EngineConfig:
        """The configuration with what was chosen."""
        placed = self.placement
        return msgspec.structs.replace(
            settle_itl(config, on_gpus=placed.complete),
            parallel=self.parallel,
            ctx_size=self.cells,
            batch_tokens=self._config.batch_tokens,
            **self._placer.settings(placed),
            # The host looks up token vectors only; threads that poll would take cores from the sampler.
            threads=config.threads or (GPU_THREADS if placed.complete else 0),
            poll=0 if placed.complete and config.poll is None else config.poll,
        )

    def hint(self) -> str:
        """Advice where it does not fit."""
        if any(not place.fits for place in self.places[1:]):
            return "try --gpu-layers auto, or fewer"
        if self._config.ctx_size or self._config.parallel > 1 or self._config.slots > 1:
            return "try a smaller --ctx-size or --parallel"
        return "try a model of fewer or smaller weights"

    def describe(self) -> str:
        """The sum, in MiB; with layers on GPUs, of each device."""
        if self.on_gpu:
            return "; ".join(place.describe() for place in self.places if place.needed)
        host, available = self.places[0], "unknown" if self.available is None else mib(self.available)
        draft = f"+ draft model {mib(host.draft)} " if host.draft else ""
        draft += f"+ mmproj {mib(host.media)} " if host.media else ""
        return (
            f"model {mib(self.model)} + KV {mib(self.kv)} ({self.share} cells for each of {self.slots}) "
            f"+ compute {mib(self.compute)} {draft}= {mib(self.needed)}, available {available}"
        )

    def describe_placement(self) -> str:
        """Where the layers lie, and why."""
        shown, chosen = self.placement.describe(), self._placer.chooses_experts
        if not self.placement.host_experts:
            return shown
        return f"{shown} ({'the GPUs have no room for them' if chosen else 'as --n-cpu-moe says'})"

    def describe_context(self) -> str:
        """The context, and why it is what it is."""
        config, train = self._config, self._header.context_train
        if config.ctx_size:
            why = "as --ctx-size says"
        elif self.available is None and not self.on_gpu:
            why = "the available memory is unknown"
        elif self.share < self._longest:
            why = "KV takes half of the memory that is left beside the model"
            if self.on_gpu and not all(place.is_roomy for place in self.places):
                why = f"beside {self.placement.gpu_layers} layers on the GPU"
        elif train < MAX_SHARE:
            why = "the model's training context"
        else:
            why = "as --max-request-tokens says" if config.max_request_tokens else "--ctx-size allows more"
        kept = f", {self.slots} slots" if self.slots > self.parallel else ""
        plural = "" if self.parallel == 1 else "s"
        tokens = min(self.share, train)
        return f"{self.parallel} request{plural} at a time, up to {tokens} tokens each ({why}){kept}"

    def describe_rest(self) -> str:
        """The parts that are allocated on use, in MiB."""
        return (
            f"embeddings {mib(self.embedding)} + grammars {mib(self.grammars)} "
            f"+ states {mib(self.states)}, {mib(self.total)} in all"
        )


def _choose_batch(header: GgufHeader, config: EngineConfig, devices: Sequence[Device]) -> MemoryFit:
    """The fit with long steps, where GPUs have all layers and it costs neither context nor requests."""
    longer_steps = msgspec.structs.replace(config, batch_tokens=GPU_BATCH_TOKENS)
    with DryLoad() as dry:
        fit = MemoryFit(header, config, devices, dry=dry)
        if not fit.placement.complete or config.batch_tokens != DEFAULTS.batch_tokens:
            return fit
        longer = MemoryFit(header, longer_steps, devices, dry=dry)
    same = (longer.parallel, longer.share, longer.placement) == (fit.parallel, fit.share, fit.placement)
    return longer if same and longer.fits else fit


def choose_head(header: GgufHeader, config: EngineConfig) -> EngineConfig:
    """Draft by the model's head (MTP) if asked for, or if it can and nothing else is. Raises ConfigError."""
    hybrid = header.number("ssm.state_size") > 0
    if config.draft == "auto" and config.drafter == "ngram" and header.architecture in HEADS and header.head:
        if config.draft_rollback or not hybrid:
            return msgspec.structs.replace(config, draft="mtp")
    elif config.drafter == "mtp":
        if not header.head:
            raise ConfigError(
                "draft mtp: the model's file has no layer for multi-token prediction, or several"
            )
        if hybrid and not config.draft_rollback:
            return msgspec.structs.replace(config, draft_rollback=min(config.draft_tokens, HEAD_ROLLBACK))
    elif config.drafter == "model" and not config.draft_model:
        raise ConfigError("draft model: --draft-model says which")
    return config


def prepare(config: EngineConfig, devices: Sequence[Device] | None = None) -> EngineConfig:
    """Read the header and the chat template, check the memory. Raises SetupError; loads nothing.

    The context and the layers on GPUs that are not given are chosen; what is given is honoured or refused.
    RAM for saved states is limited to what is left. `devices` replaces the GPUs that are here. Models are
    files by now (`resolve_config`).
    """
    header = GgufHeader.of(config)
    template = ""
    if config.chat_template:
        from cllm.text.chat_template import read_template  # with Jinja, which most starts do without

        template = read_template(config.chat_template)
    # A link may lead to a file of another name: a hub's cache names it by its hash.
    path = header.path.resolve()
    if path.name != header.path.name or len(header.parts) > 1:
        path = header.path.absolute()
    config = msgspec.structs.replace(config, model=str(path), chat_template=template)
    ranking = config.pooling == "rank" or (not config.pooling and header.number("pooling_type") == 4)
    if ranking and not header.ranks:
        raise ModelFileError(f"{path.name} has no ranking head: choose --pooling mean, cls or last")
    if config.cache_type_v not in ("f32", "f16", "bf16") and not config.flash_attention:
        raise ConfigError(f"cache_type_v {config.cache_type_v} needs flash attention (--flash-attention)")
    config = choose_head(header, config)
    if config.draft_model:
        draft = Path(config.draft_model).resolve()
        GgufHeader(draft)  # is there, and one
        config = msgspec.structs.replace(config, draft_model=str(draft))
    if devices is None:
        devices = list_free_devices() if asked_layers(config) != 0 else ()
    fit = _choose_batch(header, config, devices)
    if not fit.fits:
        raise NotEnoughMemory(f"not enough memory: {fit.describe()}; {fit.hint()}")
    if asked_layers(config) and not devices:
        log.warning("--gpu-layers %s: no GPU can be used, so the CPU computes all layers", config.gpu_layers)
    placed = f"{fit.describe_placement()}: " if devices else ""
    log.info("context: %s; memory at the start: %s%s", fit.describe_context(), placed, fit.describe())
    config = fit.ready(config)
    target, limit = config.target_itl_ms, config.max_itl_ms
    log.info("inter-token target: %d ms, at most %d where it would cost over 3 %% of speed", target, limit)
    if (host := available_memory()) is None or fit.total <= host:
        return config
    limit_mb = max(0, host - (fit.total - fit.states)) // _MIB
    log.warning(
        "memory is tight (%s; %s): %d MiB instead of %d for the prefix cache and preempted requests",
        *(fit.describe(), fit.describe_rest(), limit_mb, fit.states // _MIB),
    )
    return msgspec.structs.replace(
        config,
        cache_ram_mb=min(get_cache_ram_mb(config), limit_mb),
        swap_space_mb=min(config.swap_space_mb, limit_mb),
    )

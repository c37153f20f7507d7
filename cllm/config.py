"""Settings: the one place where each is named, typed, bounded and described.

The command line, the `CLLM_*` variables, the TOML file and `--help` are made from these fields, so a default
is written down once. `_rare` options are shown by `--help-all` only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cllm.errors import ConfigError, InvalidRequest
from cllm.fields import StructKind, describe_unknown, parse_fields
from cllm.limits import MAX_RECONNECT_S

KV_TYPE = "^(f32|f16|bf16|q8_0|q5_1|q5_0|q4_1|q4_0|iq4_nl)$"
LEVELS = "(?i)^(debug|info|warning|error)$"
POOLING = "^(mean|cls|last|rank|none)?$"
LAYERS = "^(auto|all)$(?#a whole number of at least -1, all or auto)"
MODES = "^(none|layer|row|tensor)$"
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
LOAD_MODE = rf"^(auto|none|mmap|mlock|mmap\+mlock|dio)$(?#one of {', '.join(LOAD_MODES)})"
DRAFTS = "^(auto|ngram|model|mtp|off)$"
ROPE_SCALING = "^(none|linear|yarn)?$"
OVERRIDE = (
    r"^[\w.-]{1,127}=(int:-?\d{1,9}|float:-?\d+(\.\d+)?(e-?\d\d?)?|bool:(true|false)|str:[ -~]{0,127})$"
    "(?#KEY=TYPE:VALUE with a type of int, float, bool or str, as tokenizer.ggml.add_bos_token=bool:false)"
)
TENSOR = r"^[^=]{1,256}=\w{1,64}$(?#PATTERN=DEVICE, as blk\.1\.ffn_.*=CPU)"
SPLIT = r"^(\d{1,9}(\.\d+)?(,\d{1,9}(\.\d+)?)*)?$(?#a number for each GPU, as 3,1)"
TARGET_ITL_MS = 250  # where a layer is computed by the CPU
GPU_TARGET_ITL_MS = 50  # with all layers on GPUs
MAX_ITL = 4  # targets, where keeping one would cost more throughput than that is worth
CACHE_RAM_SHARE = 8  # an eighth of the machine's memory, by default
MIN_BATCH_TOKENS = 32
GPU_BATCH_TOKENS = 2048  # likewise: submitting takes as long as computing 512 tokens of a small model
TEMPLATE_TEXT = "text:"  # before a chat template that is given as text
DEFAULT_CACHE_DISK_MB = 4096  # of a server
BODY_MB, MEDIA_BODY_MB = 8, 64  # of a request; pictures come in base64, which adds a third
GROUPS = {  # the panels of `--help`, by their first field
    "model": "model",
    "parallel": "context",
    "prefix_cache": "cache",
    "draft": "speculation",
    "host": "server",
    "api_keys": "security",
}


def _option(
    description: str, ge: float | None = None, le: float | None = None, *, rare: bool = False, **more: Any
) -> Meta:
    """`ge` and `le` are the bounds; `metavar` stands for the value in `--help`."""
    extra = {"metavar": more.pop("metavar", ""), "rare": rare}
    meta: Meta = Meta(description=description, ge=ge, le=le, extra=extra, **more)
    return meta


_rare = partial(_option, rare=True)
_file, _folder = partial(_option, metavar="FILE"), partial(_option, metavar="DIR")


def split_list(setting: str) -> list[str]:
    """The items of a comma-separated setting."""
    return [item.strip() for item in setting.split(",") if item.strip()]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine: how the model is loaded and scheduled."""

    model: Annotated[
        str,
        _option(
            "GGUF file, folder, hf:USER/REPO:QUANT, ms:USER/REPO:QUANT, URL, or a name of `cllm list`. "
            "Without it: the embedded SmolLM2-135M-Instruct."
        ),
    ] = ""
    offline: Annotated[bool, _option("Pull no model from a hub; use what is here.")] = False
    alias: Annotated[
        str, _option("Name in responses, and after commas more. Default: the file's.", metavar="NAME")
    ] = ""
    tags: Annotated[str, _rare("Words about the model in /v1/models, comma-separated.", metavar="WORDS")] = ""
    adapter: Annotated[
        tuple[str, ...],
        _option("LoRA adapter (file, hub), served as MODEL:NAME; repeatable.", metavar="NAME=FILE[:SCALE]"),
    ] = ()
    apply_adapters: Annotated[
        bool, _rare("Compute requests that name no adapter with all of --adapter, as llama-server does.")
    ] = False
    adapter_mb: Annotated[
        int, _rare("Memory for adapters loaded at run time, MiB; the least recently used are unloaded.", 0)
    ] = 1024
    mmproj: Annotated[
        str, _file("Multimodal projector. Default: mmproj*.gguf beside the model.", rare=True)
    ] = ""
    no_mmproj: Annotated[bool, _rare("Take no pictures, though there is an mmproj beside the model.")] = False
    media_hosts: Annotated[
        str,
        _rare("Hosts whose pictures are fetched, comma-separated; '*.org' works. None.", metavar="NAMES"),
    ] = ""
    chat_template: Annotated[
        str, _file("Chat template instead of the model's own: a file, a name as chatml, or text:TEXT.")
    ] = ""
    gpu_layers: Annotated[
        Annotated[int, Meta(ge=-1)] | Annotated[str, Meta(pattern=LAYERS)],
        _option("Layers on GPUs, the output is one: a number, all, or auto: as many as fit.", metavar="N"),
    ] = "auto"
    tensor_split: Annotated[
        str, _rare("Parts of the layers that each GPU gets, as 3,1. Default: by free memory.", pattern=SPLIT)
    ] = ""
    split_mode: Annotated[
        str,
        _rare("Several GPUs: whole layers (layer), parts of each (row, tensor), none.", pattern=MODES),
    ] = "layer"
    main_gpu: Annotated[int, _rare("The GPU of --split-mode none, and of a draft model.", 0, 64)] = 0
    n_cpu_moe: (
        Annotated[int, _rare("First layers whose experts stay in RAM. Default: as GPUs need.", 0, 4096)]
        | None
    ) = None
    override_tensor: Annotated[
        tuple[Annotated[str, Meta(pattern=TENSOR)], ...],
        _rare("Where the tensors of a pattern lie; repeatable.", metavar="PATTERN=DEVICE"),
    ] = ()
    load_mode: Annotated[
        str, _rare("Loading of the weights: mmap, none (a copy), mlock, mmap+mlock, dio.", pattern=LOAD_MODE)
    ] = "auto"
    override_kv: Annotated[
        tuple[Annotated[str, Meta(pattern=OVERRIDE)], ...],
        _rare("Metadata in place of the file's; repeatable.", metavar="KEY=TYPE:VALUE"),
    ] = ()
    threads: Annotated[int, _option("Compute threads. 0: one per core, fewer if others compute.", 0, 512)] = 0
    max_threads: Annotated[int, _rare("Upper limit of --threads 0. 0: the number of cores.", 0, 512)] = 0
    poll: Annotated[int, _rare("Busy-waiting. Default: 50; GPUs, several models: 0.", 0, 100)] | None = None
    flash_attention: Annotated[bool, _rare("Flash attention kernels.")] = True
    extra_buffers: Annotated[bool, _rare("Repack weights, as for AMX. Default: if faster.")] | None = None
    pooling: Annotated[
        str, _rare("Embedding pooling: mean, cls, last, rank, none. Default: the model's.", pattern=POOLING)
    ] = ""

    parallel: Annotated[
        int, _option("Requests computed at the same time, one slot each. 0: up to 8, by memory.", 0, 255)
    ] = 0
    slots: Annotated[
        int, _option("KV slots; those beyond --parallel keep ended conversations. 0: --parallel.", 0, 255)
    ] = 0
    ctx_size: Annotated[
        int, _option("KV cells of all --parallel requests. 0: up to 32768 each, in half of free memory.", 0)
    ] = 0
    max_request_tokens: Annotated[int, _option("Token limit of one request. 0: ctx-size / parallel.", 0)] = 0
    embed_tokens: Annotated[
        int, _rare("Token limit of an embedding input or rerank prompt. 0: of a request; encoders 4096.", 0)
    ] = 0
    batch_tokens: Annotated[
        int, _option("Token limit of a step and chunk; 512 becomes 2048 on GPUs.", MIN_BATCH_TOKENS, 65536)
    ] = 512
    target_itl_ms: Annotated[
        int, _option("Inter-token latency that chunked prefill keeps, ms. 0: 250, on GPUs alone 50.", 0)
    ] = 0
    max_itl_ms: Annotated[
        int,
        _rare(
            "Limit where keeping the target costs over 3 % of speed, ms. 0: four targets, or one if set.", 0
        ),
    ] = 0
    unified_kv: Annotated[bool, _rare("One KV pool for all requests, not one KV stream each.")] = False
    cache_type_k: Annotated[str, _option("KV cache type of keys: f16, bf16, q8_0 …", pattern=KV_TYPE)] = "f16"
    cache_type_v: Annotated[
        str, _option("KV cache type of values; below 16 bits it needs flash attention.", pattern=KV_TYPE)
    ] = "f16"
    rope_scaling: Annotated[str, _rare("RoPE scaling: linear, yarn or none.", pattern=ROPE_SCALING)] = ""
    rope_scale: Annotated[float, _rare("RoPE: context extension, as 4. 0: the model's.", 0, 1024)] = 0.0
    rope_freq_base: Annotated[float, _rare("RoPE: base frequency. 0: the model's.", 0)] = 0.0
    yarn_orig_ctx: Annotated[int, _rare("YaRN: context to extend. 0: the model's.", 0, 1 << 24)] = 0
    yarn_ext_factor: Annotated[float, _rare("YaRN: part of extrapolation. -1: the model's.", -1, 1)] = -1.0
    yarn_attn_factor: Annotated[float, _rare("YaRN: scale of attention. -1: the model's.", -1)] = -1.0
    yarn_beta_fast: Annotated[float, _rare("YaRN: beta of fast dimensions. -1: the model's.", -1)] = -1.0
    yarn_beta_slow: Annotated[float, _rare("YaRN: beta of slow dimensions. -1: the model's.", -1)] = -1.0

    prefix_cache: Annotated[bool, _option("Keep what ended requests computed: in slots, RAM, disk.")] = True
    cache_ram_mb: (
        Annotated[int, _option("RAM for the prefix cache, MiB. 0: slots only. Default: an eighth of all.", 0)]
        | None
    ) = None
    swap_space_mb: Annotated[
        int, _option("Host RAM for KV swapped out by preemption, MiB; the rest is recomputed.", 0)
    ] = 1024
    cache_disk_mb: (
        Annotated[int, _option("Disk for the prefix cache, MiB. 0: off. Default: 4096, with keys 0.", 0)]
        | None
    ) = None
    cache_dir: Annotated[str, _folder("Folder of the disk cache. Default: ~/.cache/cllm.")] = ""
    share_prefixes_across_tenants: Annotated[
        bool, _rare("Share the prefix cache between API keys; timing then reveals prompts.")
    ] = False

    draft: Annotated[
        str,
        _option("Drafter: ngram, model (--draft-model), mtp (the model's own head), off.", pattern=DRAFTS),
    ] = "auto"
    draft_tokens: Annotated[int, _option("Draft tokens of a sequence, if they pay. 0: off.", 0, 64)] = 8
    draft_rollback: Annotated[
        int, _rare("Draft tokens that a hybrid model can take back; each takes one more state a slot.", 0, 64)
    ] = 0
    draft_model: Annotated[str, _file("Draft model of the same vocabulary. Default: n-gram lookup.")] = ""

    @property
    def drafter(self) -> str:
        """The kind of drafter, as far as the settings say it: mtp, model, ngram or off."""
        if self.draft == "off" or not self.draft_tokens:
            return "off"
        return self.draft if self.draft != "auto" else "model" if self.draft_model else "ngram"

    @property
    def names(self) -> list[str]:
        """The names that `alias` gives the model. The first is the one in responses."""
        return split_list(self.alias)

    @property
    def metadata(self) -> dict[str, int | float | bool | str]:
        """The model's metadata that `override_kv` replaces."""
        types = {"int": int, "float": float, "str": str, "bool": bool}
        parts = (re.split("[=:]", text, maxsplit=2) for text in self.override_kv)
        return {key: msgspec.convert(value, types[kind], strict=False) for key, kind, value in parts}

    @property
    def rope_params(self) -> dict[str, float]:
        """Fields of `llama_context_params` about RoPE; 0 and -1 leave one as the model has it."""
        named = (name for name in self.__struct_fields__ if name.startswith(("rope_freq", "yarn")))
        return {
            "rope_scaling_type": ("", "none", "linear", "yarn").index(self.rope_scaling) - 1,
            "rope_freq_scale": self.rope_scale and 1 / self.rope_scale,
            **{name: getattr(self, name) for name in named},
        }

    def extend_context(self, trained: int, original: int) -> int:
        """The context after RoPE scaling, in tokens, of a model whose own scaling extends `original` ones."""
        factor = 1 if self.rope_scaling == "none" else self.rope_scale
        return round((self.yarn_orig_ctx or original) * factor) if factor else trained


class ClusterConfig(EngineConfig, frozen=True, kw_only=True):
    """Settings of a cluster worker: where the replicas of a model are, and which model they must have."""

    cluster: str  # address of the head
    deployment: str  # the model's name in the cluster
    digest: str = ""  # of the model's file


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that are ready to be loaded, and the memory that they take, in bytes by device."""

    config: EngineConfig
    memory: dict[str, int] = {}
    stamps: tuple[tuple[str, int, int], ...] = ()  # of its files: path, size, time of change


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a server: its names and settings."""

    name: str
    engine: EngineConfig = EngineConfig()
    aliases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # other ways to write its name, as `cllm list` has it
    defaults: dict[str, Any] = {}  # fields for requests that lack them
    keep: bool = False  # loaded at the start, and never unloaded
    ttl: float = 0.0  # seconds without a request after which it is unloaded; 0: never


def settle_itl(config: EngineConfig, default_ms: int = TARGET_ITL_MS) -> EngineConfig:
    """Fill in the inter-token target, and its limit: a target that is set is kept as it is."""
    target = config.target_itl_ms
    limit = config.max_itl_ms or target or MAX_ITL * default_ms
    return msgspec.structs.replace(config, target_itl_ms=target or default_ms, max_itl_ms=limit)


def get_cache_ram_mb(config: EngineConfig) -> int:
    """Host RAM for the prefix cache, MiB; without a setting, a share of the machine's memory."""
    if config.cache_ram_mb is not None:
        return config.cache_ram_mb
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // CACHE_RAM_SHARE >> 20


def slot_count(config: EngineConfig) -> int:
    """Sequences that the KV memory has room for, running or cached."""
    return max(config.slots, config.parallel)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server."""

    host: Annotated[str, _option("Addresses to listen on, comma-separated.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, _option("Port to listen on. 0: any free one.", 0, 65535)] = 18081
    log_level: Annotated[str, _option("debug, info, warning, error.", metavar="LEVEL", pattern=LEVELS)] = (
        "info"
    )
    queue_size: Annotated[
        int, _option("Waiting requests; one more gets a 429, unless its tenant holds less than its share.", 1)
    ] = 1024
    queue_tokens: Annotated[int, _rare("Waiting prompt tokens; more get a 429. 0: no limit.", 0)] = 1 << 20
    max_timeout_s: Annotated[float, _option("Time limit of one request, seconds. 0: none.", 0)] = 600.0
    drain_s: Annotated[float, _option("Time for requests to finish after SIGTERM, seconds.", 0)] = 30.0
    cluster: Annotated[
        str, _option("The cluster (`cllm cluster`) that computes; HOST:PORT of its head.", metavar="ADDRESS")
    ] = ""
    model_dir: Annotated[str, _folder("Folder of the models that /admin/reload may load.")] = ""
    all: Annotated[bool, _option("Serve every model that `cllm list` shows.")] = False
    models_memory_mb: Annotated[
        int, _option("Host memory of models, MiB. 0: what is free at the start.", 0)
    ] = 0
    sleep_idle_s: Annotated[float, _rare("Unload a model idle for this long, seconds. 0: never.", 0)] = 0.0
    job_store_mb: Annotated[
        int, _option("Disk for files, batches and responses, MiB, in equal parts for keys. 0: none.", 0)
    ] = 1024
    response_ttl: Annotated[float, _rare("Lifetime of responses and batches, seconds.", 1)] = 30 * 86400.0
    state_dir: Annotated[
        str, _folder("Folder of files, batches, responses. Default: ~/.local/state/cllm/jobs-PORT.")
    ] = ""
    reconnect_s: Annotated[
        float, _rare("Streams go on for this long after a lost connection, seconds.", 0, MAX_RECONNECT_S)
    ] = 0.0
    slow_reader_s: Annotated[float, _rare("A stream not read for this long is ended, seconds.", gt=0)] = 30.0
    max_body_mb: Annotated[int, _rare("Largest body, MiB. Default: 8; with an mmproj 64.", 1)] | None = None
    max_header_kb: Annotated[int, _rare("Largest request header, KiB.", 1, 1024)] = 32
    header_timeout_s: Annotated[float, _rare("Time limit to receive a header, seconds.", 0.1)] = 10.0
    body_timeout_s: Annotated[float, _rare("Time limit to receive a body, seconds.", 0.1)] = 30.0
    keep_alive_s: Annotated[float, _rare("Idle connections are closed after this, seconds.", 0)] = 75.0
    max_connections: Annotated[int, _rare("Open connections, if descriptors suffice; more: 503.", 1)] = 4096

    api_keys: Annotated[str, _file("TOML file of API keys (`cllm keys new`); SIGHUP reads it again.")] = ""
    api_key: Annotated[
        str, _option("Admin's API key; or several users', comma-separated.", metavar="KEY")
    ] = ""
    allowed_hosts: Annotated[
        str, _option("Host names of this server, comma-separated; '*.lan' works.", metavar="NAMES")
    ] = ""
    cors_origins: Annotated[
        str, _option("Allowed web origins, comma-separated; '*': all, 'localhost': local.", metavar="URLS")
    ] = ""
    open_routes: Annotated[
        str,
        _rare("Routes for all clients: /metrics, /slots, /props; '-/slots': for none.", metavar="PATHS"),
    ] = ""
    defaults: Annotated[
        str, _option('Fields for requests that lack them, as JSON: {"temperature": 0.2}.', metavar="JSON")
    ] = ""
    tls_cert: Annotated[str, _file("Certificate chain (PEM); with --tls-key: HTTPS.")] = ""
    tls_key: Annotated[str, _file("Private key of the certificate (PEM).")] = ""

    @property
    def max_body_bytes(self) -> int:
        """Bytes of the largest request body."""
        return (self.max_body_mb or BODY_MB) << 20

    def for_media(self) -> ServerConfig:
        """These settings where pictures come in bodies: by default, larger ones."""
        return msgspec.structs.replace(self, max_body_mb=self.max_body_mb or MEDIA_BODY_MB)


def make_config(config: type[StructKind], settings: Mapping[str, Any], *, strict: bool = True) -> StructKind:
    """One of these structs from settings by name. Raises ConfigError, which names the one that is wrong."""
    try:
        return parse_fields(settings, config, strict=strict)
    except InvalidRequest as error:
        raise ConfigError(error.message) from None


def name_settings(table: Mapping[str, Any], *structs: type[msgspec.Struct]) -> dict[str, Any]:
    """Settings of a TOML file by the names of fields. Raises ConfigError for one that no struct has."""
    known = {field for struct in structs for field in struct.__struct_fields__}
    settings = {key.replace("-", "_"): value for key, value in table.items()}
    if unknown := sorted(settings.keys() - known):
        raise ConfigError(f"unknown setting {describe_unknown(unknown[0], known)}")
    return settings


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a server."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    models: dict[str, dict[str, Any]] = {}  # `[models.NAME]` of the TOML file

    def with_disk_cache(self) -> Config:
        """The disk cache as it is meant by default: files tell prompts, so not where keys protect them."""
        if self.engine.cache_disk_mb is not None:
            return self
        private = self.server.api_key or self.server.api_keys
        size = 0 if private else DEFAULT_CACHE_DISK_MB
        return msgspec.structs.replace(self, engine=msgspec.structs.replace(self.engine, cache_disk_mb=size))

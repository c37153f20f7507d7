"""Settings: the one place where each is named, typed and bounded.

The command line, the `CLLM_*` variables, the TOML file and `--help` are made from these fields, so a default
is written down once. What each means is in `cli/settings.toml`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cllm.errors import ConfigError, InvalidRequest
from cllm.fields import StructKind, describe_unknown, parse_fields
from cllm.limits import MAX_RECONNECT_S

KV_TYPE = "^(f32|f16|bf16|q8_0|q5_1|q5_0|q4_1|q4_0|iq4_nl)$"
LEVELS = "(?i)^(debug|info|warning|error)$"
HTTP_URL = r"^(https?://\S+)?$(?#http:// or https://)"
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


def split_list(setting: str) -> list[str]:
    """The items of a comma-separated setting."""
    return [item.strip() for item in setting.split(",") if item.strip()]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine: how the model is loaded and scheduled."""

    model: str = ""
    offline: bool = False
    alias: str = ""
    tags: str = ""
    adapter: tuple[str, ...] = ()
    apply_adapters: bool = False
    adapter_mb: Annotated[int, Meta(ge=0)] = 1024
    mmproj: str = ""
    no_mmproj: bool = False
    media_hosts: str = ""
    chat_template: str = ""
    gpu_layers: Annotated[int, Meta(ge=-1)] | Annotated[str, Meta(pattern=LAYERS)] = "auto"
    tensor_split: Annotated[str, Meta(pattern=SPLIT)] = ""
    split_mode: Annotated[str, Meta(pattern=MODES)] = "layer"
    main_gpu: Annotated[int, Meta(ge=0, le=64)] = 0
    n_cpu_moe: Annotated[int, Meta(ge=0, le=4096)] | None = None
    override_tensor: tuple[Annotated[str, Meta(pattern=TENSOR)], ...] = ()
    load_mode: Annotated[str, Meta(pattern=LOAD_MODE)] = "auto"
    override_kv: tuple[Annotated[str, Meta(pattern=OVERRIDE)], ...] = ()
    threads: Annotated[int, Meta(ge=0, le=512)] = 0
    max_threads: Annotated[int, Meta(ge=0, le=512)] = 0
    poll: Annotated[int, Meta(ge=0, le=100)] | None = None
    flash_attention: bool = True
    extra_buffers: bool | None = None
    own_kernels: bool = True
    pooling: Annotated[str, Meta(pattern=POOLING)] = ""

    parallel: Annotated[int, Meta(ge=0, le=255)] = 0
    slots: Annotated[int, Meta(ge=0, le=255)] = 0
    ctx_size: Annotated[int, Meta(ge=0)] = 0
    max_request_tokens: Annotated[int, Meta(ge=0)] = 0
    embed_tokens: Annotated[int, Meta(ge=0)] = 0
    batch_tokens: Annotated[int, Meta(ge=MIN_BATCH_TOKENS, le=65536)] = 512
    target_itl_ms: Annotated[int, Meta(ge=0)] = 0
    max_itl_ms: Annotated[int, Meta(ge=0)] = 0
    unified_kv: bool = False
    cache_type_k: Annotated[str, Meta(pattern=KV_TYPE)] = "f16"
    cache_type_v: Annotated[str, Meta(pattern=KV_TYPE)] = "f16"
    rope_scaling: Annotated[str, Meta(pattern=ROPE_SCALING)] = ""
    rope_scale: Annotated[float, Meta(ge=0, le=1024)] = 0.0
    rope_freq_base: Annotated[float, Meta(ge=0)] = 0.0
    yarn_orig_ctx: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    yarn_ext_factor: Annotated[float, Meta(ge=-1, le=1)] = -1.0
    yarn_attn_factor: Annotated[float, Meta(ge=-1)] = -1.0
    yarn_beta_fast: Annotated[float, Meta(ge=-1)] = -1.0
    yarn_beta_slow: Annotated[float, Meta(ge=-1)] = -1.0

    prefix_cache: bool = True
    cache_ram_mb: Annotated[int, Meta(ge=0)] | None = None
    swap_space_mb: Annotated[int, Meta(ge=0)] = 1024
    cache_disk_mb: Annotated[int, Meta(ge=0)] | None = None
    cache_dir: str = ""
    share_prefixes_across_tenants: bool = False

    draft: Annotated[str, Meta(pattern=DRAFTS)] = "auto"
    draft_tokens: Annotated[int, Meta(ge=0, le=64)] = 8
    draft_rollback: Annotated[int, Meta(ge=0, le=64)] = 0
    draft_model: str = ""

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


def settle_itl(config: EngineConfig, *, on_gpus: bool = False) -> EngineConfig:
    """Fill in the inter-token target, and its limit: a target that is set is kept as it is."""
    target, default_ms = config.target_itl_ms, GPU_TARGET_ITL_MS if on_gpus else TARGET_ITL_MS
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

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 18081
    log_level: Annotated[str, Meta(pattern=LEVELS)] = "info"
    otlp_endpoint: Annotated[str, Meta(pattern=HTTP_URL)] = ""
    queue_size: Annotated[int, Meta(ge=1)] = 1024
    queue_tokens: Annotated[int, Meta(ge=0)] = 1 << 20
    max_timeout_s: Annotated[float, Meta(ge=0)] = 600.0
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    cluster: str = ""
    model_dir: str = ""
    all: bool = False
    models_memory_mb: Annotated[int, Meta(ge=0)] = 0
    sleep_idle_s: Annotated[float, Meta(ge=0)] = 0.0
    job_store_mb: Annotated[int, Meta(ge=0)] = 1024
    response_ttl: Annotated[float, Meta(ge=1)] = 30 * 86400.0
    state_dir: str = ""
    reconnect_s: Annotated[float, Meta(ge=0, le=MAX_RECONNECT_S)] = 0.0
    slow_reader_s: Annotated[float, Meta(gt=0)] = 30.0
    max_body_mb: Annotated[int, Meta(ge=1)] | None = None
    max_header_kb: Annotated[int, Meta(ge=1, le=1024)] = 32
    header_timeout_s: Annotated[float, Meta(ge=0.1)] = 10.0
    body_timeout_s: Annotated[float, Meta(ge=0.1)] = 30.0
    keep_alive_s: Annotated[float, Meta(ge=0)] = 75.0
    max_connections: Annotated[int, Meta(ge=1)] = 4096

    api_keys: str = ""
    api_key: str = ""
    allowed_hosts: str = ""
    cors_origins: str = ""
    open_routes: str = ""
    defaults: str = ""
    tls_cert: str = ""
    tls_key: str = ""

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
        size = 0 if self.server.api_key or self.server.api_keys else DEFAULT_CACHE_DISK_MB
        return msgspec.structs.replace(self, engine=msgspec.structs.replace(self.engine, cache_disk_mb=size))

"""Settings: the one place where each is named, typed, bounded and described.

The command line, the `CLLM_*` variables, the TOML file and `--help` are made from these fields, so a default
is written down once. `group` is the panel of `--help`; `advanced` options are shown by `--help-all` only.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

CACHE_TYPE = "^(f32|f16|bf16|q8_0|q5_1|q5_0|q4_1|q4_0|iq4_nl)$"
LOG_LEVEL = "(?i)^(debug|info|warning|error)$"


def _setting(
    group: str, description: str, *, metavar: str = "", advanced: bool = False, **bounds: Any
) -> Meta:
    extra = {"group": group, "metavar": metavar, "advanced": advanced}
    meta: Meta = Meta(description=description, extra=extra, **bounds)
    return meta


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine: how the model is loaded and scheduled."""

    model: Annotated[
        str, _setting("model", "GGUF file to serve. Without it: the embedded SmolLM2-135M-Instruct.")
    ] = ""
    chat_template: Annotated[
        str, _setting("model", "Jinja chat template that replaces the model's own.", metavar="FILE")
    ] = ""
    gpu_layers: Annotated[
        int, _setting("model", "Layers to offload to the GPU, if the library supports one. -1: all.", ge=-1)
    ] = -1
    threads: Annotated[
        int, _setting("model", "Compute threads. 0: one per core, fewer while others compute.", ge=0, le=512)
    ] = 0
    max_threads: Annotated[
        int,
        _setting("model", "Upper limit of --threads 0. 0: the number of cores.", ge=0, le=512, advanced=True),
    ] = 0
    poll: Annotated[
        int,
        _setting("model", "Busy-waiting of idle compute threads, 0 to 100.", ge=0, le=100, advanced=True),
    ] = 50
    flash_attention: Annotated[bool, _setting("model", "Flash attention kernels.", advanced=True)] = True
    extra_buffers: Annotated[
        bool, _setting("model", "Repack the weights for AMX and similar units.", advanced=True)
    ] = True
    tune: Annotated[
        bool, _setting("model", "Measure the fastest settings at the first start and reuse them.")
    ] = True
    tune_budget_s: Annotated[
        float, _setting("model", "Time limit of that measurement, seconds.", ge=1, advanced=True)
    ] = 15.0
    pooling: Annotated[
        str,
        _setting(
            "model",
            "Pooling of embeddings: mean, cls, last or rank. Default: the model's own.",
            pattern="^(mean|cls|last|rank)?$",
            advanced=True,
        ),
    ] = ""

    parallel: Annotated[
        int, _setting("context", "Requests computed at the same time, one slot each.", ge=1, le=255)
    ] = 8
    ctx_size: Annotated[
        int,
        _setting("context", "KV cells in total, shared by all slots. 0: 4096 per slot if they fit.", ge=0),
    ] = 0
    max_request_tokens: Annotated[
        int, _setting("context", "Token limit of one request. 0: ctx-size / parallel.", ge=0)
    ] = 0
    embed_tokens: Annotated[
        int,
        _setting(
            "context",
            "Token limit of one embedding input or rerank prompt. 0: --max-request-tokens (encoders: 4096).",
            ge=0,
            advanced=True,
        ),
    ] = 0
    batch_tokens: Annotated[
        int,
        _setting("context", "Token limit of one step; the largest prefill chunk.", ge=32, le=65536),
    ] = 512
    target_itl_ms: Annotated[
        int,
        _setting("context", "Inter-token latency that chunked prefill must keep, ms.", ge=1),
    ] = 250
    unified_kv: Annotated[
        bool,
        _setting("context", "One KV pool for all requests, not one KV stream each.", advanced=True),
    ] = False
    cache_type_k: Annotated[
        str, _setting("context", "KV cache type of keys: f16, bf16, q8_0, f32 …", pattern=CACHE_TYPE)
    ] = "f16"
    cache_type_v: Annotated[
        str,
        _setting(
            "context",
            "KV cache type of values; below 16 bits it needs flash attention.",
            pattern=CACHE_TYPE,
        ),
    ] = "f16"

    cache_ram_mb: Annotated[
        int,
        _setting(
            "cache",
            "Host RAM for the prefix cache, MiB; preempted requests share it. 0 disables the cache.",
            ge=0,
        ),
    ] = 1024
    swap_space_mb: Annotated[
        int,
        _setting("cache", "Host RAM for KV swapped out by preemption, MiB; the rest is recomputed.", ge=0),
    ] = 1024
    state_dir: Annotated[
        str,
        _setting("cache", "Folder for saved prefixes (/admin/prefixes/save).", metavar="DIR"),
    ] = ""
    share_prefixes_across_tenants: Annotated[
        bool,
        _setting(
            "cache", "Share the prefix cache between API keys; timing then reveals prompts.", advanced=True
        ),
    ] = False

    draft_tokens: Annotated[
        int,
        _setting("speculation", "Draft tokens per sequence and step, where they pay. 0: off.", ge=0, le=64),
    ] = 8
    draft_model: Annotated[
        str,
        _setting(
            "speculation",
            "GGUF file of a draft model with the same vocabulary. Default: n-gram lookup.",
            metavar="FILE",
        ),
    ] = ""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server."""

    host: Annotated[str, _setting("server", "Address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, _setting("server", "Port to listen on. 0: any free one.", ge=0, le=65535)] = 18081
    log_level: Annotated[
        str, _setting("server", "debug, info, warning or error.", metavar="LEVEL", pattern=LOG_LEVEL)
    ] = "info"
    queue_size: Annotated[int, _setting("server", "Waiting requests; one more gets a 429.", ge=1)] = 1024
    queue_tokens: Annotated[
        int, _setting("server", "Waiting prompt tokens; more get a 429. 0: no limit.", ge=0, advanced=True)
    ] = 1 << 20
    max_timeout_s: Annotated[
        float, _setting("server", "Time limit of one request, seconds. 0: none.", ge=0)
    ] = 600.0
    drain_s: Annotated[
        float, _setting("server", "Time for running requests to finish after SIGTERM, seconds.", ge=0)
    ] = 30.0
    model_dir: Annotated[
        str, _setting("server", "Folder of the models that /admin/reload may load.", metavar="DIR")
    ] = ""
    slow_reader_s: Annotated[
        float,
        _setting("server", "A stream not read for this long is ended, seconds.", gt=0, advanced=True),
    ] = 30.0
    max_body_mb: Annotated[int, _setting("server", "Largest request body, MiB.", ge=1, advanced=True)] = 8
    max_header_kb: Annotated[
        int, _setting("server", "Largest request header, KiB.", ge=1, le=1024, advanced=True)
    ] = 32
    header_timeout_s: Annotated[
        float, _setting("server", "Time limit to receive a header, seconds.", ge=0.1, advanced=True)
    ] = 10.0
    body_timeout_s: Annotated[
        float, _setting("server", "Time limit to receive a body, seconds.", ge=0.1, advanced=True)
    ] = 30.0
    keep_alive_s: Annotated[
        float, _setting("server", "Idle connections are closed after this, seconds.", ge=0, advanced=True)
    ] = 30.0
    max_connections: Annotated[
        int,
        _setting(
            "server", "Open connections, as far as file descriptors allow; more: 503.", ge=1, advanced=True
        ),
    ] = 4096

    api_keys: Annotated[
        str,
        _setting(
            "security", "TOML file of API keys (`cllm keys new`); SIGHUP reads it again.", metavar="FILE"
        ),
    ] = ""
    api_key: Annotated[
        str,
        _setting("security", "API keys, comma-separated; CLLM_API_KEY hides them from `ps`.", metavar="KEY"),
    ] = ""
    allowed_hosts: Annotated[
        str,
        _setting("security", "Host names of this server, comma-separated; '*.lan' works.", metavar="NAMES"),
    ] = ""
    cors_origins: Annotated[
        str,
        _setting("security", "Web origins that may call it, comma-separated; '*': all.", metavar="URLS"),
    ] = ""
    tls_cert: Annotated[
        str, _setting("security", "Certificate chain (PEM); with --tls-key: HTTPS.", metavar="FILE")
    ] = ""
    tls_key: Annotated[str, _setting("security", "Private key of the certificate (PEM).", metavar="FILE")] = (
        ""
    )


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a server."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

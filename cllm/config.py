"""All settings, frozen. The command line, `CLLM_*` variables and the TOML file fill these and nothing else.

Every field carries its own description: `--help`, the documentation and the environment names are made
from it, so a default is written down once.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

CACHE_TYPE = "^(f32|f16|bf16|q8_0|q5_1|q5_0|q4_1|q4_0|iq4_nl)$"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is loaded and scheduled."""

    model: Annotated[str, Meta(description="GGUF file to serve; empty: the embedded SmolLM2-135M")] = ""
    chat_template: Annotated[
        str, Meta(description="Jinja file with a chat template (or its text) that replaces the model's own")
    ] = ""
    parallel: Annotated[
        int, Meta(ge=1, le=255, description="How many requests are computed at the same time")
    ] = 8
    ctx_size: Annotated[
        int,
        Meta(
            ge=0,
            description="KV cells in all, shared by the parallel requests; 0: 4096 for each, if they fit",
        ),
    ] = 0
    max_request_tokens: Annotated[
        int, Meta(ge=0, description="Most tokens of one request, prompt and answer; 0: ctx-size / parallel")
    ] = 0
    threads: Annotated[int, Meta(ge=0, le=512, description="Compute threads; 0: one per core")] = 0
    max_threads: Annotated[
        int,
        Meta(ge=0, le=512, description="Most compute threads where --threads is 0; 0: as many as cores"),
    ] = 0
    poll: Annotated[
        int, Meta(ge=0, le=100, description="How eagerly compute threads spin between operations, 0 to 100")
    ] = 50
    batch_tokens: Annotated[
        int, Meta(ge=32, le=65536, description="Most tokens of one step, so also the largest prefill chunk")
    ] = 512
    target_itl_ms: Annotated[
        int, Meta(ge=1, description="Gap between tokens that prefill of others must not exceed, milliseconds")
    ] = 250
    flash_attention: Annotated[bool, Meta(description="Use the flash attention kernels")] = True
    unified_kv: Annotated[
        bool, Meta(description="One pool of cells for all requests instead of one stream for each")
    ] = False
    cache_type_k: Annotated[
        str, Meta(pattern=CACHE_TYPE, description="How keys are kept: f16, bf16, q8_0, f32 …")
    ] = "f16"
    cache_type_v: Annotated[
        str,
        Meta(
            pattern=CACHE_TYPE,
            description="How values are kept; types of less than 16 bits need flash attention",
        ),
    ] = "f16"
    extra_buffers: Annotated[
        bool, Meta(description="Repack weights for AMX and the like (fast); off is the safe setting")
    ] = True
    gpu_layers: Annotated[
        int, Meta(ge=-1, description="Layers put on a GPU when the library has one; -1: all")
    ] = -1
    draft_model: Annotated[
        str,
        Meta(
            description="GGUF file of a small model with the same vocabulary that guesses ahead; empty: none"
        ),
    ] = ""
    draft_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Most tokens a sequence guesses ahead in a step, where that pays; 0: off",
        ),
    ] = 8
    swap_space_mb: Annotated[
        int,
        Meta(ge=0, description="RAM for the state of parked requests, MiB; beyond it they are recomputed"),
    ] = 1024
    pooling: Annotated[
        str,
        Meta(
            pattern="^(mean|cls|last|rank)?$",
            description="How tokens become a vector: mean, cls, last or rank; empty: as the model says",
        ),
    ] = ""
    embed_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Most tokens of one text to embed, or of a query and a document to rank; never more "
            "than the model's context; 0: as many as of a request (--max-request-tokens), an encoder's 4096",
        ),
    ] = 0
    cache_ram_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="RAM for computed prefixes that may come again, MiB, shared with parked requests "
            "(both together take the larger of the two settings); 0: none are kept",
        ),
    ] = 1024
    share_prefixes_across_tenants: Annotated[
        bool, Meta(description="Let tenants use each other's prefixes; timing then tells what others asked")
    ] = False
    state_dir: Annotated[
        str,
        Meta(
            description="Folder for files of computed prefixes (/admin/prefixes/save); empty: none are kept"
        ),
    ] = ""
    tune: Annotated[
        bool, Meta(description="Measure this machine at the first start with a model, and use what it found")
    ] = True
    tune_budget_s: Annotated[
        float, Meta(ge=1, description="Most seconds the first start may measure, beside loading the model")
    ] = 15.0


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How it is offered over HTTP."""

    host: Annotated[str, Meta(description="Address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: any free one")] = 18081
    queue_size: Annotated[int, Meta(ge=1, description="Requests that may wait; one more is answered 429")] = (
        1024
    )
    queue_tokens: Annotated[
        int, Meta(ge=0, description="Prompt tokens that may wait; beyond them 429; 0: no limit")
    ] = 1 << 20
    max_timeout_s: Annotated[
        float,
        Meta(ge=0, description="Most seconds of one request from acceptance to its last token; 0: no limit"),
    ] = 600.0
    slow_reader_s: Annotated[
        float, Meta(gt=0, description="A stream whose client takes nothing for this long is ended, seconds")
    ] = 30.0
    max_body_mb: Annotated[int, Meta(ge=1, description="Largest request body, MiB")] = 8
    drain_s: Annotated[
        float, Meta(ge=0, description="How long running requests may finish after SIGTERM, seconds")
    ] = 30.0
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    api_keys: Annotated[
        str, Meta(description="TOML file of API keys (`cllm keys new` writes it); SIGHUP reads it again")
    ] = ""
    api_key: Annotated[
        str, Meta(description="API key, or several with commas between; better by CLLM_API_KEY than here")
    ] = ""
    allowed_hosts: Annotated[
        str, Meta(description="Host names clients may use, with commas between; '*.lan' and '*' work too")
    ] = ""
    cors_origins: Annotated[
        str, Meta(description="Web origins whose pages may call this server, with commas between; '*': all")
    ] = ""
    model_dir: Annotated[
        str, Meta(description="Folder whose GGUF files /admin/reload may load; empty: only the served one")
    ] = ""
    tls_cert: Annotated[str, Meta(description="Certificate chain (PEM); with --tls-key: serve HTTPS")] = ""
    tls_key: Annotated[str, Meta(description="Private key of the certificate (PEM)")] = ""
    header_timeout_s: Annotated[
        float, Meta(ge=0.1, description="How long a client may take to send a request's header, seconds")
    ] = 10.0
    body_timeout_s: Annotated[
        float, Meta(ge=0.1, description="How long a client may take to send a request's body, seconds")
    ] = 30.0
    keep_alive_s: Annotated[
        float, Meta(ge=0, description="How long a connection may stay open between two requests, seconds")
    ] = 30.0
    max_header_kb: Annotated[int, Meta(ge=1, le=1024, description="Largest request header, KiB")] = 32
    max_connections: Annotated[
        int, Meta(ge=1, description="Connections at a time, as far as file descriptors allow; one more: 503")
    ] = 4096


class Config(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

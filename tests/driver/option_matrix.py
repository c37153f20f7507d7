"""Servers as users start them, and a row for every option of `cllm serve` that changes what runs.

`start_plain` starts a server without any of the settings that the other tests have. `ROWS` sets one option at
a time on top of it, `REASONS` says why an option has no row; `tests/unit/cli/test_option_matrix.py` fails for
an option that has neither. `proof/option_matrix.py` runs all rows.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trustme

from cllm.build.toolchain import cache_directory
from tests.driver.server import PATIENCE_S, SERVE, Server, wait_for
from tests.tiny_architectures import make_experts, make_hybrid, make_rollback_hybrid
from tests.tiny_encoders import make_encoder, make_reranker
from tests.tiny_media import make_causal
from tests.tiny_models import make_dense, make_recurrent, make_sliding_window

KEY, OTHER_KEY = "key-of-the-matrix", "another-key"
ANSWER = 24  # tokens
# Greedy text of a repeated prompt is drafted by n-gram lookup; it is longer than the smallest step.
LONG_PROMPT = "one and the same sentence again and again, " * 8
IDLE_S = 0.15  # a dozen steps of an engine that has nothing to do
# The variables that `environment` adds change what runs; where the library is must be known.
_NO_SETTINGS = (
    "import os; [os.environ.pop(name) for name in list(os.environ) "
    "if name.startswith('CLLM_') and name != 'CLLM_LIBRARY']; "
)


# Servers ----------------------------------------------------------------------------------------------------


def own_cache(folder: Path) -> dict[str, Any]:
    """Variables that give a server empty caches in `folder`; the native library stays where it is."""
    cache = folder / "cllm"
    cache.mkdir(parents=True, exist_ok=True)
    native = cache_directory() / "native"
    if native.is_dir() and not (cache / "native").exists():
        (cache / "native").symlink_to(native)
    hubs = {"HF_HOME": "hf", "HF_HUB_CACHE": "hf/hub", "MODELSCOPE_CACHE": "ms"}
    return {"XDG_CACHE_HOME": str(folder), **{name: str(folder / path) for name, path in hubs.items()}}


@contextmanager
def start_plain(log: Path, cache: Path, *arguments: str) -> Iterator[Server]:
    """Run `cllm serve ARGUMENTS` with no other setting than a free port, and with caches of its own.

    Leaving the block stops the server: the exit code is 0, no worker has died, and nothing was logged as an
    error.
    """
    program = (_NO_SETTINGS + SERVE[0], *SERVE[1:])
    server = Server(log, *arguments, program=program, **own_cache(cache))
    server.client.headers["Authorization"] = f"Bearer {KEY}"
    with server:
        yield server


# Requests ---------------------------------------------------------------------------------------------------


def post(server: Server, path: str, body: Mapping[str, Any], **headers: str) -> Any:
    """Send a request that must succeed; its answer."""
    answer = server.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
    return answer.json()


def chat(server: Server, *contents: str, tokens: int = ANSWER, **fields: Any) -> Any:
    """Send a greedy chat request whose messages alternate between user and assistant; its answer."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, **fields}
    answer = post(server, "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] > 0, answer
    return answer


def get_content(answer: Any) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def stream(server: Server, content: str) -> None:
    """Read a chat stream to its end."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": ANSWER, "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]" and "error" not in json.loads(lines[-2][6:]), lines


def embed(server: Server, content: str) -> None:
    answer = post(server, "/v1/embeddings", {"input": [content, "another"]})
    assert len(answer["data"]) == 2


def rerank(server: Server, content: str) -> None:
    answer = post(server, "/v1/rerank", {"query": "a", "documents": [content, "another"]})
    assert len(answer["results"]) == 2


_ASKS: dict[str, tuple[Callable[..., Any], ...]] = {  # by model; others chat
    "encoder": (embed, embed),
    "reranker": (rerank, rerank),
}


def at_once(*calls: Callable[[], Any]) -> None:
    """Run requests at the same time; each must succeed."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for asked in [pool.submit(call) for call in calls]:
            asked.result(PATIENCE_S)


def wait_idle(server: Server) -> None:
    """Let an engine without requests run its loop for a moment."""
    wait_for(lambda: server.get("/debug/requests") == {"requests": []})
    time.sleep(IDLE_S)


def ask_all(server: Server, model: str = "dense") -> None:
    """Ask once, leave the engine idle, ask twice at the same time, and leave it idle again."""
    first, second = _ASKS.get(model, (chat, stream))
    first(server, "hello")
    wait_idle(server)
    at_once(partial(first, server, LONG_PROMPT), partial(second, server, LONG_PROMPT))
    wait_idle(server)


# What some options are for ----------------------------------------------------------------------------------


def use_embeddings(server: Server) -> None:
    """Embed beside a chat."""
    at_once(*(partial(ask, server, "both at once") for ask in (chat, embed)))


def use_second_turn(server: Server) -> None:
    said = get_content(chat(server, LONG_PROMPT))
    wait_idle(server)
    chat(server, LONG_PROMPT, said, "and then?")


def use_preemption(server: Server) -> None:
    """Two answers need more KV cells than there are."""
    at_once(*(partial(chat, server, each, tokens=400, ignore_eos=True) for each in ("hello", "goodbye")))
    assert server.metrics()["cllm_preemptions_total"] > 0


def use_saved_slot(server: Server) -> None:
    use_second_turn(server)
    slot = server.get("/debug/kv")["cached"][0]["seq_id"]
    saved = post(server, f"/slots/{slot}?action=save", {"filename": "slot.bin"})
    restored = post(server, f"/slots/{slot}?action=restore", {"filename": "slot.bin"})
    assert 0 < saved["n_saved"] == restored["n_restored"]


def use_reload(server: Server) -> None:
    post(server, "/admin/reload", {"model": "sliding.gguf"})
    ask_all(server)


def use_two_keys(server: Server) -> None:
    """The prefix of one tenant serves another."""
    body = {"messages": [{"role": "user", "content": LONG_PROMPT}], "max_tokens": ANSWER}
    answer = post(server, "/v1/chat/completions", body, Authorization=f"Bearer {OTHER_KEY}")
    assert count_cached(answer) > 0


def use_other_model(server: Server) -> None:
    """Ask two models at the same time."""
    models = server.get("/admin/models")["models"]
    at_once(*(partial(chat, server, "hello", model=model["name"]) for model in models[:2]))
    assert len([model for model in server.get("/admin/models")["models"] if model["state"] == "ready"]) == 2


def use_unload(server: Server) -> None:
    """Wait until the model is unloaded; the next request loads it again."""
    wait_for(lambda: server.get("/admin/models")["models"][0]["state"] == "unloaded")
    ask_all(server)


def use_responses(server: Server) -> None:
    post(server, "/v1/responses", {"input": "hello", "max_output_tokens": ANSWER, "store": False})


# Default settings -------------------------------------------------------------------------------------------


def count_cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def run_with_defaults(folder: Path, *model: str) -> None:
    """Run a server as users do, and start it again: it remembers what it has computed."""
    cache = folder / "cache"
    with start_plain(folder / "first", cache, *model) as server:
        ask_all(server)
        said = get_content(chat(server, LONG_PROMPT))
        wait_idle(server)
        assert count_cached(chat(server, LONG_PROMPT, said, "and then?")) > 0
        wait_idle(server)
    assert list(cache.glob("cllm/kv/*/*.kv"))
    with start_plain(folder / "second", cache, *model) as server:
        assert count_cached(chat(server, LONG_PROMPT)) > 0
        assert server.metrics()["cllm_prefix_disk_loads_total"] > 0
        wait_idle(server)


# The rows ---------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An option with a value that is not its default; other words make it count.

    Options that touch neither the engine nor each other share a row: a start takes a second or two.
    """

    options: str  # names of their parameters
    words: str  # of the command line; {name} stands for a path of `make_places`
    model: str = "dense"
    use: Callable[[Server], None] | None = None  # what the option is for, after the usual requests
    risky: bool = False  # also part of `make test`

    @property
    def label(self) -> str:
        """Its words without dashes and braces, and its model if that is not the usual one."""
        words = re.sub(r"--|[{}]", "", self.words).split()
        return "-".join(words if self.model in ("", "dense") else [*words, "on", self.model])[:80]


_KEYS = f"--api-key {KEY}"
_CROWDED = "--parallel 2 --unified-kv --ctx-size 512 --max-request-tokens 448"

ROWS = (
    # Model
    Row("model", "", "folder", use_other_model),
    Row("more", "{sliding}", use=use_other_model),
    Row("offline", "--offline"),
    Row("alias", "--alias named,called"),
    Row("tags", "--tags small,fast"),
    Row("mmproj", "--mmproj {mmproj}"),
    Row("no_mmproj", "--no-mmproj --mmproj {mmproj}"),
    Row("media_hosts", "--media-hosts example.org,*.example.com --mmproj {mmproj}"),
    Row("chat_template", "--chat-template chatml"),
    Row("chat_template", "--chat-template {template}"),
    Row("gpu_layers", "--gpu-layers 0"),
    Row("gpu_layers", "--gpu-layers all"),
    Row("tensor_split", "--tensor-split 1"),
    Row("split_mode", "--split-mode none"),
    Row("split_mode", "--split-mode row"),
    Row("main_gpu", "--main-gpu 1 --gpu-layers 0"),
    Row("n_cpu_moe", "--n-cpu-moe 1", "experts"),
    Row("override_tensor", "--override-tensor blk.0.ffn_up_exps=CPU", "experts"),
    Row("load_mode", "--load-mode none"),
    Row("load_mode", "--load-mode mmap+mlock"),
    Row("override_kv", "--override-kv llama.rope.freq_base=float:20000"),
    Row("threads", "--threads 1"),
    Row("threads", "--threads 2"),
    Row("max_threads", "--max-threads 1"),
    Row("poll", "--poll 0"),
    Row("poll", "--poll 100"),
    Row("flash_attention", "--no-flash-attention"),
    Row("extra_buffers", "--extra-buffers"),
    Row("extra_buffers", "--no-extra-buffers"),
    Row("own_kernels", "--no-own-kernels"),
    Row("pooling", "--pooling mean", use=use_embeddings),
    Row("pooling", "--pooling last", use=use_embeddings),
    Row("pooling", "--pooling cls", "encoder"),
    Row("pooling", "--pooling rank", "reranker"),
    Row("pooling", "--pooling none", use=use_second_turn),
    # Context
    Row("parallel", "--parallel 1"),
    Row("parallel", "--parallel 32"),
    Row("slots", "--slots 12 --parallel 2"),
    Row("ctx_size", "--ctx-size 4096"),
    Row("max_request_tokens", "--max-request-tokens 512"),
    Row("embed_tokens", "--embed-tokens 128", use=use_embeddings),
    Row("embed_tokens", "--embed-tokens 512", "encoder"),
    Row("batch_tokens", "--batch-tokens 32"),
    Row("batch_tokens", "--batch-tokens 32", "hybrid"),
    Row("batch_tokens", "--batch-tokens 4096"),
    Row("target_itl_ms", "--target-itl-ms 1"),
    Row("max_itl_ms", "--max-itl-ms 2000"),
    Row("unified_kv", "--unified-kv"),
    Row("unified_kv", "--unified-kv", "sliding"),
    Row("unified_kv", "--unified-kv", "recurrent"),
    Row("cache_type_k", "--cache-type-k q8_0"),
    Row("cache_type_k", "--cache-type-k bf16 --no-flash-attention"),
    Row("cache_type_v", "--cache-type-v q8_0"),
    *(
        Row("cache_type_v", f"--cache-type-k {each} --cache-type-v {each}")
        for each in ("f32", "q5_1", "q4_0", "iq4_nl")
    ),
    Row("rope_scaling rope_scale", "--rope-scaling yarn --rope-scale 4", use=use_second_turn),
    Row("yarn_orig_ctx", "--yarn-orig-ctx 2048 --rope-scaling yarn --rope-scale 2"),
    Row("rope_freq_base", "--rope-freq-base 20000"),
    Row("yarn_ext_factor yarn_attn_factor", "--yarn-ext-factor 0 --yarn-attn-factor 1.1 --rope-scaling yarn"),
    Row("yarn_beta_fast yarn_beta_slow", "--yarn-beta-fast 16 --yarn-beta-slow 2 --rope-scaling yarn"),
    # Cache
    Row("prefix_cache", "--no-prefix-cache", use=use_second_turn),
    Row("cache_ram_mb", "--cache-ram-mb 0", use=use_second_turn),
    Row("cache_ram_mb", "--cache-ram-mb 1", use=use_second_turn),
    Row("swap_space_mb", f"--swap-space-mb 0 {_CROWDED}", use=use_preemption),
    Row("swap_space_mb", f"--swap-space-mb 1 {_CROWDED}", use=use_preemption, risky=True),
    Row("cache_disk_mb", "--cache-disk-mb 0", use=use_second_turn),
    Row("cache_disk_mb", "--cache-disk-mb 1", use=use_second_turn),
    Row("cache_dir", "--cache-dir {scratch} --cache-disk-mb 64", use=use_saved_slot),
    Row(
        "share_prefixes_across_tenants",
        f"--share-prefixes-across-tenants --api-keys {{keys}} --api-key {OTHER_KEY}",
        use=use_two_keys,
    ),
    # Speculation
    Row("draft", "--draft off"),
    Row("draft_tokens", "--draft-tokens 0"),
    Row("draft_tokens", "--draft-tokens 64"),
    Row("draft_rollback", "--draft-rollback 4", "rollback"),
    Row("draft_rollback", "--draft-rollback 4 --unified-kv", "rollback"),
    Row("draft_rollback", "--draft-rollback 4"),
    Row("draft_model", "--draft-model {dense}", risky=True),
    Row("draft_model", "--draft-model {dense} --draft-tokens 1 --parallel 1"),
    Row("draft_model", "--draft-model {dense} --unified-kv --draft-tokens 64"),
    # Server
    Row("host", "--host 127.0.0.1,127.0.0.2"),
    Row("host", f"--host 0.0.0.0 {_KEYS}"),  # without keys, /debug and /metrics are for loopback
    Row("log_level", "--log-level debug"),
    Row("log_level", "--log-level error"),
    Row("otlp_endpoint", "--otlp-endpoint http://127.0.0.1:9"),
    Row("model_dir", "--model-dir {folder}", use=use_reload),
    Row("all", "--all --model-dir {folder}", "", use_other_model),
    Row("models_memory_mb", "--models-memory-mb 4000", "folder", use_other_model),
    Row("sleep_idle_s", "--sleep-idle-s 1", use=use_unload),
    Row("job_store_mb response_ttl", "--job-store-mb 0 --response-ttl 1", use=use_responses),
    Row("state_dir", "--state-dir {scratch} --job-store-mb 1", use=use_responses),
    Row("reconnect_s", "--reconnect-s 60"),
    Row("keep_alive_s max_timeout_s drain_s", "--keep-alive-s 0 --max-timeout-s 0 --drain-s 0"),
    Row(
        "queue_size queue_tokens slow_reader_s max_body_mb max_header_kb header_timeout_s body_timeout_s "
        "max_connections",
        "--queue-size 1 --queue-tokens 1024 --slow-reader-s 1 --max-body-mb 1 --max-header-kb 1 "
        "--header-timeout-s 1 --body-timeout-s 1 --max-connections 4",
    ),
    # Security
    Row("api_keys", "--api-keys {keys}"),
    Row("api_key", _KEYS),
    Row("open_routes", f"--open-routes /metrics,-/slots {_KEYS}"),
    Row("allowed_hosts cors_origins", "--allowed-hosts 127.0.0.1,*.lan --cors-origins *"),
    Row("defaults", '--defaults {{"temperature":0.2,"top_k":5}}'),
    Row("tls_cert tls_key", "--tls-cert {cert} --tls-key {key}"),
    # Other
    Row("config_file", "--config {config}", ""),
)
REASONS = {
    "port": "every server of the matrix has --port 0",
    "cluster": "needs a Ray cluster: `proof/cluster.py`, and tests/e2e/test_cluster.py without Ray",
    "adapter": "its files are made by tests/e2e/test_adapters.py, which tries it",
    "apply_adapters": "the same",
    "adapter_mb": "the same",
    "help_all": "prints and exits",
}
RISKY = tuple(row for row in ROWS if row.risky)


def make_places(folder: Path) -> dict[str, str]:
    """Write the files that rows name; their paths by name."""
    both, probes, scratch, media = (folder / name for name in ("both", "probes", "scratch", "media"))
    for each in (both, probes, scratch, media):
        each.mkdir()
    paths = {
        "dense": make_dense(folder / "dense.gguf"),
        "sliding": make_sliding_window(folder / "sliding.gguf"),
        "recurrent": make_recurrent(folder / "recurrent.gguf"),
        "hybrid": make_hybrid(folder / "hybrid.gguf"),
        "rollback": make_rollback_hybrid(folder / "rollback.gguf"),
        "experts": make_experts(folder / "experts.gguf"),
        "encoder": make_encoder(folder / "encoder.gguf"),
        "reranker": make_reranker(folder / "reranker.gguf"),
        "mmproj": make_causal(media).mmproj,
        "folder": both,
        "probes": probes,
        "scratch": scratch,
    }
    for name in ("dense", "sliding"):
        (both / paths[name].name).hardlink_to(paths[name])
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    texts = {
        "template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        "keys": f'[me]\nhash = "sha256:{hashed}"\nrole = "admin"\n',
        "config": f'model = "{paths["dense"]}"\nbatch-tokens = 64\n[server]\nqueue-size = 9\n',
    }
    for name, text in texts.items():
        paths[name] = folder / name
        paths[name].write_text(text)
    issued = trustme.CA().issue_cert("127.0.0.1")
    paths["cert"], paths["key"] = folder / "cert.pem", folder / "key.pem"
    paths["cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(paths["key"])
    return {name: str(path) for name, path in paths.items()}


def get_arguments(row: Row, places: Mapping[str, str]) -> list[str]:
    """The command line of a row."""
    model = [places[row.model]] if row.model else []
    return [*model, *(word.format_map(places) for word in row.words.split())]


def run_row(row: Row, places: Mapping[str, str], folder: Path) -> None:
    """Start a server with a row's option, ask it, use the option, and stop the server.

    Rows share what the probe has found: most of them would only repeat it.
    """
    (folder / "cache" / "cllm").mkdir(parents=True)
    (folder / "cache" / "cllm" / "probes").symlink_to(places["probes"])
    with start_plain(folder / "log", folder / "cache", *get_arguments(row, places)) as server:
        ask_all(server, row.model)
        if row.use is not None:
            row.use(server)
            wait_idle(server)

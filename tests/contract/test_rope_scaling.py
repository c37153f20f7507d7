"""RoPE scaling and metadata overrides reach llama.cpp: its logits, the longest request, the KV on disk."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.build.build import find_built
from cllm.config import EngineConfig
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.errors import ConfigError
from tests.driver.engine import StepDriver, ask, words
from tests.driver.runner import feed
from tests.driver.server import environment, wait_for
from tests.tiny_models import make_dense

TRAINED = 256
PROMPT = words(3, 3 * TRAINED)  # most of it beyond the context of training
YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_scale": 4.0}
CLOSE = 2e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(tmp_path_factory.mktemp("rope") / "short.gguf", context=TRAINED)


def make_config(model: Path, **settings: Any) -> EngineConfig:
    exact: dict[str, Any] = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
    return EngineConfig(
        model=str(model), parallel=1, ctx_size=4 * TRAINED, threads=1, gpu_layers=0, **exact, **settings
    )


@contextmanager
def opened(model: Path, **settings: Any) -> Iterator[LlamaRunner]:
    runner = LlamaRunner(make_config(model, **settings))
    try:
        yield runner
    finally:
        runner.close()


def top_logprobs(runner: LlamaRunner, tokens: tuple[int, ...]) -> dict[int, float]:
    found = feed(runner, 0, tokens, logprobs=8)
    assert found is not None
    return dict(found.top)


@pytest.mark.parametrize(
    "settings",
    [
        YARN,
        {"rope_scale": 4.0},
        {**YARN, "yarn_orig_ctx": 128},
        {**YARN, "yarn_ext_factor": 0.5},
        {**YARN, "yarn_ext_factor": 0.0, "yarn_attn_factor": 1.5},
        {**YARN, "yarn_beta_fast": 8.0},
        {**YARN, "yarn_beta_slow": 4.0},
        {"rope_freq_base": 80000.0},
    ],
    ids=str,
)
def test_each_rope_setting_changes_the_logits_and_the_kv_on_disk(
    model: Path, settings: dict[str, Any]
) -> None:
    base = YARN if settings != YARN and settings.get("rope_scaling") else {}
    prompt = PROMPT[:200]
    with opened(model, **base) as plain, opened(model, **settings) as scaled:
        assert top_logprobs(plain, prompt) != top_logprobs(scaled, prompt)
        assert plain.state_fingerprint() != scaled.state_fingerprint()


def test_kv_on_disk_serves_the_same_factors_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVTransfer, "DEFAULT_TOKEN_S", 0.1)  # to compute, in the eyes of the cost model
    for settings, cached in ((YARN, 0), (YARN, 149), ({**YARN, "rope_scale": 2.0}, 0), ({}, 0)):
        with opened(model, **settings) as runner:
            driver = StepDriver(runner, cache_mb=64, cache_disk_mb=64, cache_dir=str(tmp_path))
            driver.submit(ask("same", PROMPT[:150], 20, ignore_eos=True))
            assert driver.finish()["same"].work.cached_tokens == cached
            driver.close_disk()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, TRAINED),
        (YARN, 4 * TRAINED),
        ({"rope_scale": 2.0}, 2 * TRAINED),
        ({**YARN, "yarn_orig_ctx": 128}, 512),
        ({"rope_scaling": "none", "rope_scale": 4.0}, TRAINED),
        ({"override_kv": ("llama.context_length=int:512",)}, 512),
    ],
    ids=str,
)
def test_a_request_may_be_as_long_as_the_scaled_context(
    model: Path, settings: dict[str, Any], expected: int
) -> None:
    config = make_config(model, **settings)
    with opened(model, **settings) as runner:
        assert runner.limits.request_tokens == runner.info.context_train == expected
    assert GgufHeader.of(config).context_train == expected
    chosen = prepare(EngineConfig(model=str(model), parallel=1, gpu_layers=0, **settings), ())
    assert chosen.ctx_size == max(256, expected), "as many cells as one request may use"


def test_an_override_replaces_metadata_of_the_file(model: Path) -> None:
    with opened(model) as plain, opened(model, override_kv=("llama.rope.freq_base=float:80000",)) as changed:
        with opened(model, rope_freq_base=80000.0) as same:
            prompt = PROMPT[:200]
            expected = top_logprobs(same, prompt)
            assert top_logprobs(changed, prompt) == expected != top_logprobs(plain, prompt)
        assert changed.state_fingerprint() != plain.state_fingerprint()
        assert plain.vocabulary.tokenize("a", add_special=True, parse_special=False) == [97]
    begins = ("tokenizer.ggml.add_bos_token=bool:true",)
    with opened(model, override_kv=begins) as changed:
        assert changed.vocabulary.tokenize("a", add_special=True, parse_special=False) == [256, 97]


def test_an_override_of_another_type_is_refused_before_loading(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama.context_length is of type int"):
        prepare(make_config(model, override_kv=("llama.context_length=str:long",)), ())


@pytest.mark.parametrize("mode", ["none", "mmap", "mlock", "mmap+mlock", "dio"])
def test_the_way_of_loading_changes_no_logits(model: Path, mode: str) -> None:
    with opened(model) as plain, opened(model, load_mode=mode) as loaded:
        assert top_logprobs(loaded, PROMPT[:40]) == top_logprobs(plain, PROMPT[:40])


@contextmanager
def llama_server(model: Path, log: Path, *flags: str) -> Iterator[httpx.Client]:
    """llama.cpp's own server on a free port; skips where none was built."""
    executable = (find_built() or Path()) / "bin" / "llama-server"
    if not executable.is_file():
        pytest.skip("no llama-server is built (`cllm build --with-server`)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    plain = "-c 1024 -np 1 -t 1 -fa off -ctk f32 -ctv f32 --no-webui --offline --host 127.0.0.1"
    command = [str(executable), "-m", str(model), "--port", str(port), *plain.split(), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for(is_ready)
            yield client
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (YARN, "--rope-scaling yarn --rope-scale 4"),
        (
            {**YARN, "yarn_orig_ctx": 192, "yarn_ext_factor": 0.5, "yarn_beta_fast": 9, "yarn_beta_slow": 2},
            "--rope-scaling yarn --rope-freq-scale 0.25 --yarn-orig-ctx 192 --yarn-ext-factor 0.5 "
            "--yarn-beta-fast 9 --yarn-beta-slow 2",
        ),
        ({"rope_scale": 4.0, "rope_freq_base": 20000.0}, "--rope-scale 4 --rope-freq-base 20000"),
    ],
    ids=("yarn", "yarn-factors", "linear"),
)
def test_logits_equal_those_of_llama_server(
    model: Path, tmp_path: Path, settings: dict[str, Any], flags: str
) -> None:
    beyond = (TRAINED + 40, 700) if "rope_scaling" in settings else ()  # which it allows with YaRN alone
    with llama_server(model, tmp_path / "log", *flags.split()) as client:
        for length in (100, 240, *beyond):
            body = {"prompt": list(PROMPT[:length]), "n_predict": 1, "n_probs": 8, "cache_prompt": False}
            # It says nothing of a token that is a part of a character. Logprobs are the model's own.
            answer = client.post("/completion", json={**body, "grammar": "root ::= [a-z]+"}).json()
            (entry,) = answer["completion_probabilities"]
            theirs = {each["id"]: each["logprob"] for each in entry["top_logprobs"]}
            with opened(model, **settings) as runner:
                assert top_logprobs(runner, PROMPT[:length]) == pytest.approx(theirs, abs=CLOSE)

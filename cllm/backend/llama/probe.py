"""Probe: does this library run this model on this CPU? Tried in a process that may die of it."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import msgspec

from cllm.backend.llama.fingerprint import library_digest, sample_digest
from cllm.backend.llama.gguf import TABLES
from cllm.backend.llama.kernels import choose_buffers
from cllm.backend.llama.library import find, may_use_gpu, run_apart
from cllm.backend.llama.memory import prepare
from cllm.backend.llama.placement import list_devices, wants_gpu
from cllm.build.module import find_modules
from cllm.build.toolchain import cache_directory, write_record
from cllm.config import EngineConfig
from cllm.errors import ConfigError, LibraryError, ModelFileError

log = logging.getLogger(__name__)
PROBE_LIMIT_S = 600.0
PROBE_TOKENS = 4
WRONG_SETTINGS = "configuration:"
WITHOUT_GPU = "without the GPU (--gpu-layers 0)"


class ProbeResult(msgspec.Struct, frozen=True):
    """The result of a probe. `detail` is the reason of a failure."""

    passed: bool
    detail: str = ""
    tokens_per_second: float = 0.0


class ProbeRecord(msgspec.Struct, frozen=True):
    """The result of a probe as it is kept: the number of the settings that passed."""

    chosen: Annotated[int, msgspec.Meta(ge=0)]


def settings_to_try(config: EngineConfig) -> list[tuple[str, EngineConfig]]:
    """The settings asked for, then safer and safer ones, each with a name for the operator.

    The GPU is the first to be left out. Where the library lists none, it is not even tried.
    """
    tried = [("as configured", config)]
    if wants_gpu(config) and may_use_gpu():
        config = msgspec.structs.replace(config, gpu_layers=0)
        tried = [*tried, (WITHOUT_GPU, config)] if list_devices() else [("as configured", config)]
    plain = msgspec.structs.replace(config, own_kernels=False)
    safe = msgspec.structs.replace(plain, extra_buffers=False)
    safest = msgspec.structs.replace(safe, flash_attention=False, threads=1)
    return [
        *tried,
        ("with llama.cpp's kernels (--no-own-kernels)", plain),
        ("without repacked weights (--no-extra-buffers)", safe),
        ("without flash attention, one thread", safest),
    ]


def run_probe(config: EngineConfig) -> ProbeResult:
    """Load the model and decode a few tokens in a throw-away process."""
    small = msgspec.structs.replace(config, parallel=1, slots=0, ctx_size=512, max_request_tokens=0)
    try:
        speed = run_apart("cllm.backend.llama.probe", msgspec.json.encode(small), PROBE_LIMIT_S)
    except LibraryError as error:
        return ProbeResult(False, error.message)
    return ProbeResult(True, tokens_per_second=float(speed))


def find_ready(asked: EngineConfig, say: Callable[[str], None]) -> EngineConfig:
    """Prepare the settings asked for and find those that work here. Raises SetupError.

    Where the GPU does not work, others are prepared for the host's memory.
    """
    asked = choose_buffers(asked)
    try:
        placed = prepare(asked)
    except LibraryError as error:
        if not wants_gpu(asked) or not list_devices():
            raise
        log.warning("%s; serving %s, which is slower", error, WITHOUT_GPU)
    else:
        ready = find_working(placed, say)
        if wants_gpu(ready) or not wants_gpu(placed):
            return ready
    return find_working(prepare(msgspec.structs.replace(asked, gpu_layers=0)), say)


def find_working(config: EngineConfig, say: Callable[[str], None]) -> EngineConfig:
    """The first settings that pass the probe; remembered, so the next start does not probe again.

    A GPU that fails is left out by settings that are not probed and not remembered: they must be prepared for
    the host's memory first (`find_ready`), and the next start tries the GPU again.
    Raises LibraryError when none pass; ModelFileError when llama.cpp refuses the file itself; ConfigError for
    settings that no library can serve, as a draft model of another vocabulary.
    """
    path = _record_path(config)
    settings = settings_to_try(config)
    if (record := _read_record(path)) is not None and record.chosen < len(settings):
        return settings[record.chosen][1]
    failures: list[str] = []
    for chosen, (name, attempt) in enumerate(settings):
        if name == WITHOUT_GPU:
            log.warning("%s; serving %s, which is slower", failures[-1], name)
            return attempt
        say(f"probing the native library {name}")
        result = run_probe(attempt)
        if result.passed:
            if failures:
                log.warning("%s; serving %s, which is slower", "; ".join(failures), name)
            try:
                write_record(path, msgspec.json.encode(ProbeRecord(chosen)))
            except OSError as error:
                log.warning("the result of the probe is not kept, so every start probes: %s", error.strerror)
            return attempt
        if result.detail.startswith(WRONG_SETTINGS):
            raise ConfigError(result.detail.removeprefix(WRONG_SETTINGS).strip())
        # A model that cannot be loaded into the GPU may be a file that is right.
        if result.detail.startswith("model:") and WITHOUT_GPU not in dict(settings):
            raise ModelFileError(result.detail.removeprefix("model:").strip())
        failures.append(f"the native library does not work here {name}: {result.detail}")
    raise LibraryError(f"{failures[-1]}; rebuild it with `cllm build --force --portable`")


def _read_record(path: Path) -> ProbeRecord | None:
    """The record of an earlier probe. An unreadable one counts as absent."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProbeRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("an unreadable probe record is ignored: %s", error)
        return None


def _record_path(config: EngineConfig) -> Path:
    """One record for each combination of machine, library, model (wherever it lies) and settings."""
    model, library = Path(config.model), find()
    settings: tuple[object, ...] = (config.extra_buffers, config.own_kernels, config.flash_attention)
    settings += config.threads, config.gpu_layers
    file = (model.stat().st_size, sample_digest(model))
    fingerprint: list[object] = [platform.node(), library, library_digest(library), *file, *settings]
    if wants_gpu(config) and may_use_gpu():  # else as before there were modules: what is remembered is valid
        fingerprint += [library_digest(module.path.parent) for module in find_modules()]
        fingerprint += [(device.name, device.description, device.total) for device in list_devices()]
    digest = hashlib.sha256("\n".join(map(str, fingerprint)).encode()).hexdigest()[:24]
    return cache_directory() / "probes" / f"{digest}.json"


def loaded_variant(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The CPU variant of the library in this process; None where it has none or the system does not say."""
    try:
        found = re.search(r"/libggml-cpu-(\S+)\.so$", maps.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found and found[1]


def unused_features(features: Collection[str], system_info: str) -> list[str]:
    """The features of this CPU that ggml has kernels for and the library was not compiled for."""
    used = set(re.findall(r"\b(\w+) = ", system_info))
    return [name for name, kernel in TABLES["kernels"].items() if name in features and kernel not in used]


def _main() -> int:
    """Run the probe: prints tokens per second, or one line on standard error."""
    from cllm.backend.base import Batch, BatchKind, Row, StepStatus
    from cllm.backend.llama.runner import LlamaRunner
    from cllm.types import SamplingParams

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        runner = LlamaRunner(config)
    except (ModelFileError, LibraryError) as error:
        print(f"model: {error}" if isinstance(error, ModelFileError) else error, file=sys.stderr)
        return 1
    except ConfigError as error:
        print(WRONG_SETTINGS, error, file=sys.stderr)
        return 1
    if runner.info.generates:
        kind, rounds = BatchKind.GENERATE, PROBE_TOKENS
        sampler = runner.create_sampler(SamplingParams(temperature=0, ignore_eos=True))
        # A prompt uses the matrix kernels (where AMX crashed), single tokens the vector kernels.
        text = runner.vocabulary.tokenize("one two three " * 22, add_special=True, parse_special=False)
        tokens = text[: runner.limits.batch_tokens]  # in some vocabularies every letter is a token
    else:
        kind, rounds, sampler, tokens = BatchKind.EMBED, 1, None, [0] * PROBE_TOKENS
    position, started = 0, time.perf_counter()
    for _ in range(rounds):
        result = runner.run(Batch((Row(0, position, tokens, 1, sampler),), kind))
        if result.status is not StepStatus.DONE:
            print(f"llama_decode returned {result.code}", file=sys.stderr)
            return 1
        position += len(tokens)
        tokens = list(result.rows[0].tokens)
    print(PROBE_TOKENS / (time.perf_counter() - started))
    return 0


if __name__ == "__main__":
    sys.exit(_main())

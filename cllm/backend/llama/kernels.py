"""Kernels: the speed of ggml's matrix products here, by tensor type, with plain and with repacked weights.

Which type has a fast kernel differs from one CPU to the next. Measured once in a process that may die of it,
in less than a second; remembered for a build of the library, a CPU and a number of threads.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from cllm.backend.llama.fingerprint import library_digest
from cllm.backend.llama.gguf import TENSOR_TYPES, TYPE_NAMES, GgufHeader
from cllm.backend.llama.library import find, load, run_apart
from cllm.backend.llama.threads import compute_threads, measurable_cores, read_cpu_times
from cllm.build.options import features, machine
from cllm.build.toolchain import cache_directory, write_record
from cllm.config import EngineConfig
from cllm.errors import LibraryError

log = logging.getLogger(__name__)
LIMIT_S = 60.0
ROWS, COLUMNS, MATRICES = 1024, 2048, 2  # 4 million weights: more than a core's own cache
STEPS = (64, 8, 1)  # tokens: of a prompt, of 8 decoding rows, of a single one
ROUNDS = 5  # the fastest counts: others were disturbed
ENOUGH_S = 1.0  # two rounds suffice where they take longer
MAX_OTHERS = 0.25  # cores that other programs may use meanwhile
MIN_SHARE = 0.02  # of the weights; the types of fewer do not count
MIN_GAIN = 1.05  # of plain weights over repacked ones
NOTABLE_GAIN, NO_LOSS = 1.5, 0.9  # prefill and decode of another type that `describe_types` names
COMMON = ("Q8_0", "Q6_K", "Q4_K", "Q4_0")  # files of each are usual


class Speed(NamedTuple):
    """Microseconds for a million weights and a token: of a prompt, of 8 decoding rows, of a single one."""

    prompt: float
    decode: float
    single: float

    def compare(self, other: Speed) -> tuple[float, float]:
        """How many times as fast the other one is: prefill, decode."""
        return self.prompt / other.prompt, math.sqrt(self.decode / other.decode * self.single / other.single)


class TypeSpeed(NamedTuple):
    """Speed of a tensor type. Without a kernel for repacked weights they stay plain."""

    plain: Speed
    repacked: Speed | None = None

    def get(self, repack: bool) -> Speed:
        return self.repacked if repack and self.repacked else self.plain


Speeds = Mapping[str, TypeSpeed]  # by the names of types
Weights = Mapping[str, int]  # likewise: their number


def count_weights(header: GgufHeader) -> Weights:
    """Count the weights of a model by tensor type, without types that hardly any have."""
    found: Counter[str] = Counter()
    for tensor in header.tensors:
        if tensor.weights:
            found[TYPE_NAMES[tensor.type_id]] += tensor.weights
    return {name: count for name, count in found.items() if count >= MIN_SHARE * found.total()}


def sum_up(weights: Weights, speeds: Speeds, repack: bool) -> Speed:
    """Speed of a model, as a mean over its weights."""
    total = sum(weights.values())
    parts = [[s * count / total for s in speeds[name].get(repack)] for name, count in weights.items()]
    return Speed(*map(sum, zip(*parts, strict=True)))


def repacking_pays(weights: Weights, speeds: Speeds) -> bool:
    """Return False if plain weights are faster, prefill and decode counted alike."""
    gains = sum_up(weights, speeds, True).compare(sum_up(weights, speeds, False))
    return math.sqrt(math.prod(gains)) < MIN_GAIN


def get_speed(weights: Weights, speeds: Speeds) -> Speed:
    """Speed of a model with its weights as they are served."""
    return sum_up(weights, speeds, repacking_pays(weights, speeds))


def choose_buffers(config: EngineConfig) -> EngineConfig:
    """Choose repacked or plain weights where the settings do not say. Raises ModelFileError."""
    if config.extra_buffers is not None:
        return config
    repack = True
    if weights := count_weights(GgufHeader.of(config)):
        try:
            repack = repacking_pays(weights, time_types(weights, compute_threads(config)))
        except LibraryError as error:
            log.warning("matrix products cannot be timed, so weights are repacked: %s", error)
    return msgspec.structs.replace(config, extra_buffers=repack)


def describe_types(header: GgufHeader, threads: int) -> Iterator[str]:
    """Describe each tensor type of a model: its cost here, and a type that would be faster."""
    weights = count_weights(header)
    speeds = time_types({*weights, *COMMON}, threads)
    for name, count in weights.items():
        own = get_speed({name: count}, speeds)
        part = f"{name}, {count / sum(weights.values()):.0%} of the weights"
        found = f"{part}: prompt {own.prompt:.1f}, decode {own.decode:.1f} µs a million weights and token"
        for other in COMMON:  # the largest first: it loses the least
            prefill, decode = own.compare(get_speed({other: 1}, speeds))
            if prefill >= NOTABLE_GAIN and decode >= NO_LOSS:
                found += f"; {other} would prefill {prefill:.1f} × and decode {decode:.1f} × as fast"
                break
        yield found


def time_types(types: Collection[str], threads: int) -> Speeds:
    """Speeds of tensor types: as remembered, else all are measured together. Raises LibraryError."""
    key = (library_digest(find()), machine(), *features(), str(threads))
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:24]
    path, known = cache_directory() / "kernels" / f"{digest}.json", {}
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, TypeSpeed])
    if set(types) <= known.keys():
        return known
    answer = run_apart("cllm.backend.llama.kernels", msgspec.json.encode((sorted(types), threads)), LIMIT_S)
    found, used = msgspec.json.decode(answer, type=tuple[dict[str, TypeSpeed], int])
    if used == threads:  # else the machine is busy, and another start measures again
        try:
            write_record(path, msgspec.json.encode(known | found))
        except OSError as error:
            log.warning("timings are not kept, so every start measures: %s", error.strerror)
    return found


# In the process itself -----------------------------------------------------------------------------


class _Products:
    """Matrix products by ggml's CPU backend."""

    def __init__(self, threads: int) -> None:
        self._api = api = load().api
        registry = api.ggml_backend_reg_by_name(b"CPU")
        self._device = device = api.ggml_backend_reg_dev_get(registry, 0)
        self._backend = api.ggml_backend_dev_init(device, None)
        find_function = partial(api.ggml_backend_reg_get_proc_address, registry)
        api.ggml_backend_set_n_threads_t(find_function(b"ggml_backend_set_n_threads"))(self._backend, threads)
        params = api.ggml_threadpool_params()
        api.ggml_threadpool_params_init(params, threads)
        api.ggml_backend_cpu_set_threadpool(self._backend, api.ggml_threadpool_new(params))
        found = api.ggml_backend_dev_get_extra_bufts_t(find_function(b"ggml_backend_dev_get_extra_bufts"))
        listed = found(device)  # it ends with a NULL
        self.extra_buffers = list(itertools.takewhile(bool, (listed[i] for i in itertools.count())))

    def make(self, kind: int, extra: Any = None) -> list[Any]:
        """Make a graph for each number of tokens; none where an extra buffer has no kernel for the type."""
        import numpy as np

        api, plain = self._api, self._api.ggml_backend_cpu_buffer_type()
        context = self._new_context()
        weights = [api.ggml_new_tensor_2d(context, kind, COLUMNS, ROWS) for _ in range(MATRICES)]
        api.ggml_backend_alloc_ctx_tensors_from_buft(context, extra or plain)
        graphs = []
        for tokens in STEPS:
            context = self._new_context()
            inputs = api.ggml_new_tensor_2d(context, TENSOR_TYPES["F32"].id, COLUMNS, tokens)
            products = [api.ggml_mul_mat(context, matrix, inputs) for matrix in weights]
            api.ggml_backend_alloc_ctx_tensors_from_buft(context, plain)
            if not all(api.ggml_backend_dev_supports_op(self._device, product) for product in products):
                return []
            ones = np.ones(COLUMNS * tokens, np.float32)
            api.ggml_backend_tensor_set(inputs, ones.ctypes.data, 0, ones.nbytes)
            graphs.append(api.ggml_new_graph(context))
            for product in products:
                api.ggml_build_forward_expand(graphs[-1], product)
        # Random weights. Read as numbers of any type these bytes are small, and none is denormal or infinite.
        size = api.ggml_nbytes(weights[0])
        data = np.random.default_rng(0).integers(0x20, 0x40, size, np.uint8)
        for matrix in weights:
            api.ggml_backend_tensor_set(matrix, data.ctypes.data, 0, size)
        return graphs

    def _new_context(self) -> Any:
        return self._api.ggml_init(self._api.ggml_init_params(mem_size=1 << 20, no_alloc=True))

    def run(self, graph: Any) -> None:
        code = self._api.ggml_backend_graph_compute(self._backend, graph)
        assert code == 0, code


def measure(types: Sequence[str], threads: int) -> Speeds:
    """Measure in this process. All cases take turns: what disturbs one disturbs all."""
    products = _Products(threads)
    cases: dict[tuple[str, bool], list[Any]] = {}
    for name in types:
        kind = TENSOR_TYPES[name].id
        cases[name, False] = products.make(kind)
        # llama.cpp takes the first that has a kernel.
        extra = (products.make(kind, each) for each in products.extra_buffers)
        cases[name, True] = next(filter(None, extra), [])
    # A thread alone waits for no other: its computing time is right on a busy machine, too.
    clock = time.process_time if threads == 1 else time.perf_counter
    fastest = {case: [math.inf] * len(graphs) for case, graphs in cases.items()}
    ends = time.monotonic() + ENOUGH_S
    for number in range(ROUNDS):
        for case, graphs in cases.items():
            for place, graph in enumerate(graphs):
                began = clock()
                products.run(graph)
                fastest[case][place] = min(fastest[case][place], clock() - began)
        if number and time.monotonic() > ends:
            break
    scale = 1e12 / (ROWS * COLUMNS * MATRICES)
    speeds = {
        case: Speed(*(scale * s / tokens for s, tokens in zip(found, STEPS, strict=True)))
        for case, found in fastest.items()
        if found
    }
    return {name: TypeSpeed(speeds[name, False], speeds.get((name, True))) for name in types}


def measure_quiet(types: Sequence[str], threads: int) -> tuple[Speeds, int]:
    """Measure; where other programs take a core meanwhile, again with one thread. Returns threads, too.

    Threads that wait for each other on busy cores say nothing about kernels.
    """
    read = partial(read_cpu_times, measurable_cores())
    before = read()
    speeds = measure(types, threads)
    after = read()
    if threads > 1 and before is not None and after is not None:
        others = after.busy - before.busy - (after.own - before.own)
        if others > MAX_OTHERS * (after.now - before.now):
            return measure(types, 1), 1
    return speeds, threads


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[list[str], int])
    sys.stdout.buffer.write(msgspec.json.encode(measure_quiet(*asked)))

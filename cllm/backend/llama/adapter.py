"""LoRA adapters of a context: checked in Python before native code reads them, loaded, and switched."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from cllm.adapters import Adapter, split_key
from cllm.backend.llama.gguf import TENSOR_TYPES, GgufFile, GgufHeader, Tensor
from cllm.backend.llama.library import Owned, load_members
from cllm.backend.llama.model import LlamaModel
from cllm.errors import AdapterRefused, ModelFileError

A, B = ".lora_a", ".lora_b"
IGNORED = "_norm.weight"  # by llama.cpp
FLOATS = tuple(TENSOR_TYPES[name] for name in ("F32", "F16", "BF16"))
DIGEST = 24  # hexadecimal digits
MAX_GRAPHS = 16  # sets whose graphs are kept, of some MiB each


class LlamaAdapters:
    """Owns the adapters of a model, by digest, and knows the set that a context computes with."""

    def __init__(self, context: Owned, model: LlamaModel, path: Path) -> None:
        self._context, self._model, self._path = context, model, path
        self._loaded: dict[str, Owned] = {}
        self.sizes: dict[str, int] = {}  # bytes, by digest
        self.key = ""  # of the set in use
        self._plans = load_members()
        self._grown = True  # an adapter was loaded for which the context's largest graph may have no room
        self._graphs: dict[str, int] = {}  # of sets that are not in use, by key

    def check(self, adapter: Adapter) -> Adapter:
        """See `ModelRunner.check_adapter`."""
        path = Path(adapter.file)
        try:
            found = _read(path, GgufHeader(self._path))
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST]
        except ModelFileError as error:
            reason = str(error).replace(str(path), path.name)  # the answer may travel further
            raise AdapterRefused(f"adapter {adapter.name}: {reason}") from None
        except OSError as error:
            raise AdapterRefused(f"adapter {adapter.name}: {path.name}: {error.strerror}") from None
        if adapter.digest not in ("", digest):
            changed = f"{path.name} has changed since it was loaded under this name"
            raise AdapterRefused(f"adapter {adapter.name}: {changed}; unload it, and load it again")
        invocation = found.metadata.get("adapter.alora.invocation_tokens", [])
        return replace(adapter, digest=digest, size=found.data_bytes, invocation=tuple(invocation))

    def load(self, adapter: Adapter) -> None:
        """See `ModelRunner.load_adapter`."""
        if adapter.digest in self._loaded:
            return
        api = self._model.api
        if not (pointer := api.llama_adapter_lora_init(self._model.pointer, adapter.file.encode())):
            refused = f"llama.cpp cannot load {Path(adapter.file).name}"
            raise AdapterRefused(f"adapter {adapter.name}: {refused}; CLLM_LOG_LEVEL=debug shows its reasons")
        self._loaded[adapter.digest] = Owned(pointer, api.llama_adapter_lora_free, self._model.deferred_frees)
        self.sizes[adapter.digest] = adapter.size
        self._grown = True

    def unload(self, digest: str) -> None:
        """See `ModelRunner.unload_adapter`."""
        if digest in self._loaded:
            if digest in split_key(self.key):
                self.use("")
            self._loaded.pop(digest).close()
            del self.sizes[digest]

    def use(self, key: str) -> None:
        """Compute with the set of this key from here on.

        llama.cpp plans its largest graphs anew; that of the first set after a load is kept for others.
        """
        scales = split_key(key)
        pointers = (ctypes.c_void_p * len(scales))(*(self._loaded[each].pointer for each in scales))
        values = (ctypes.c_float * len(scales))(*scales.values())
        context = self._context.pointer
        planned = self._plans and not self._grown and not self._plans.cllm_plan_due(context)
        self._model.api.llama_set_adapters_lora(context, pointers, len(scales), values)
        if planned:
            self._plans.cllm_keep_plan(context, len(scales))
            self._graphs[self.key] = self._plans.cllm_swap_graphs(context, self._graphs.pop(key, None))
        elif self._plans and self._plans.cllm_plan_due(context):
            self._grown = False
        self._free_graphs(MAX_GRAPHS if planned else 0)
        self.key = key

    def _free_graphs(self, kept: int) -> None:
        """Free the graphs of sets, but for those used last."""
        while len(self._graphs) > kept:
            self._plans.cllm_free_graphs(self._graphs.pop(next(iter(self._graphs))))

    def close(self) -> None:
        """Free all of them: before the model, which would free them again."""
        self._free_graphs(0)
        for adapter in self._loaded.values():
            adapter.close()


def _read(path: Path, model: GgufHeader) -> GgufFile:
    """The file of an adapter whose tensors belong to this model. Raises ModelFileError."""
    file = GgufFile(path)
    kind, form = (file.metadata.get(key) for key in ("general.type", "adapter.type"))
    if (kind, form) != ("adapter", "lora"):
        raise ModelFileError(f"{path.name} is no LoRA adapter: its types are {kind!r:.20} and {form!r:.20}")
    if (found := file.metadata.get("general.architecture")) != model.architecture:
        raise ModelFileError(f"{path.name} is for {found!r:.40}, and this model is {model.architecture}")
    if not isinstance(file.metadata.get("adapter.alora.invocation_tokens", []), list):
        raise ModelFileError(f"{path.name} has too many invocation tokens")
    weights = {tensor.name: tensor for tensor in model.tensors}
    parts = {tensor.name: tensor for tensor in file.tensors if not tensor.name.endswith(IGNORED)}
    names = {name.removesuffix(A).removesuffix(B) for name in parts}
    doubled = len(parts) != sum(not tensor.name.endswith(IGNORED) for tensor in file.tensors)
    if not names or doubled or len(parts) != 2 * len(names):
        raise ModelFileError(f"{path.name} does not have a pair of matrices for each weight")
    for name in sorted(names):
        _check_pair(path.name, name, parts, weights.get(name))
    return file


def _check_pair(file: str, name: str, parts: Mapping[str, Tensor], weight: Tensor | None) -> None:
    """Check the two matrices of a weight: their shapes, and the rank that they share."""
    if weight is None:
        raise ModelFileError(f"{file} adapts {name}, which this model does not have")
    if not {name + A, name + B} <= parts.keys():
        raise ModelFileError(f"{file} has only one matrix for {name}")
    pair = parts[name + A], parts[name + B]
    a, b, size = ((*tensor.shape, 1, 1, 1)[:3] for tensor in (*pair, weight))
    if name.endswith("token_embd.weight"):  # whose product is the other way round
        fits, rank = (b[1], a[1]) == size[:2], a[0] == b[0]
    else:
        fits, rank = (a[0], b[1]) == size[:2], a[1] == b[0]
    if not fits or {a[2], b[2]} != {size[2]}:  # the last: of experts
        shape = " × ".join(map(str, weight.shape))
        raise ModelFileError(f"{file} is of another model: its {name} is not {shape}")
    if not rank:
        raise ModelFileError(f"{file} is corrupt: the two matrices of {name} differ in their rank")
    if not all((kind := tensor.kind) and (kind in FLOATS or kind.block > 1) for tensor in pair):
        raise ModelFileError(f"{file} is corrupt: the matrices of {name} hold no weights")

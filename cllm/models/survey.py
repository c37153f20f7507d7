"""Survey: the models that a server is to serve: their files, their names, and what their headers say."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cllm.config import ModelConfig
from cllm.errors import ConfigError, ModelFileError
from cllm.models.files import ModelFiles, parse_hub, parse_quant
from cllm.models.resolve import find_by_name, is_path, list_names, resolve
from cllm.models.store import StoredModel, embedded_model, find_stored, scan, scan_folder
from cllm.types import ModelInfo, Pooling

if TYPE_CHECKING:
    from cllm.backend.llama.gguf import GgufHeader

log = logging.getLogger(__name__)


class SurveyedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its name, its file (`config.engine.model`), its header, and the file's time."""

    config: ModelConfig
    info: ModelInfo
    created: int


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The models to serve, and the memory that is free for them, in bytes by device."""

    models: tuple[SurveyedModel, ...]
    memory: dict[str, int] = {}


def survey(models: Sequence[ModelConfig], common: ModelConfig, *, all_models: bool = False) -> Survey:
    """Find every model; one that is named twice is served once. Raises SetupError.

    `common` are the settings of models that have none of their own. With `all_models`, those of the list
    follow, without those that cannot be read.
    """
    from cllm.backend.llama.memory import available_memory
    from cllm.backend.llama.placement import list_devices, wants_gpu

    found: dict[Path, SurveyedModel] = {}
    taken: set[str] = {model.name.lower() for model in models if model.name}
    listed = [*_find_all(models), *((common, stored) for stored in (scan() if all_models else ()))]
    for config, stored in listed:
        if (path := stored.path.absolute()) in found:
            continue
        try:
            found[path] = _describe(config, stored, taken)
        except ModelFileError as error:
            if not all_models:
                raise
            log.warning("%s is not served: %s", stored.name, error)
    if not found:
        raise ConfigError("there is no model to serve: `cllm list` shows those of this machine")
    _check_names([model.config for model in found.values()])
    memory = {"host": host} if (host := available_memory()) is not None else {}
    if any(wants_gpu(model.config.engine) for model in found.values()):
        memory |= {device.name: device.free for device in list_devices()}
    return Survey(models=tuple(found.values()), memory=memory)


def _find_all(models: Sequence[ModelConfig]) -> Iterator[tuple[ModelConfig, StoredModel]]:
    for model in models:
        folder = Path(model.engine.model).expanduser() if model.engine.model else None
        if folder is not None and folder.is_dir() and not model.name:
            yield from ((model, stored) for stored in scan_folder(folder, deep=False))
        else:
            yield model, _find(model.engine.model, offline=model.engine.offline)


def _find(reference: str, *, offline: bool) -> StoredModel:
    """Find the stored model that a reference names; one of a hub that is not here is pulled."""
    if not reference:
        return _from_file("embedded", embedded_model())
    hub = parse_hub(reference)
    if hub is None and not is_path(reference) and not Path(reference).exists():
        return find_by_name(reference)
    path = resolve(reference, offline=offline)
    if hub is not None and (stored := find_stored(hub)) is not None:
        return stored
    return _from_file("folder", path)


def _from_file(source: str, path: Path) -> StoredModel:
    stem = ModelFiles((path.name,), 0, 1).stem
    return StoredModel(source, stem, (path,), 0, parse_quant(path.name), root=path.parent)


def _describe(config: ModelConfig, stored: StoredModel, taken: set[str]) -> SurveyedModel:
    from cllm.backend.llama.gguf import GgufHeader

    header = GgufHeader(stored.path)
    name = config.name
    if not name:
        choices = (stored.stem, stored.name, *(f"{stored.stem}-{number}" for number in range(2, 1000)))
        name = next(choice for choice in choices if choice.lower() not in taken)
        taken.add(name.lower())
    engine = msgspec.structs.replace(config.engine, model=str(stored.path), alias=name)
    names = tuple(dict.fromkeys(list_names(stored)))
    return SurveyedModel(
        config=msgspec.structs.replace(config, name=name, engine=engine, names=names),
        info=read_info(header, name, stored.quant),
        created=int(stored.path.stat().st_mtime),
    )


def _check_names(models: Sequence[ModelConfig]) -> None:
    """Raise ConfigError where a name or alias stands for two models."""
    owners: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if (other := owners.setdefault(name.lower(), model.name)) != model.name:
                raise ConfigError(f"the name {name!r} stands for two models: {other} and {model.name}")


def read_info(header: GgufHeader, name: str, quant: str) -> ModelInfo:
    """Read the information about a model from its header, before it is loaded."""
    metadata = header.metadata
    template = metadata.get("tokenizer.chat_template")
    tools = metadata.get("tokenizer.chat_template.tool_use")
    label = metadata.get("general.size_label")
    size = label if isinstance(label, str) else ""
    vector = header.number("embedding_length")
    return ModelInfo(
        name=name,
        architecture=header.architecture,
        description=" ".join(filter(None, (header.architecture, size, quant))),
        parameters=sum(tensor.weights for tensor in header.tensors),
        size_bytes=header.data_bytes,
        vocabulary_size=header.vocabulary,
        context_train=header.context_train,
        embedding_length=vector,
        layers=header.number("block_count"),
        chat_template=template if isinstance(template, str) else None,
        tool_template=tools if isinstance(tools, str) else None,
        generates=header.generates,
        pooling=Pooling.RANK if header.ranks else Pooling.MEAN,
        vector_length=vector,
        file=header.path.name,
    )

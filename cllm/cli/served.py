"""Served models: from the arguments of `cllm serve` and its TOML file to the models of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cllm.config import Config, EngineConfig, ModelConfig, make_config
from cllm.errors import ConfigError, InvalidRequest
from cllm.fields import check_finite, describe_unknown
from cllm.server.app import check_defaults

_replace = msgspec.structs.replace


class ModelSection(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `[models.NAME]` beside those of the engine."""

    aliases: tuple[str, ...] = ()
    context: int = 0  # tokens of one request
    defaults: dict[str, Any] = {}
    keep: bool = False
    ttl: float | None = None


def choose_models(config: Config, more: Sequence[str] = ()) -> list[ModelConfig]:
    """The models that are asked for: by arguments, else by the file's sections, else the embedded one.

    An argument may be the name or an alias of a section. Raises ConfigError.
    """
    sections = [_read_section(name, table, config) for name, table in config.models.items()]
    references = [*more, config.engine.model] if config.engine.model else [*more]
    common = make_common(config)
    if not references and (sections or config.server.all):
        return sections
    found = [_find_section(reference, sections) or reference for reference in references or [""]]
    return [
        _replace(common, engine=_replace(config.engine, model=each)) if isinstance(each, str) else each
        for each in found
    ]


def make_common(config: Config) -> ModelConfig:
    """The settings of a model that has none of its own."""
    return ModelConfig(name="", engine=_replace(config.engine, model=""), ttl=config.server.sleep_idle_s)


def is_several(models: Sequence[ModelConfig], config: Config) -> bool:
    """Whether the server chooses a model by its name. A folder may hold several."""
    if config.server.all or len(models) != 1:
        return True
    reference = models[0].engine.model
    if models[0].name or not reference or not Path(reference).expanduser().is_dir():
        return False
    from cllm.models.store import scan_folder

    return len(scan_folder(Path(reference).expanduser(), deep=False)) > 1


def _find_section(reference: str, sections: Sequence[ModelConfig]) -> ModelConfig | None:
    wanted = reference.lower()
    return next(
        (each for each in sections if wanted in (name.lower() for name in (each.name, *each.aliases))), None
    )


def _read_section(name: str, table: Any, config: Config) -> ModelConfig:
    where = f"[models.{name}]"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table")
    settings = {key.replace("-", "_"): value for key, value in table.items()}
    own, engine_fields = ModelSection.__struct_fields__, EngineConfig.__struct_fields__
    if unknown := sorted(settings.keys() - {*own, *engine_fields}):
        raise ConfigError(f"{where}: unknown setting {describe_unknown(unknown[0], {*own, *engine_fields})}")
    try:
        check_finite({key: value for key, value in settings.items() if key != "defaults"})
        section = msgspec.convert({key: settings[key] for key in own if key in settings}, ModelSection)
    except (InvalidRequest, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: {error}") from None
    fields = {key: settings[key] for key in engine_fields if key in settings}
    if section.context:
        fields["max_request_tokens"] = section.context
    engine = {**msgspec.structs.asdict(config.engine), "model": name, "alias": name, **fields}
    try:
        checked = make_config(EngineConfig, engine)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    ttl = config.server.sleep_idle_s if section.ttl is None else section.ttl
    return ModelConfig(
        name=name,
        engine=checked,
        aliases=section.aliases,
        defaults=check_defaults(section.defaults, f"{where} defaults"),
        keep=section.keep,
        ttl=max(0.0, ttl),
    )

"""Command-line options made from the configuration, so that a default is written down once.

What wins: the command line, then `CLLM_*` variables, then the TOML file (`--config`), then what `cllm tune`
found, then the defaults.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import typer

from cllm.config import Config, EngineConfig, ServerConfig
from cllm.errors import CllmError, ConfigError


def _load_file(context: typer.Context, value: Path | None) -> Path | None:
    """Put the TOML file's settings beneath the command line. Sections are optional."""
    if value is None:
        return None
    try:
        document = tomllib.loads(value.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{value}: {error}") from None
    flat: dict[str, Any] = {}
    for key, item in document.items():
        flat.update(item if isinstance(item, dict) else {key: item})
    flat = {key.replace("-", "_"): item for key, item in flat.items()}
    known = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    if unknown := sorted(set(flat) - known):
        raise typer.BadParameter(f"{value}: unknown setting {unknown[0]!r}")
    context.default_map = {**(context.default_map or {}), **flat}
    return value


def _parameter(
    struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo, hint: Any
) -> inspect.Parameter:
    assert get_origin(hint) is Annotated
    kind, meta = get_args(hint)
    name = field.name
    if name == "model":
        option = typer.Argument(help=meta.description, envvar="CLLM_MODEL", show_default=False)
    else:
        flag = name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}"] if kind is bool else [f"--{flag}"]
        option = typer.Option(
            *names, help=meta.description, envvar=f"CLLM_{name.upper()}", min=meta.ge, max=meta.le
        )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
    )


def with_options(*structs: type[msgspec.Struct]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one option for each field of the given configurations.

    The command receives `config: Config` and, if it has a parameter of that name, `given`: the fields that
    somebody set, wherever. Its own parameters stay as they are.
    """
    generated = [
        _parameter(struct, field, get_type_hints(struct, include_extras=True)[field.name])
        for struct in structs
        for field in msgspec.structs.fields(struct)
    ]
    file_option = typer.Option(
        "--config",
        help="TOML file with these settings",
        callback=_load_file,
        is_eager=True,
        envvar="CLLM_CONFIG",
    )
    generated.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    generated.append(
        inspect.Parameter(
            "config_file",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, file_option],
        )
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        wants_given = "given" in inspect.signature(command).parameters

        def call(context: typer.Context, **values: Any) -> Any:
            values.pop("config_file")
            if wants_given:
                values["given"] = _given(context, structs)
            taken = {
                struct: struct(**{name: values.pop(name) for name in struct.__struct_fields__})
                for struct in structs
            }
            config = Config(
                engine=taken.get(EngineConfig, EngineConfig()),  # type: ignore[arg-type]
                server=taken.get(ServerConfig, ServerConfig()),  # type: ignore[arg-type]
            )
            try:
                _validate(config)
            except ConfigError as error:
                raise fail(error) from None
            return command(config=config, **values)

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name not in ("config", "given")
        ]
        # Positional arguments of the command come before the model.
        parameters = own + generated
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__doc__ = command.__doc__
        call.__name__ = command.__name__
        return call

    return decorate


def _given(context: typer.Context, structs: tuple[type[msgspec.Struct], ...]) -> frozenset[str]:
    """The fields whose value is not the default: from the command line, a variable or the file."""
    names = (name for struct in structs for name in struct.__struct_fields__)
    sources = {name: context.get_parameter_source(name) for name in names}
    return frozenset(
        name for name, source in sources.items() if source is not None and source.name != "DEFAULT"
    )


def _validate(config: Config) -> None:
    """Values from a file have not been through the option's own checks. Raises ConfigError."""
    try:
        msgspec.convert(msgspec.to_builtins(config), Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from None
    if config.server.log_level.lower() not in ("debug", "info", "warning", "error"):
        raise ConfigError(
            f"log_level is {config.server.log_level!r}: it must be debug, info, warning or error"
        )


def fail(error: CllmError) -> typer.Exit:
    """One clear line on standard error, exit code 2."""
    typer.echo(f"cllm: {error}", err=True)
    return typer.Exit(2)

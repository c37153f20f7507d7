"""Command-line options made from the configuration and `settings.toml`: a default is written down once.

Precedence: command line, `CLLM_*` variables, TOML file (`--config`), defaults.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer
from msgspec import Meta
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperCommand

from cllm.config import Config, EngineConfig, ServerConfig, make_config, name_settings
from cllm.errors import ConfigError, InvalidRequest
from cllm.fields import check_finite


class SettingText(msgspec.Struct, frozen=True):
    """What `settings.toml` says of a setting."""

    help: str
    metavar: str = ""
    rare: bool = False


_PANELS = msgspec.toml.decode(
    Path(__file__).with_name("settings.toml").read_bytes(), type=dict[str, dict[str, SettingText]]
)
SETTINGS = {name: (panel, text) for panel, texts in _PANELS.items() for name, text in texts.items()}
_METAVARS = {int: "N", float: "N", str: "TEXT", bool: ""}
_SHOW_ALL = "cllm.show_all"
_MODELS = "cllm.models"  # of the TOML file
_EPILOG = (
    "Defaults are in brackets. Each option is also a variable (--port: CLLM_PORT, --log-level: "
    "CLLM_LOG_LEVEL) and a line in the TOML file. The command line wins over variables, they over the file."
)


class GroupedHelp(TyperCommand):
    """A command whose `--help` is grouped and leaves out what is hidden; `--help-all` shows everything."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the panels; no flag is cut, however narrow the terminal."""
        show_all = ctx.meta.get(_SHOW_ALL, False)
        panels: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            if show_all or not getattr(param, "hidden", False):
                panels.setdefault(getattr(param, "rich_help_panel", None) or "other", []).append(param)
        console = Console(highlight=False)
        # Several models are two parameters: the last one can also be a variable or a line of the file.
        usage = self.get_usage(ctx).replace("[more]... [model]", "[MODEL]...").replace("[model]", "[MODEL]")
        console.print(Text(f"{usage}\n\n{self.help}\n"))
        shown = [param for params in panels.values() for param in params]
        width = max(len(line) for param in shown for line in _spellings(param).splitlines())
        for name, params in panels.items():
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), expand=True)
            table.add_column(style="bold cyan", width=width, no_wrap=True)
            table.add_column(ratio=1)
            for param in params:
                table.add_row(_spellings(param), _description(param))
            console.print(Panel(table, title=name.capitalize(), title_align="left", border_style="dim"))
        console.print(_EPILOG + ("" if show_all else "\n--help-all shows the rarely used options, too."))


def _spellings(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.name.upper())
    return "\n".join([f"{param.opts[0]} {param.metavar or ''}".rstrip(), *param.secondary_opts])


def _description(param: Any) -> Text:
    text = Text(param.help or "")
    switch = param.secondary_opts and param.default is not None
    default = ("off", "on")[param.default] if switch else param.default
    if param.show_default and default not in ("", None, ()) and default is not False:
        text.append(f" [{default}]", style="dim")
    return text


def _load_file(context: typer.Context, value: Path | None) -> Path | None:
    """Put the TOML file's settings beneath the command line. Sections are optional."""
    if value is None:
        return None
    try:
        document = tomllib.loads(value.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{value}: {error}") from None
    models = document.pop("models", {})
    if not isinstance(models, dict):
        raise typer.BadParameter(f"{value}: models must be tables: [models.NAME]")
    context.meta[_MODELS] = models
    flat: dict[str, Any] = {}
    for key, item in document.items():
        flat.update(item if isinstance(item, dict) else {key: item})
    try:
        flat = name_settings(flat, EngineConfig, ServerConfig)
        check_finite(flat)
    except (ConfigError, InvalidRequest) as error:
        raise typer.BadParameter(f"{value}: {error}") from None
    context.default_map = {**(context.default_map or {}), **flat}
    return value


def _show_all(context: typer.Context, value: bool) -> None:
    if value:
        context.meta[_SHOW_ALL] = True
        context.get_help()  # prints it
        raise typer.Exit


def bare_type(field: msgspec.structs.FieldInfo) -> tuple[Any, Meta]:
    """The type of a setting without None, and its bounds."""
    kind = get_args(field.type)[0] if field.default is None else field.type
    return get_args(kind) if get_origin(kind) is Annotated else (kind, Meta())


def _parameter(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    kind, _ = bare_type(field)
    panel, text = SETTINGS[field.name]
    option: dict[str, Any] = {
        "help": text.help,
        "envvar": f"CLLM_{field.name.upper()}",
        "rich_help_panel": panel,
        "hidden": text.rare,
    }
    if field.name == "model":
        return _keyword(field.name, Annotated[kind, Argument(**option, show_default=False)], "")
    if repeats := get_origin(kind) is tuple:
        kind = str
    elif not isinstance(kind, type):
        kind, option["parser"] = str, _number_or_word
    name = field.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if kind is bool and not name.startswith("no-") else f"--{name}"
    option["metavar"] = text.metavar or _METAVARS[kind]
    value: Any = list[str] if repeats else kind | None if field.default is None else kind
    return _keyword(field.name, Annotated[value, Option(flag, **option)], field.default)


def _number_or_word(value: Any) -> Any:
    return int(value) if str(value).removeprefix("-").isdigit() else value


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


_other = partial(Option, is_eager=True, rich_help_panel="other")
_FILE: dict[str, Any] = {"metavar": "FILE", "envvar": "CLLM_CONFIG"}
_CONFIG_FILE = _other("--config", help="TOML file with these settings.", callback=_load_file, **_FILE)
_HELP_ALL = _other("--help-all", help="Show all options.", callback=_show_all, show_default=False)


def with_options(*structs: type[msgspec.Struct]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one option for each field of the given configurations.

    The command receives `config: Config`. Its own parameters stay as they are. Make it a command of the class
    `GroupedHelp`.
    """
    generated = [_parameter(field) for struct in structs for field in msgspec.structs.fields(struct)]
    names = [parameter.name for parameter in generated]
    generated += [
        _keyword("context", typer.Context),
        _keyword("config_file", Annotated[Path | None, _CONFIG_FILE], None),
        _keyword("help_all", Annotated[bool, _HELP_ALL], False),
    ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def call(context: typer.Context, config_file: Path | None, help_all: bool, **values: Any) -> Any:
            settings = {name: values.pop(name) for name in names}
            try:  # each part takes its own fields
                engine = make_config(EngineConfig, settings, strict=False)
                server = make_config(ServerConfig, settings, strict=False)
                config = Config(engine=engine, server=server, models=context.meta.get(_MODELS, {}))
            except ConfigError as error:
                raise ConfigError(f"configuration: {error}") from None
            return command(config=config, **values)

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name != "config"
        ]
        # Positional arguments of the command come before the model.
        parameters = own + generated
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__doc__, call.__name__ = command.__doc__, command.__name__
        return call

    return decorate

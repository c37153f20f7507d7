"""`cllm llama-server`: llama-server's command line and variables, turned into the options of `cllm serve`."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from cllm import __version__
from cllm.config import DEFAULT_CACHE_DISK_MB, LOAD_MODES, MIN_BATCH_TOKENS, TEMPLATE_TEXT
from cllm.errors import ConfigError
from cllm.fields import describe_unknown

PORT = "8080"
SLOTS = 4  # where neither --parallel nor memory says otherwise
UBATCH = 512  # its own default, tokens
NO_LIMIT_MB = 1 << 20
VERBOSE = 10  # the verbosity from which on answers have `__verbose`
LEVELS = ("error", "error", "warning", "info", "debug")  # by verbosity

_ON, _OFF = ("on", "true", "1", "enabled"), ("off", "false", "0", "disabled")


class Flag(NamedTuple):
    """One spelling of an argument."""

    values: int
    action: str = ""  # as `llama_flags.txt` says; "" changes nothing, "-" has no counterpart
    on: bool = True  # False for the spelling that switches it off
    variable: str = ""


def _read_flags() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    text = Path(__file__).with_name("llama_flags.txt").read_text(encoding="utf-8").replace("\\\n", "")
    for line in (line for line in text.splitlines() if line and not line.startswith("#")):
        *names, variable, values, action = line.split()
        variable = "" if variable == "." else variable
        variable = variable[1:] if variable.startswith("=") else variable and f"LLAMA_ARG_{variable}"
        on = True
        for name in names:
            if name == "/":
                on = False
            else:
                flags[name] = Flag(int(values), "" if action == "." else action, on, variable)
    return flags


FLAGS = _read_flags()


class Translation:
    """Settings of cllm and fields of requests that an argument list of llama-server stands for."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}  # of request bodies
        self.missing: list[str] = []  # flags without a counterpart
        self._open_routes: list[str] = []

    @classmethod
    def of(cls, arguments: Sequence[str], variables: Mapping[str, str]) -> Translation:
        """Read variables, then arguments, which win. Raises ConfigError."""
        found = cls()
        for name, flag in {flag.variable: (name, flag) for name, flag in FLAGS.items()}.values():
            if flag.variable and (value := variables.get(flag.variable)):
                off = not flag.values and value.lower() in _OFF
                found.take(name, flag, value if flag.values else "off" if off else "on")
        words = list(arguments)
        while words:
            word = words.pop(0)
            name = word.replace("_", "-") if word.startswith("--") else word
            if (known := FLAGS.get(name)) is None:
                raise ConfigError(f"llama-server has no argument {describe_unknown(name, FLAGS)}")
            if name in ("-fa", "--flash-attn") and (not words or words[0].startswith("-")):
                words.insert(0, "on")  # as earlier versions have it
            if len(words) < known.values:
                raise ConfigError(f"{name} needs a value")
            values = [words.pop(0) for _ in range(known.values)]
            found.take(name, known, values[0] if values else "on" if known.on else "off")
        return found

    def take(self, name: str, flag: Flag, value: str) -> None:
        """Apply one argument; that of a switch is "on" or "off". Raises ConfigError."""
        kind, target = flag.action[:1], flag.action[1:]
        try:
            match kind:
                case "-":
                    self.missing.append(name)
                case "=":
                    self.settings[target] = value
                case "?":
                    self.settings[target] = value == "on"
                case "+":
                    self.settings[target] = max(0, _parse_number(value))
                case "@" if value == "on":
                    field, _, fixed = target.partition("=")
                    self.settings[field] = fixed
                case ":":
                    self.defaults[target] = _parse(value) if flag.values else value == "on"
                case "/" if value == "on":
                    self._open_routes.append(flag.action)
                case '"':
                    self.defaults[target] = value
                case "!" if (found := _SETTINGS[target](value)) is not None:
                    _add(self.settings, found)
                case "!":
                    self.missing.append(f"{name} {value}")
                case "&":
                    _add(self.defaults, _FIELDS[target](value))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{name} {value}: {error}") from None

    def serve_arguments(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments of `cllm serve`."""
        settings = self._share_context(dict(self.settings))
        if "batch_size" in settings:
            batch, ubatch = settings.pop("batch_size"), settings.get("batch_tokens", UBATCH)
            settings["batch_tokens"] = min(batch, ubatch)
        if "batch_tokens" in settings:
            settings["batch_tokens"] = max(MIN_BATCH_TOKENS, settings["batch_tokens"])
        if settings.pop("verbose", False):
            self.defaults.setdefault("verbose", True)
        if keys := settings.pop("api_key", None):  # an empty one leaves that of the environment in force
            settings["api_key"] = ",".join(keys)
        if not settings.pop("lora_off", False) and settings.get("adapter"):
            settings["apply_adapters"] = True
        mapped, locked = settings.pop("mmap", True), settings.pop("mlock", False)
        if locked or not mapped:
            settings["load_mode"] = LOAD_MODES[1 + mapped + 2 * locked]
        if "CLLM_PORT" not in variables:
            settings.setdefault("port", PORT)
        if "cache_dir" in settings and "CLLM_CACHE_DISK_MB" not in variables:
            settings["cache_disk_mb"] = DEFAULT_CACHE_DISK_MB  # with keys, too: it was asked for
        slots = "/slots" if settings.pop("slots", True) else "-/slots"
        settings["open_routes"] = ",".join([slots, *self._open_routes])
        if self.defaults.get("max_tokens", 0) < 0:
            del self.defaults["max_tokens"]
        if self.defaults:
            settings["defaults"] = json.dumps(self.defaults)
        words = [settings.pop("model")] if "model" in settings else []
        for field, value in settings.items():
            flag = field.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                for each in value if isinstance(value, list) else [value]:
                    words += [f"--{flag}", str(each)]
        return words

    def _share_context(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Slots share the cells: equally where their number is given, else each may use all of them."""
        cells, slots = settings.pop("ctx_size", 0), settings.get("parallel", 0)
        if cells:
            settings |= {"ctx_size": cells, "parallel": slots or SLOTS}
        if settings.get("unified_kv", bool(cells and not slots)):
            settings |= {"unified_kv": True} | ({"max_request_tokens": cells} if cells else {})
        return settings


def _add(known: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add settings or fields to those before; what may be given several times is collected."""
    for field, value in found.items():
        if field in known and isinstance(value, list | dict) and field not in _REPLACED:
            value = known[field] + value if isinstance(value, list) else known[field] | value
        known[field] = value


def _parse_number(value: str) -> float:
    """Parse a whole number as int. Raise ValueError for another text than a number."""
    try:
        return int(value)
    except ValueError:
        return float(value)


def _parse(value: str) -> Any:
    """Return a number where it is one, else the text."""
    with suppress(ValueError):
        return _parse_number(value)
    return value


def _parse_switch(value: str) -> bool:
    if value.lower() not in _ON + _OFF:
        raise ValueError("expected on, off or auto")
    return value.lower() in _ON


def _parse_object(value: str) -> dict[str, Any]:
    found = json.loads(value)
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found


def _unescape(text: str) -> str:
    """Text with its escapes (\\n, \\t …) processed, as llama-server does with these arguments."""
    escapes = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[0]), text)


def _checked(found: dict[str, Any], valid: bool, message: str) -> dict[str, Any]:
    if not valid:
        raise ValueError(message)
    return found


def _read_key_file(value: str) -> dict[str, Any]:
    lines = map(str.strip, Path(value).read_text().splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    return _checked({"api_key": keys}, bool(keys), "it holds no key")


def _read_bias(value: str) -> dict[str, Any]:
    if (found := re.fullmatch(r"(\d+)([+-][\d.]+|-inf)", value)) is None:
        raise ValueError("expected a token id and a bias, as 15043+1")
    return {"logit_bias": {found[1]: max(-100.0, min(100.0, float(found[2])))}}


def _read_reasoning(value: str) -> dict[str, Any]:
    if value == "auto":
        return {}
    return {"chat_template_kwargs": {"enable_thinking": True}} if _parse_switch(value) else _NO_REASONING


def _read_budget(value: str) -> dict[str, Any]:
    tokens = int(value)
    return {"reasoning_budget": tokens} if tokens > 0 else {} if tokens else _NO_REASONING


def _read_adapters(value: str, *, scaled: bool) -> dict[str, Any]:
    """Adapters under the names of their files."""
    found = []
    for part in filter(None, value.split(",")):
        file, _, scale = part.rpartition(":") if scaled else (part, "", "1")
        name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(file).stem).lstrip("._-")[:64]
        found.append(f"{name}={file}:{float(scale)}")
    return {"adapter": found}


_REPLACED = ("samplers", "json_schema")
_NO_REASONING = {"reasoning_effort": "none"}
_DRAFTS = re.compile("ngram|draft-simple|draft-mtp")
_LAYERS = {"auto": "auto", "-1": "auto", "all": -1, "-2": -1}
# The settings and fields of requests that follow from a value; None if it has no counterpart.
_SETTINGS: dict[str, Callable[[str], dict[str, Any] | None]] = {
    # A word is the name of a template, or of a file; anything else is the text of one.
    "template": lambda value: {
        "chat_template": value if re.fullmatch(r"[\w.-]*", value) else TEMPLATE_TEXT + value
    },
    "flash": lambda value: {"flash_attention": _parse_switch(value)} if value != "auto" else {},
    "device": lambda value: {"gpu_layers": 0} if value == "none" else None,
    "layers": lambda value: {"gpu_layers": _LAYERS[value] if value in _LAYERS else int(value)},
    "override_tensor": lambda value: {"override_tensor": value.split(",")},
    "tensor_split": lambda value: {"tensor_split": re.sub("[,/]+", ",", value)},
    "freq_scale": lambda value: {"rope_scale": float(value) and 1 / float(value)},
    "override_kv": lambda value: {"override_kv": next(csv.reader([value]))},
    "cache_ram": lambda value: {"cache_ram_mb": int(value) if int(value) >= 0 else NO_LIMIT_MB},
    "drafts": lambda value: {"draft_tokens": 0} if value == "none" else {} if _DRAFTS.match(value) else None,
    "host": lambda value: _checked({"host": value}, ".sock" not in value, "no UNIX socket: give an address"),
    "timeout": lambda value: dict.fromkeys(("slow_reader_s", "body_timeout_s"), float(value)),
    "key": lambda value: {"api_key": [key.strip() for key in value.split(",") if key.strip()]},
    "key_file": _read_key_file,
    "save_path": lambda value: _checked({"cache_dir": value}, Path(value).is_dir(), "it is not a folder"),
    "verbose": lambda value: {"log_level": LEVELS[-1], "verbose": True} if value == "on" else {},
    "verbosity": lambda value: {
        "log_level": LEVELS[min(max(0, int(value)), len(LEVELS) - 1)],
        "verbose": int(value) >= VERBOSE,
    },
    "download": lambda value: _checked({}, False, "not downloaded: give -hf REPOSITORY or -m FILE"),
    "repo": lambda value: {"model": f"hf:{value}"},
    "lora": partial(_read_adapters, scaled=False),
    "lora_scaled": partial(_read_adapters, scaled=True),
}
_FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "breaker": lambda value: {"dry_sequence_breakers": [] if value == "none" else [_unescape(value)]},
    "samplers": lambda value: {"samplers": [name for name in value.split(";") if name]},
    "bias": _read_bias,
    "grammar_file": lambda value: {"grammar": Path(value).read_text()},
    "schema": lambda value: {"json_schema": _parse_object(value)},
    "schema_file": lambda value: {"json_schema": _parse_object(Path(value).read_text())},
    "stop": lambda value: {"stop": [_unescape(value)]},
    "template_options": lambda value: {"chat_template_kwargs": _parse_object(value)},
    "reasoning": _read_reasoning,
    "effort": lambda value: {"reasoning_effort": value} if value != "default" else {},
    "budget": _read_budget,
}


def llama_server_command(context: typer.Context) -> None:
    """Serve as llama-server does: its arguments, its variables, its port; --help lists them."""
    from cllm.cli.main import app

    if {"-h", "--help", "--usage"} & set(context.args):
        typer.echo(describe_flags())
        raise typer.Exit
    if "--version" in context.args:
        typer.echo(f"version: cllm {__version__}")
        raise typer.Exit
    found = Translation.of(context.args, os.environ)
    if found.missing:
        typer.echo(f"cllm: without a counterpart here, so ignored: {', '.join(found.missing)}", err=True)
    app(["serve", *found.serve_arguments(os.environ)], prog_name="cllm llama-server")


def describe_flags() -> str:
    """Describe the arguments by their meaning."""

    def names(wanted: Callable[[str], bool]) -> str:
        found = [name for name, flag in FLAGS.items() if wanted(flag.action)]
        width = shutil.get_terminal_size().columns
        return textwrap.fill(" ".join(found), width, break_on_hyphens=False, break_long_words=False)

    return (
        "cllm llama-server ARGS…: llama-server's arguments and variables, on cllm.\n\n"
        f"Taken:\n{names(lambda action: action not in ('', '-', '!download'))}\n\n"
        f"Taken, and so in any case:\n{names(lambda action: not action)}\n\n"
        f"Without a counterpart (named in a warning):\n{names(lambda action: action == '-')}\n\n"
        f"Refused (these models are not downloaded):\n{names(lambda action: action == '!download')}"
    )

"""`cllm llama-server`: llama-server's command line and variables, turned into the options of `cllm serve`."""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from cllm import __version__
from cllm.cli.llama_flags import FLAGS, Flag
from cllm.config import DEFAULT_CACHE_DISK_MB
from cllm.errors import ConfigError
from cllm.fields import describe_unknown

PORT = "8080"
SLOTS = 4  # where neither --parallel nor memory says otherwise
UBATCH = 512  # its own default, tokens
NO_LIMIT_MB = 1 << 20
ALL_LAYERS = 4096  # more than models have
LEVELS = ("error", "error", "warning", "info")  # by verbosity; above these: debug

_ON, _OFF = ("on", "true", "1", "enabled"), ("off", "false", "0", "disabled")


class Translation:
    """What an argument list of llama-server's means: settings of cllm, and fields of requests.

    The methods `do_NAME` apply one argument each; that of a switch is "on" or "off".
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}  # of request bodies
        self.missing: list[str] = []  # flags without a counterpart
        self._open_routes = ["/slots"]
        self._keys: list[str] = []
        self._cells = 0  # of all slots; 0: as many as fit
        self._unified: bool | None = None

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
        """Apply one argument. Raises ConfigError."""
        kind, target = flag.action[:1], flag.action[1:]
        match kind:
            case "-":
                self.missing.append(name)
            case "=":
                self.settings[target] = value
            case "?":
                self.settings[target] = value == "on"
            case ":":
                self.defaults[target] = _parse(value) if flag.values else value == "on"
            case "!":
                try:
                    getattr(self, f"do_{target}")(value)
                except (ValueError, OSError) as error:
                    raise ConfigError(f"{name} {value}: {error}") from None
                except NotImplementedError:
                    self.missing.append(f"{name} {value}")

    def serve_arguments(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments of `cllm serve`."""
        settings = self.settings | self._context_settings()
        if self._keys:
            settings["api_key"] = ",".join(self._keys)
        if "CLLM_PORT" not in variables:
            settings.setdefault("port", PORT)
        if "cache_dir" in settings and "CLLM_CACHE_DISK_MB" not in variables:
            settings["cache_disk_mb"] = DEFAULT_CACHE_DISK_MB  # with keys, too: it was asked for
        settings["open_routes"] = ",".join(self._open_routes)
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
                words += [f"--{flag}", str(value)]
        return words

    def _context_settings(self) -> dict[str, Any]:
        """Slots share the cells: equally where their number is given, else each may use all of them."""
        slots = self.settings.get("parallel", 0)
        found: dict[str, Any] = {}
        if self._cells:
            found = {"ctx_size": self._cells, "parallel": slots or SLOTS}
        unified = self._unified if self._unified is not None else bool(self._cells and not slots)
        if unified:
            found["unified_kv"] = True
            if self._cells:
                found["max_request_tokens"] = self._cells
        return found

    # Settings ----------------------------------------------------------------------------------------

    def do_alias(self, value: str) -> None:
        self.settings["alias"] = value.split(",")[0].strip()

    def do_threads(self, value: str) -> None:
        self.settings["threads"] = max(0, int(value))

    def do_context(self, value: str) -> None:
        self._cells = max(0, int(value))

    def do_parallel(self, value: str) -> None:
        self.settings["parallel"] = max(0, int(value))

    def do_unified(self, value: str) -> None:
        self._unified = value == "on"

    def do_batch(self, value: str) -> None:
        self.settings["batch_tokens"] = min(int(value), self.settings.get("batch_tokens", UBATCH))

    def do_ubatch(self, value: str) -> None:
        self.settings["batch_tokens"] = int(value)

    def do_flash(self, value: str) -> None:
        if value != "auto":
            self.settings["flash_attention"] = _parse_switch(value)

    def do_device(self, value: str) -> None:
        if value != "none":
            raise NotImplementedError
        self.settings["gpu_layers"] = 0

    def do_layers(self, value: str) -> None:
        if value in ("auto", "-1"):
            self.settings["gpu_layers"] = "auto"
        else:
            self.settings["gpu_layers"] = -1 if value in ("all", "-2") else int(value)

    def do_split_mode(self, value: str) -> None:
        if value == "tensor":
            raise NotImplementedError
        self.settings["split_mode"] = value

    def do_tensor_split(self, value: str) -> None:
        self.settings["tensor_split"] = re.sub("[,/]+", ",", value)

    def do_cpu_moe(self, value: str) -> None:
        self.settings["n_cpu_moe"] = ALL_LAYERS

    def do_cache_ram(self, value: str) -> None:
        self.settings["cache_ram_mb"] = int(value) if int(value) >= 0 else NO_LIMIT_MB

    def do_drafts(self, value: str) -> None:
        if value == "none":
            self.settings["draft_tokens"] = 0
        elif not value.startswith(("ngram", "draft-simple")):
            raise NotImplementedError

    def do_rerank(self, value: str) -> None:
        if value == "on":
            self.settings["pooling"] = "rank"

    def do_host(self, value: str) -> None:
        if ".sock" in value:
            raise ValueError("UNIX sockets are not supported: give an address")
        self.settings["host"] = value

    def do_timeout(self, value: str) -> None:
        self.settings["slow_reader_s"] = self.settings["body_timeout_s"] = float(value)

    def do_key(self, value: str) -> None:
        self._keys += [key.strip() for key in value.split(",") if key.strip()]

    def do_key_file(self, value: str) -> None:
        lines = (line.strip() for line in Path(value).read_text().splitlines())
        self._keys += [line for line in lines if line and not line.startswith("#")]
        if not self._keys:
            raise ValueError("it holds no key")

    def do_save_path(self, value: str) -> None:
        if not Path(value).is_dir():
            raise ValueError("it is not a folder")
        self.settings["cache_dir"] = value

    def do_metrics(self, value: str) -> None:
        self._open_routes += ["/metrics"] * (value == "on")

    def do_props(self, value: str) -> None:
        self._open_routes += ["/props"] * (value == "on")

    def do_slots(self, value: str) -> None:
        self._open_routes = [route for route in self._open_routes if route.strip("-") != "/slots"]
        self._open_routes.append("/slots" if value == "on" else "-/slots")

    def do_verbose(self, value: str) -> None:
        self.settings["log_level"] = "debug"

    def do_quiet(self, value: str) -> None:
        self.settings["log_level"] = "error"

    def do_verbosity(self, value: str) -> None:
        level = max(0, int(value))
        self.settings["log_level"] = LEVELS[level] if level < len(LEVELS) else "debug"

    def do_sleep(self, value: str) -> None:
        self.settings["sleep_idle_s"] = max(0.0, float(value))

    def do_download(self, value: str) -> None:
        raise ValueError("this model is not downloaded: give a repository with -hf, or a file with -m")

    def do_repo(self, value: str) -> None:
        self.settings["model"] = f"hf:{value}"

    # Fields of requests ------------------------------------------------------------------------------

    def do_breaker(self, value: str) -> None:
        breakers = self.defaults.setdefault("dry_sequence_breakers", [])
        if value != "none":
            breakers.append(_unescape(value))

    def do_samplers(self, value: str) -> None:
        self.defaults["samplers"] = [name for name in value.split(";") if name]

    def do_sampler_letters(self, value: str) -> None:
        self.defaults["samplers"] = value

    def do_bias(self, value: str) -> None:
        if (found := re.fullmatch(r"(\d+)([+-][\d.]+|-inf)", value)) is None:
            raise ValueError("expected a token id and a bias, as 15043+1")
        biases = self.defaults.setdefault("logit_bias", {})
        biases[found[1]] = max(-100.0, min(100.0, float(found[2])))

    def do_grammar(self, value: str) -> None:
        self.defaults["grammar"] = value

    def do_grammar_file(self, value: str) -> None:
        self.defaults["grammar"] = Path(value).read_text()

    def do_schema(self, value: str) -> None:
        self.defaults["json_schema"] = _parse_object(value)

    def do_schema_file(self, value: str) -> None:
        self.defaults["json_schema"] = _parse_object(Path(value).read_text())

    def do_stop(self, value: str) -> None:
        self.defaults.setdefault("stop", []).append(_unescape(value))

    def do_template_options(self, value: str) -> None:
        self.defaults.setdefault("chat_template_kwargs", {}).update(_parse_object(value))

    def do_reasoning(self, value: str) -> None:
        if value == "auto":
            return
        if _parse_switch(value):
            self.defaults.setdefault("chat_template_kwargs", {})["enable_thinking"] = True
        else:
            self.defaults["reasoning_effort"] = "none"

    def do_effort(self, value: str) -> None:
        if value != "default":
            self.defaults["reasoning_effort"] = value

    def do_budget(self, value: str) -> None:
        if int(value) == 0:
            self.defaults["reasoning_effort"] = "none"
        elif int(value) > 0:
            self.defaults["reasoning_budget"] = int(value)


def _parse(value: str) -> Any:
    """A number where it is one, else text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
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


def llama_server_command(context: typer.Context) -> None:
    """Serve as llama-server does: its arguments, its variables, its port; --help lists them."""
    from cllm.cli.main import app
    from cllm.cli.options import fail

    if {"-h", "--help", "--usage"} & set(context.args):
        typer.echo(describe_flags())
        raise typer.Exit
    if "--version" in context.args:
        typer.echo(f"version: cllm {__version__}")
        raise typer.Exit
    try:
        found = Translation.of(context.args, os.environ)
    except ConfigError as error:
        raise fail(error) from None
    if found.missing:
        typer.echo(f"cllm: without a counterpart here, so ignored: {', '.join(found.missing)}", err=True)
    app(["serve", *found.serve_arguments(os.environ)], prog_name="cllm llama-server")


def describe_flags() -> str:
    """The arguments by what becomes of them."""

    refused, ignored = "!download", ("-",)

    def names(wanted: Callable[[str], bool]) -> str:
        found = [name for name, flag in FLAGS.items() if wanted(flag.action)]
        width = shutil.get_terminal_size().columns
        return textwrap.fill(" ".join(found), width, break_on_hyphens=False, break_long_words=False)

    return (
        "cllm llama-server ARGS…: llama-server's arguments and variables, on cllm.\n\n"
        f"Taken:\n{names(lambda action: action not in ('', refused, *ignored))}\n\n"
        f"Taken, and so in any case:\n{names(lambda action: not action)}\n\n"
        f"Without a counterpart (named in a warning):\n{names(lambda action: action in ignored)}\n\n"
        f"Refused (these models are not downloaded):\n{names(lambda action: action == refused)}"
    )

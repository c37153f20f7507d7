"""The command line: which commands there are. A command's module is imported when it is asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer import Option
from typer.core import TyperGroup

from cllm import __version__
from cllm.cli.terminal import fail
from cllm.errors import CllmError, SetupError
from cllm.process import configure_logging

COMMANDS = {  # name: module and function
    "serve": ("cllm.cli.serve", "serve_command"),
    "llama-server": ("cllm.cli.llama_server", "llama_server_command"),
    "run": ("cllm.cli.chat", "run_command"),
    "chat": ("cllm.cli.chat", "chat_command"),
    "batch": ("cllm.cli.batch", "batch_command"),
    "launch": ("cllm.cli.launch", "launch_command"),
    "ps": ("cllm.cli.client", "ps_command"),
    "load": ("cllm.cli.client", "load_command"),
    "unload": ("cllm.cli.client", "unload_command"),
    "pull": ("cllm.cli.pull", "pull_command"),
    "list": ("cllm.cli.models", "list_command"),
    "show": ("cllm.cli.models", "show_command"),
    "rm": ("cllm.cli.models", "rm_command"),
    "recommend": ("cllm.cli.pull", "recommend_command"),
    "quantize": ("cllm.cli.models", "quantize_command"),
    "search": ("cllm.cli.pull", "search_command"),
    "doctor": ("cllm.cli.doctor", "doctor_command"),
    "build": (__name__, "build_command"),
    "service": ("cllm.cli.service", "service_app"),
    "cluster": ("cllm.cli.cluster", "cluster_app"),
    "keys": ("cllm.cli.keys", "keys_app"),
}
# What Typer says of a text that is no number, and what cllm says.
_NUMBERS = {"valid integer": "a whole number", "valid number": "a number", "valid float": "a number"}
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Commands(TyperGroup):
    """Imports a command's module on demand, so that `cllm --version` takes 0.1 s."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # typer suggests one of them

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            options: dict[str, Any] = {}
            if cmd_name == "serve":  # an option for every setting: its help is grouped
                options["cls"] = import_module("cllm.cli.options").GroupedHelp
            elif cmd_name in ("build", "llama-server"):
                options["context_settings"] = _PASSED_ON
            alone.command(cmd_name, **options)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error is one line. Code 2 where it cannot start, 1 where an answer fails."""
        try:
            return super().invoke(ctx)
        except CllmError as error:
            answers = ctx.invoked_subcommand in ("run", "chat") and not isinstance(error, SetupError)
            raise fail(error, 1 if answers else 2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except typer.BadParameter as error:
            wanted = [_NUMBERS[words] for words in _NUMBERS if words in error.message]
            error.message = f"expected {wanted[0]}" if wanted else error.message
            raise


app = typer.Typer(
    cls=Commands,
    help="Serve GGUF models with llama.cpp to many users at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"cllm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    configure_logging("warning")  # until a command sets its own level


def build_command(context: typer.Context) -> None:
    """Build the native library for this CPU (about three minutes, once); --help shows its options."""
    from cllm.build.build import main as build

    raise typer.Exit(build(context.args, prog="cllm build"))


def main() -> None:
    """Entry point of `cllm`."""
    app()


def server_main() -> None:
    """Entry point of `cllm_server --model-path M`, the earlier server's spelling of `cllm serve M`."""
    arguments = [word.removeprefix("--model-path=") for word in sys.argv[1:] if word != "--model-path"]
    app(["serve", *arguments], prog_name="cllm_server")

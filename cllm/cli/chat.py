"""`cllm chat`: a conversation on the terminal, with a running server or with a model that is loaded here."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from cllm.cli.answers import open_source
from cllm.cli.client import Url
from cllm.cli.dialog import Chat
from cllm.cli.options import fail
from cllm.cli.terminal import Screen
from cllm.cli.transcript import Transcript
from cllm.config import EngineConfig
from cllm.errors import CllmError, SetupError
from cllm.logs import configure_logging

Think = Annotated[str, typer.Option(metavar="MODE", help="Reasoning: on, off, or hide (fold it).")]


def chat_command(
    model: Annotated[
        str,
        typer.Argument(
            envvar="CLLM_MODEL",
            metavar="MODEL",
            show_default=False,
            help="File, hf:… or name. None: the server's, or embedded",
        ),
    ] = "",
    url: Url = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System prompt.", show_default=False)] = "",
    think: Think = "on",
    local: Annotated[
        bool, typer.Option("--local", help="Load the model here, whatever server runs.")
    ] = False,
    ctx_size: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", envvar="CLLM_CTX_SIZE", help="Context of a model loaded here. 0: by memory."
        ),
    ] = 0,
    threads: Annotated[
        int, typer.Option(min=0, metavar="N", envvar="CLLM_THREADS", help="Its threads. 0: one per core.")
    ] = 0,
    offline: Annotated[bool, typer.Option("--offline", envvar="CLLM_OFFLINE", help="Pull no model.")] = False,
    log_level: Annotated[str, typer.Option(envvar="CLLM_LOG_LEVEL", metavar="LEVEL")] = "warning",
) -> None:
    """Chat with a running server, or else with a model that is loaded here.

    /help lists the commands. Alt-Enter, a \\ at the end or three quotes continue a text on the next line.
    Ctrl-C stops the answer, twice leaves. Without a terminal it answers standard input once.
    """
    configure_logging(log_level)
    screen = Screen()
    interactive = sys.stdin.isatty() and screen.is_terminal
    question = "" if interactive else sys.stdin.read().strip()
    config = EngineConfig(model=model, parallel=1, ctx_size=ctx_size, threads=threads, offline=offline)
    try:
        transcript = make_transcript(system, think)
        if not (interactive or question):
            raise SetupError("there is no question: standard input is empty")
        source = open_source(model, url, config, _report, local=local)
        with closing(source):
            chat = Chat(source, transcript, screen)
            if interactive:
                from cllm.cli.chat_commands import ChatLoop  # prompt_toolkit comes along

                ChatLoop(chat, history_path()).run()
            else:
                _answer_once(chat, question)
    except CllmError as error:
        raise fail(error, 2 if isinstance(error, SetupError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def history_path() -> Path:
    """Where questions are remembered: in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state, "cllm", "chat_history").expanduser()


def make_transcript(system: str, think: str) -> Transcript:
    """An empty transcript. Raises SetupError for another way to think than there is."""
    if think not in ("on", "off", "hide"):
        raise SetupError(f"--think {think}: there are on, off and hide")
    settings: dict[str, Any] = {"system": system, "think": think}
    return Transcript(**settings)


def _report(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def _answer_once(chat: Chat, question: str) -> None:
    chat.transcript.ask(question)
    if not chat.answer():
        raise KeyboardInterrupt
    if sys.stderr.isatty():
        typer.echo(chat.describe_last(), err=True)

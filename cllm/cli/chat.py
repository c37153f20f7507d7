"""`cllm chat` and `cllm run`: answers on the terminal, of a running server or of a model loaded here."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from cllm.cli.client import Url
from cllm.cli.conversation import Dialog, Transcript, open_source
from cllm.cli.terminal import Screen, Wrap
from cllm.config import EngineConfig
from cllm.errors import SetupError
from cllm.process import configure_logging

MODEL: dict[str, Any] = {"envvar": "CLLM_MODEL", "metavar": "MODEL"}
THREADS: dict[str, Any] = {"min": 0, "metavar": "N", "envvar": "CLLM_THREADS"}
CONTEXT = {**THREADS, "envvar": "CLLM_CTX_SIZE"}

Image = Annotated[
    list[Path], Option(metavar="FILE", show_default=False, help="Picture or sound; repeatable.")
]


def chat_command(
    model: Annotated[
        str, Argument(**MODEL, show_default=False, help="File, hf:… or name. None: the server's, or embedded")
    ] = "",
    url: Url = "",
    system: Annotated[str, Option(metavar="TEXT", help="System prompt.", show_default=False)] = "",
    image: Image = [],  # noqa: B006
    think: Annotated[str, Option(metavar="MODE", help="Reasoning: on, off, or hide (fold it).")] = "on",
    local: Annotated[bool, Option("--local", help="Load the model here, whatever server runs.")] = False,
    ctx_size: Annotated[int, Option(**CONTEXT, help="Context of a model loaded here. 0: automatic")] = 0,
    threads: Annotated[int, Option(**THREADS, help="Its threads. 0: one per core.")] = 0,
    offline: Annotated[bool, Option("--offline", envvar="CLLM_OFFLINE", help="Pull no model.")] = False,
    log_level: Annotated[str, Option(envvar="CLLM_LOG_LEVEL", metavar="LEVEL")] = "warning",
) -> None:
    """Chat with a running server, or else with a model that is loaded here.

    /help lists the commands. Alt-Enter, a \\ at the end or three quotes continue a text on the next line.
    Ctrl-C stops the answer, twice leaves. Without a terminal it answers standard input once.
    """
    configure_logging(log_level)
    screen = Screen()
    interactive = sys.stdin is not None and sys.stdin.isatty() and screen.is_terminal
    question = "" if interactive else _read_input()
    config = EngineConfig(model=model, parallel=1, ctx_size=ctx_size, threads=threads, offline=offline)
    if think not in ("on", "off", "hide"):
        raise SetupError(f"--think {think}: there are on, off and hide")
    if not (interactive or question):
        raise SetupError("there is no question: standard input is empty")
    with closing(open_source(model, url, config, _report, local=local)) as source:
        transcript = Transcript(system=system, think=think)  # type: ignore[arg-type]
        for path in image:
            transcript.show(path)
        dialog = Dialog(source, transcript, screen)
        if interactive:
            from cllm.cli.chat_commands import ChatLoop  # prompt_toolkit comes along

            state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
            ChatLoop(dialog, Path(state, "cllm", "chat_history").expanduser()).run()
        else:
            _answer_once(dialog, question)


def _report(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(Wrap().add(text, end=True), err=True)


def _read_input() -> str:
    try:
        return "" if sys.stdin is None else sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError:
        raise SetupError("standard input is no text in UTF-8") from None
    except OSError as error:
        raise SetupError(f"standard input cannot be read: {error.strerror}") from None


def _is_piped() -> bool:
    """True where standard input is a file or a pipe: not a terminal, not /dev/null, and not closed."""
    return sys.stdin is not None and stat.S_IFMT(os.fstat(0).st_mode) in (stat.S_IFREG, stat.S_IFIFO)


def _answer_once(dialog: Dialog, question: str) -> None:
    """Answer one question; say where the answer is from, and whether it was cut."""
    dialog.transcript.ask(question)
    if not dialog.answer():
        raise KeyboardInterrupt
    end, source, limit = dialog.stats[-1].end, dialog.source, dialog.transcript.settings.get("max_tokens")
    _report(f"[{dialog.describe_last()}; {source.name}, {source.where}]")
    if end.cut:
        reason = f"at {limit} tokens; --max-tokens N allows more" if end.tokens == limit else "by the context"
        typer.echo(f"cllm: the answer was cut {reason}", err=True)


def run_command(
    prompt: Annotated[
        str, Argument(help="The prompt; a file or pipe on standard input follows it", show_default=False)
    ] = "",
    model: Annotated[str, Option(**MODEL, help="File, hf:… or name. None: the server's, or embedded")] = "",
    url: Url = "",
    image: Image = [],  # noqa: B006
    local: Annotated[bool, Option("--local", help="Load the model here, whatever server runs")] = False,
    max_tokens: Annotated[int, Option(min=1, metavar="N", help="Tokens to generate at most")] = 1024,
    temperature: Annotated[float, Option(min=0, max=10, metavar="N", help="0 is greedy")] = 0.8,
    seed: Annotated[int, Option(min=0, metavar="N", help="Same seed, same text")] = 0,
    raw: Annotated[bool, Option("--raw", help="Complete the prompt as it is: no chat template")] = False,
    threads: Annotated[int, Option(**THREADS, help="0: one per core")] = 0,
    offline: Annotated[bool, Option("--offline", envvar="CLLM_OFFLINE", help="Pull no model")] = False,
    log_level: Annotated[str, Option(envvar="CLLM_LOG_LEVEL")] = "warning",
) -> None:
    """Answer one prompt and print it as it comes, from a running server or a model that is loaded here.

    `cllm run < FILE` reads the prompt from a file; `cat FILE | cllm run "Sum this up:"` puts it after one.
    In a script whose standard input is not meant for it, write `cllm run "…" </dev/null`.
    """
    configure_logging(log_level)
    given = "" if prompt == "-" else prompt
    text = "\n\n".join(filter(None, (given, _read_input() if prompt == "-" or _is_piped() else "")))
    if not text:
        raise SetupError('there is no prompt: say `cllm run "…"`, or give it on standard input')
    settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    config = EngineConfig(model=model, parallel=1, threads=threads, offline=offline)
    with closing(open_source(model, url, config, _report, local=local)) as source:
        transcript = Transcript(settings=settings, raw=raw or source.is_base)
        for path in image:
            transcript.show(path)
        _answer_once(Dialog(source, transcript, Screen()), text)

"""`cllm chat` and `cllm run`: answers on the terminal, of a running server or of a model loaded here."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from cllm.cli.client import Url
from cllm.cli.conversation import AnswerEnd, AnswerStats, Dialog, Transcript, open_source
from cllm.cli.terminal import Screen
from cllm.config import EngineConfig
from cllm.errors import SetupError
from cllm.logs import configure_logging
from cllm.types import SamplingParams

MODEL: dict[str, Any] = {"envvar": "CLLM_MODEL", "metavar": "MODEL"}
THREADS: dict[str, Any] = {"min": 0, "metavar": "N", "envvar": "CLLM_THREADS"}


def chat_command(
    model: Annotated[
        str, Argument(**MODEL, show_default=False, help="File, hf:… or name. None: the server's, or embedded")
    ] = "",
    url: Url = "",
    system: Annotated[str, Option(metavar="TEXT", help="System prompt.", show_default=False)] = "",
    think: Annotated[str, Option(metavar="MODE", help="Reasoning: on, off, or hide (fold it).")] = "on",
    local: Annotated[bool, Option("--local", help="Load the model here, whatever server runs.")] = False,
    ctx_size: Annotated[
        int,
        Option(
            min=0, metavar="N", envvar="CLLM_CTX_SIZE", help="Context of a model loaded here. 0: automatic"
        ),
    ] = 0,
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
    interactive = sys.stdin.isatty() and screen.is_terminal
    question = "" if interactive else sys.stdin.read().strip()
    config = EngineConfig(model=model, parallel=1, ctx_size=ctx_size, threads=threads, offline=offline)
    if think not in ("on", "off", "hide"):
        raise SetupError(f"--think {think}: there are on, off and hide")
    if not (interactive or question):
        raise SetupError("there is no question: standard input is empty")
    try:
        with closing(open_source(model, url, config, _report, local=local)) as source:
            dialog = Dialog(source, Transcript(system=system, think=think), screen)  # type: ignore[arg-type]
            if interactive:
                from cllm.cli.chat_commands import ChatLoop  # prompt_toolkit comes along

                state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
                ChatLoop(dialog, Path(state, "cllm", "chat_history").expanduser()).run()
            else:
                dialog.transcript.ask(question)
                if not dialog.answer():
                    raise KeyboardInterrupt
                _report(dialog.describe_last())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _report(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def run_command(
    prompt: Annotated[str, Argument(help="The prompt; '-' reads standard input")],
    model: Annotated[str, Option(**MODEL, help="File, hf:… or name; none: the embedded one")] = "",
    max_tokens: Annotated[int, Option(min=1, metavar="N", help="Tokens to generate at most")] = 256,
    temperature: Annotated[float, Option(min=0, max=10, metavar="N", help="0 is greedy")] = 0.8,
    seed: Annotated[int, Option(min=0, metavar="N", help="Same seed, same text")] = 0,
    raw: Annotated[bool, Option("--raw", help="Complete the prompt as it is: no chat template")] = False,
    threads: Annotated[int, Option(**THREADS, help="0: one per core")] = 0,
    offline: Annotated[bool, Option("--offline", envvar="CLLM_OFFLINE", help="Pull no model")] = False,
    log_level: Annotated[str, Option(envvar="CLLM_LOG_LEVEL")] = "warning",
) -> None:
    """Answer one prompt and print it as it comes."""
    from cllm.llm import LLM

    configure_logging(log_level)
    screen = Screen()
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(temperature=temperature, seed=seed)
    config = EngineConfig(parallel=1, threads=threads, offline=offline)
    with LLM(model, config=config) as llm:
        chat = not raw and llm.info.chat_template is not None
        question = [{"role": "user", "content": text}] if chat else text
        stats = AnswerStats()
        stream = llm.stream(question, sampling, max_tokens=max_tokens)
        for piece in stream:
            stats.see_piece()
            screen.write(piece)
        screen.end()
        if (usage := stream.usage) is not None:
            stats.end = AnswerEnd(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
            _report(f"[{stats.describe(llm.limits.request_tokens)}]")

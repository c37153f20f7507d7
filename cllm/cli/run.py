"""`cllm run`: one answer on the terminal, of a model that is loaded for it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cllm.cli.answers import AnswerEnd, AnswerStats
from cllm.cli.options import fail
from cllm.cli.terminal import Screen
from cllm.config import EngineConfig
from cllm.errors import CllmError, SetupError
from cllm.logs import configure_logging
from cllm.types import SamplingParams


def run_command(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input")],
    model: Annotated[
        str,
        typer.Option(envvar="CLLM_MODEL", metavar="MODEL", help="File, hf:… or name; none: the embedded one"),
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to generate at most")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=10, metavar="N", help="0 is greedy")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Same seed, same text")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is: no chat template")
    ] = False,
    threads: Annotated[
        int, typer.Option(min=0, metavar="N", envvar="CLLM_THREADS", help="0: one per core")
    ] = 0,
    offline: Annotated[bool, typer.Option("--offline", envvar="CLLM_OFFLINE", help="Pull no model")] = False,
    log_level: Annotated[str, typer.Option(envvar="CLLM_LOG_LEVEL")] = "warning",
) -> None:
    """Answer one prompt and print it as it comes."""
    from cllm.llm import LLM

    configure_logging(log_level)
    screen = Screen()
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(temperature=temperature, seed=seed)
    config = EngineConfig(parallel=1, threads=threads, offline=offline)
    try:
        with LLM(model, config=config) as llm:
            chat = not raw and llm.info.chat_template is not None
            question = [{"role": "user", "content": text}] if chat else text
            stats = AnswerStats()
            stream = llm.stream(question, sampling, max_tokens=max_tokens)
            for piece in stream:
                stats.see_piece()
                screen.write(piece)
            screen.end()
            if sys.stderr.isatty() and stream.usage is not None:
                usage = stream.usage
                stats.end = AnswerEnd(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
                typer.echo(f"[{stats.describe(llm.limits.request_tokens)}]", err=True)
    except CllmError as error:
        raise fail(error, 2 if isinstance(error, SetupError) else 1) from None

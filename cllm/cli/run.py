"""`cllm run`: one prompt, answered on the terminal."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import msgspec
import typer

from cllm.cli.options import fail
from cllm.config import EngineConfig
from cllm.errors import CllmError, SetupError
from cllm.llm import LLM
from cllm.logs import configure_logging
from cllm.types import SamplingParams


def run_command(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input")],
    model: Annotated[str, typer.Option(envvar="CLLM_MODEL", help="GGUF file; none: the embedded model")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 is greedy")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is: no chat template")
    ] = False,
    threads: Annotated[int, typer.Option(min=0, envvar="CLLM_THREADS", help="0: one per core")] = 0,
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", envvar="CLLM_TUNE", help="Use what `cllm tune` found")
    ] = True,
    log_level: Annotated[str, typer.Option(envvar="CLLM_LOG_LEVEL")] = "warning",
) -> None:
    """Answer one prompt and print it as it comes."""
    configure_logging(log_level)
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(temperature=temperature, seed=seed)
    config = msgspec.structs.replace(EngineConfig(), parallel=1, threads=threads, tune=tune)
    try:
        with LLM(model, config=config) as llm:
            chat = not raw and llm.info.chat_template is not None
            question = [{"role": "user", "content": text}] if chat else text
            started, pieces = time.perf_counter(), 0
            for piece in llm.stream(question, sampling, max_tokens=max_tokens):
                typer.echo(piece, nl=False)
                pieces += 1
            typer.echo()
            if sys.stderr.isatty():
                typer.echo(f"[{pieces / (time.perf_counter() - started):.1f} pieces/s]", err=True)
    except SetupError as error:
        raise fail(error) from None
    except CllmError as error:
        typer.echo(f"cllm: {error}", err=True)
        raise typer.Exit(1) from None

"""`cllm batch`: answer the requests of a file, of a running server or of a model that is loaded here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Argument, Option

from cllm.cli.chat import MODEL, THREADS
from cllm.cli.client import READ_S, ServerClient, Url, check_answer
from cllm.config import EngineConfig, ServerConfig
from cllm.errors import CllmError, ConfigError, PoisonRequest, ServerUnreachable
from cllm.process import configure_logging
from cllm.server.batches import ENDPOINTS, make_answer, read_lines, read_request
from cllm.server.generation import MAX_PRIORITY
from cllm.server.job_store import BatchLine

AT_ONCE = 8  # requests to a server that does not tell its slots
MAX_ATTEMPTS = 10  # at a line, where the server is gone, fails or has no room
REFUSED, FAILED = (401, 403), (429, 500, 502, 503, 504)  # of a key, by the server's fault
MAX_LINE = ServerConfig().max_body_bytes


def batch_command(
    file: Annotated[Path, Argument(metavar="FILE.jsonl", help="Requests, as OpenAI's batches have them")],
    out: Annotated[Path, Option("--out", metavar="OUT.jsonl", help="Answers; lines in it are not repeated")],
    model: Annotated[str, Option(**MODEL, help="File, hf:… or name. None: the server's, or embedded")] = "",
    url: Url = "",
    local: Annotated[bool, Option("--local", help="Load the model here, whatever server runs")] = False,
    parallel: Annotated[int, Option(min=0, metavar="N", help="Requests at a time. 0: by the slots")] = 0,
    threads: Annotated[int, Option(**THREADS, help="0: one per core")] = 0,
    offline: Annotated[bool, Option("--offline", envvar="CLLM_OFFLINE", help="Pull no model")] = False,
    log_level: Annotated[str, Option(envvar="CLLM_LOG_LEVEL")] = "warning",
) -> None:
    """Answer the requests of a file, and append each answer to another. The same command again goes on."""
    configure_logging(log_level)
    lines = _read_input(file)
    done = read_output(out)
    left = sorted(lines, key=lambda line: (line[0].opening, line[0].number))
    left = [line for line in left if line[1] not in done]
    config = EngineConfig(model=model, parallel=parallel, threads=threads, offline=offline)
    try:
        with out.open("ab") as output:
            opened = _open_client(url, config, parallel, local=local)
            counts = asyncio.run(_run(file, left, output, len(lines), opened, model))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    except KeyboardInterrupt:
        typer.echo("cllm: stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    missing = counts["missing"]
    again = f"; {missing} lines have no answer: the same command asks them again" if missing else ""
    before = f"{len(lines) - missing} answers in {out}, {len(done)} of them from before"
    typer.echo(f"{before}, {counts['failed']} errors{again}", err=True)
    if counts.total():
        raise typer.Exit(1)


def _read_input(path: Path) -> list[tuple[BatchLine, str]]:
    """The lines of a file with their custom ids. Raises ConfigError, which names the first wrong line."""
    try:
        with path.open("rb") as file:
            first = file.readline(MAX_LINE)
            found = next((url for url in ENDPOINTS if f'"{url}"'.encode() in first), ENDPOINTS[0])
            lines, errors = read_lines(path, found, MAX_LINE)
            if errors:
                raise ConfigError(f"{path}, line {errors[0].line}: {errors[0].message}")
            return [(line, read_request(file, line).custom_id) for line in lines]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_output(path: Path) -> set[str]:
    """The custom ids that an output has. A last line that a kill has cut is removed. Raises ConfigError."""
    done: set[str] = set()
    if not path.exists():
        return done
    with path.open("r+b") as file:
        whole = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                done.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path}, line {number}: no answer of a batch; choose another file"
                ) from None
        file.truncate(whole)
    return done


@contextlib.asynccontextmanager
async def _open_client(
    url: str, config: EngineConfig, parallel: int, *, local: bool
) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """A client of the server that runs, else of an application in this process; and requests at a time.

    A slot of a server is left to live requests. Raises CllmError if none answers, or it refuses the key.
    """
    options: dict[str, Any] = {"timeout": httpx.Timeout(READ_S), "trust_env": False}
    with ServerClient(url) as server:
        if not local and (url or await asyncio.to_thread(server.is_running)):
            count = parallel or await asyncio.to_thread(_count_slots, server) - 1
            async with httpx.AsyncClient(base_url=server.url, headers=server.headers, **options) as client:
                yield client, max(1, count)
            return
    from cllm.llm import AsyncLLM  # numpy and the rest come along
    from cllm.server.app import create_app

    async with AsyncLLM(config=config) as llm:
        app = create_app(llm._engine, ServerConfig(job_store_mb=0, max_timeout_s=0))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", **options) as client:
            yield client, parallel or llm.limits.max_running + 2


def _count_slots(server: ServerClient) -> int:
    """Raises CllmError if no server answers, or it refuses the key."""
    server.request("/v1/models")
    with contextlib.suppress(CllmError):  # a server of another kind
        return int(server.request("/props").get("total_slots", AT_ONCE))
    return AT_ONCE


async def _run(
    path: Path,
    left: list[tuple[BatchLine, str]],
    output: BinaryIO,
    total: int,
    opened: contextlib.AbstractAsyncContextManager[tuple[httpx.AsyncClient, int]],
    model: str,
) -> Counter[str]:
    """Answer the lines that are left; returns how many failed, and how many are missing."""
    counts, waiting = Counter[str](), iter(left)
    columns = (BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[rate]}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as shown:
        async with opened as (client, count):
            task = shown.add_task("", total=total, completed=total - len(left), rate="")

            async def work() -> None:
                with path.open("rb") as file:
                    for line, _ in waiting:
                        request = read_request(file, line)
                        body = json.loads(bytes(request.body))
                        answer = await _ask(client, request.url, body, model)
                        if _may_pass(answer):
                            counts["missing"] += 1
                            continue
                        made = make_answer(request.custom_id, answer.status_code, answer.content)
                        output.write(made + b"\n")
                        output.flush()
                        counts["failed"] += not answer.is_success
                        shown.advance(task)
                        shown.update(task, rate=f"{shown.tasks[0].speed or 0:.1f} lines/s")

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(count, len(left))):
                        group.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
    return counts


def _may_pass(answer: httpx.Response) -> bool:
    """True for a failure of the server that another attempt may not have."""
    return answer.status_code in FAILED and PoisonRequest.code.encode() not in answer.content


async def _ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], model: str) -> httpx.Response:
    """The answer to a request, which goes behind those of others.

    Raises ServerUnreachable, CllmError for a key that is refused.
    """
    body = {**body, "priority": -MAX_PRIORITY} if "embeddings" not in url else body
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            answer = await client.post(url, json={**body, "model": model} if model else body)
            if answer.status_code in REFUSED:
                check_answer(answer)
            if not _may_pass(answer) or attempt == MAX_ATTEMPTS:
                return answer
            await asyncio.sleep(min(60.0, float(answer.headers.get("retry-after", 1))))
        except httpx.TransportError:
            await asyncio.sleep(attempt)
    raise ServerUnreachable(f"the server at {client.base_url} is gone; the same command goes on from here")

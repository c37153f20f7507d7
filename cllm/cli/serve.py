"""`cllm serve`: from settings to a listening server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from rich.console import Console

from cllm.backend.llama.memory import prepare
from cllm.backend.llama.probe import find_working
from cllm.cli.options import fail, with_options
from cllm.cli.reload import Reloader
from cllm.cli.tune import progress_bar, tune_at_start
from cllm.config import Config, EngineConfig, ServerConfig
from cllm.errors import CllmError
from cllm.frontend.engine_client import EngineClient
from cllm.logs import configure_logging
from cllm.server.serve import bind
from cllm.workers.executor import ProcessExecutor


@with_options(EngineConfig, ServerConfig)
def serve_command(config: Config, given: frozenset[str]) -> None:
    """Serve a GGUF model over HTTP: the APIs of OpenAI, Anthropic and llama-server."""
    configure_logging(config.server.log_level)
    try:
        run(config, given)
    except CllmError as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        pass


def run(config: Config, given: frozenset[str] = frozenset()) -> None:
    """Check everything that needs no model first; then load and serve until a signal ends it."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with contextlib.closing(bind(config.server)) as listener:
        from cllm.server.serve import serve  # takes half a second: a port in use is reported before

        engine_config = find_working(prepare(config.engine), console.print)
        engine_config = tune_at_start(config.engine, engine_config, given, console)
        with progress_bar(console) as progress:
            task = progress.add_task("loading the model", total=1.0)
            engine = _make_engine(
                config.server, engine_config, lambda at: progress.update(task, completed=at)
            )
            reloader = Reloader(config, engine_config, given, partial(_make_engine, config.server))

            def announce(url: str) -> None:
                progress.stop()
                assert engine.info is not None and engine.limits is not None
                console.print(
                    f"cllm serves {engine.info.name} ({engine.info.description}) at {url}\n"
                    f"{engine.limits.sequences} requests at a time, up to {engine.limits.request_tokens} "
                    f"tokens each; API page at {url}/docs; Ctrl-C ends it"
                )

            with asyncio.Runner(loop_factory=_new_event_loop) as runner:
                runner.run(serve(engine, config.server, listener, announce, reloader))


def _make_engine(
    server: ServerConfig, config: EngineConfig, on_loading: Callable[[float], None] | None = None
) -> EngineClient:
    return EngineClient(
        ProcessExecutor(config, log_level=server.log_level),
        queue_size=server.queue_size,
        queue_tokens=server.queue_tokens,
        max_timeout_s=server.max_timeout_s,
        on_loading=on_loading,
    )


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it runs (not on every platform): the server shares its cores with the model."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

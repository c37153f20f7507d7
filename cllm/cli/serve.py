"""`cllm serve`: from settings to a listening server, and to the engine that replaces its first one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from cllm.cli.options import fail, progress_bar, with_options
from cllm.cli.prepare import Preparation, finish
from cllm.config import Config, EngineConfig, ServerConfig
from cllm.errors import CllmError, Forbidden, ReloadFailed, SetupError
from cllm.frontend.engine_client import EngineClient
from cllm.logs import configure_logging
from cllm.server.app import read_defaults
from cllm.server.serve import bind, serve
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
    config = config.with_disk_cache()
    if config.server.model_dir:
        os.environ["CLLM_MODEL_DIR"] = config.server.model_dir  # its models have names
    read_defaults(config.server.defaults)  # a wrong one is refused before anything is loaded
    with contextlib.closing(bind(config.server)) as listeners:
        process = Preparation(asked=config.engine, given=given, log_level=config.server.log_level).start()
        # It decides what an interrupt means: it skips a measurement.
        handler = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
        try:
            ready = finish(process)
        finally:
            signal.signal(signal.SIGINT, handler)
        with progress_bar(console) as progress:
            task = progress.add_task("loading the model", total=1.0)
            engine = _make_engine(config.server, ready, lambda at: progress.update(task, completed=at))

            def announce(url: str) -> None:
                progress.stop()
                assert engine.info is not None and engine.limits is not None
                console.print(
                    f"cllm serves {engine.info.name} ({engine.info.description}) at {url}\n"
                    f"{engine.limits.sequences} requests at a time, up to {engine.limits.request_tokens} "
                    f"tokens each; API page at {url}/docs; Ctrl-C ends it"
                )

            with asyncio.Runner(loop_factory=_new_event_loop) as runner:
                runner.run(serve(engine, config.server, listeners, announce, Reloader(config, ready, given)))


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


class Reloader:
    """Checks and makes the engines that replace the serving one; called in a thread."""

    def __init__(self, config: Config, serving: EngineConfig, given: frozenset[str]) -> None:
        self._config = config
        self._serving = serving
        self._given = given
        self._made: tuple[EngineClient, EngineConfig] | None = None

    def __call__(self, model: str) -> EngineClient:
        """An engine for a file of --model-dir, or for the one that is served. Raises ClientError."""
        server = self._config.server
        if self._made is not None and self._made[0].loaded.exception() is None:
            self._serving = self._made[1]  # the engine made last could be loaded, so has taken over
        self._made = None
        path = find_model(server.model_dir, model) if model else Path(self._serving.model)
        asked = msgspec.structs.replace(self._config.engine, model=str(path))
        if str(path) == self._serving.model:
            # The context as now: what fits beside the old one must not change which requests get a 400.
            serving = self._serving
            asked = msgspec.structs.replace(asked, parallel=serving.parallel, ctx_size=serving.ctx_size)
        task = Preparation(asked=asked, given=self._given, log_level=server.log_level, beside=True)
        try:
            ready = finish(task.start())
        except SetupError as error:
            # The client knows the folder; the answer may travel further.
            raise ReloadFailed(str(error).replace(str(path), path.name)) from None
        engine = _make_engine(server, ready)
        self._made = engine, ready
        return engine


def find_model(folder: str, name: str) -> Path:
    """A file of the folder, with links resolved. Raises Forbidden for anything outside it."""
    if not folder:
        raise Forbidden("model: no other file may be loaded; start the server with --model-dir FOLDER")
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        root = Path(folder).expanduser().resolve()
        path = (root / name).resolve()
        if root in path.parents:
            return path
    raise Forbidden("model: this is not a file in --model-dir")

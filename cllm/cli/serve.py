"""`cllm serve`: from settings to a listening server, and to the engines that it loads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from cllm.backend.compute_turns import share_turns
from cllm.cli.options import fail, progress_bar, with_options
from cllm.cli.prepare import Answer, Preparation, SurveyTask, finish, stamp
from cllm.cli.served import choose_models, is_several, make_common
from cllm.config import ClusterConfig, Config, EngineConfig, ModelConfig, Prepared, ServerConfig
from cllm.errors import CllmError, ConfigError, Forbidden, NotEnoughMemory, ReloadFailed, SetupError
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import Memory, ServedModel
from cllm.frontend.tenants import Tenants
from cllm.logs import configure_logging
from cllm.models.files import format_size, parse_file_type
from cllm.models.survey import Survey
from cllm.names import path_below
from cllm.server.app import read_defaults
from cllm.server.serve import Listeners, bind, serve
from cllm.workers.executor import ProcessExecutor

CLUSTER_WORKER = "cllm.cluster.cluster_worker"
MAX_SHOWN = 8  # names in the line that says what is served


@with_options(EngineConfig, ServerConfig)
def serve_command(
    config: Config, more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None
) -> None:
    """Serve GGUF models over HTTP: the APIs of OpenAI, Anthropic and llama-server."""
    configure_logging(config.server.log_level)
    try:
        run(config, more or ())
    except CllmError as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        pass


def run(config: Config, more: Sequence[str] = ()) -> None:
    """Check everything that needs no model first; then load and serve until a signal ends it.

    `more` are the models before the last one, which is the configuration's own.
    """
    config = config.with_disk_cache()
    if config.server.model_dir:
        os.environ["CLLM_MODEL_DIR"] = config.server.model_dir  # its models have names
    read_defaults(config.server.defaults)  # a wrong one is refused before anything is loaded
    models = choose_models(config, more)
    with contextlib.closing(bind(config.server)) as listeners:
        if is_several(models, config):
            _serve_several(config, models, listeners)
        else:
            _serve_one(config, models[0], listeners)


def _serve_one(config: Config, model: ModelConfig, listeners: Listeners) -> None:
    """Serve one model under every name; it is loaded before the server answers."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    server = config.server
    if server.cluster:
        ready = prepare_gateway(model.engine, server.cluster)
    else:
        ready = _run_task(Preparation(asked=model.engine, log_level=server.log_level), Prepared)
    with progress_bar(console) as progress:
        task = progress.add_task("loading the model", total=1.0)
        loader = EngineLoader(server)
        engine = loader.make(ready, lambda at: progress.update(task, completed=at))

        def announce(url: str) -> None:
            progress.stop()
            assert engine.info is not None and engine.limits is not None
            info = engine.info
            quant, size = parse_file_type(info.description).quant, format_size(info.size_bytes)
            console.print(
                f"cllm serves {info.name} ({' '.join((info.architecture, quant)).strip()}, {size}) at {url}\n"
                f"{engine.limits.sequences} requests at a time, up to {engine.limits.request_tokens} "
                f"tokens each; open {url} to chat and to see what it does; Ctrl-C ends it"
            )

        path = Path(ready.config.model)
        model = msgspec.structs.replace(model, name=ready.config.alias or path.stem)
        created = int(path.stat().st_mtime)
        served = ServedModel(model, loader, engine=engine, prepared=ready, created=created)
        registry = EngineRegistry([served], tenants=loader.tenants)
        _run(serve(registry, server, listeners, announce))


def _serve_several(config: Config, models: Sequence[ModelConfig], listeners: Listeners) -> None:
    """Serve models by their names; each is loaded when it is asked for."""
    console, server = Console(stderr=True, highlight=False, soft_wrap=True), config.server
    if config.engine.alias:
        raise ConfigError("--alias names one model: give several their names in [models.NAME] of the file")
    task = SurveyTask(
        models=tuple(models),
        common=make_common(config),
        all_models=server.all,
        log_level=server.log_level,
    )
    found = _run_task(task, Survey)
    loader = EngineLoader(server, several=True)
    served = [ServedModel(each.config, loader, info=each.info, created=each.created) for each in found.models]
    limit = dict(found.memory) if not server.cluster else {}
    if server.models_memory_mb and not server.cluster:
        limit["host"] = server.models_memory_mb << 20
    registry = EngineRegistry(
        served,
        limit=limit,
        tenants=loader.tenants,
        queue_size=server.queue_size,
        max_wait_s=server.max_timeout_s,
    )
    names = [model.name for model in served]

    def announce(url: str) -> None:
        listed = ", ".join(names[:MAX_SHOWN]) + (" …" if len(names) > MAX_SHOWN else "")
        memory = ", ".join(f"{size >> 20} MiB of {device}" for device, size in limit.items())
        memory = f"the cluster at {server.cluster}" if server.cluster else memory
        plural = "s" if len(names) > 1 else ""
        console.print(
            f"cllm serves {len(names)} model{plural} ({listed}) at {url}\n"
            f"each is loaded when it is asked for, within {memory or 'unknown memory'}; "
            f"open {url} to chat and to see what it does; Ctrl-C ends it"
        )

    _run(serve(registry, server, listeners, announce))


def prepare_gateway(engine: EngineConfig, cluster: str) -> Prepared:
    """Settings of a gateway, whose tokenizer reads the model here. Raises SetupError. Ray is not imported."""
    from cllm.cluster.directory import check_head, digest_model, name_deployment
    from cllm.models.resolve import resolve

    address = check_head(cluster)
    path = resolve(engine.model, offline=engine.offline)
    settings = {**msgspec.structs.asdict(engine), "model": str(path), "cluster": address}
    name, digest = name_deployment(engine, path), digest_model(path)
    return Prepared(config=ClusterConfig(**settings, deployment=name, digest=digest), stamps=(stamp(path),))


def _run_task(task: Preparation | SurveyTask, kind: type[Answer]) -> Answer:
    """Run a task in a process of its own, and pass interrupts on to it."""
    process = task.start()
    handler = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
    try:
        return finish(process, kind)
    finally:
        signal.signal(signal.SIGINT, handler)


def _run(serving: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(serving)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it runs (not on every platform): the server shares its cores with the model."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class EngineLoader:
    """Checks settings and makes engines, whose tenants have one account over all of them.

    Engines of `several` models take turns on the CPU. Between two steps their threads must not poll there.
    """

    def __init__(self, server: ServerConfig, *, several: bool = False) -> None:
        self.tenants = Tenants()
        self._server = server
        self._turns = share_turns() if several else None

    def prepare(
        self,
        model: ModelConfig,
        *,
        serving: EngineConfig | None = None,
        file: str = "",
        rooms: Sequence[Memory] = (),
    ) -> Prepared:
        """Settings for a file of --model-dir, or for the model's own. Raises CllmError."""
        if self._server.cluster:
            if file:
                raise Forbidden("model: the models of a cluster are changed by `cllm cluster deploy`")
            return prepare_gateway(model.engine, self._server.cluster)
        if file:
            path = find_model(self._server.model_dir, file)
        else:
            path = Path(serving.model if serving is not None else model.engine.model)
        poll = 0 if self._turns is not None and model.engine.poll is None else model.engine.poll
        asked = msgspec.structs.replace(model.engine, model=str(path), poll=poll)
        if serving is not None and str(path) == serving.model:
            # The context as now: what fits beside others must not change which requests get a 400.
            asked = msgspec.structs.replace(asked, parallel=serving.parallel, ctx_size=serving.ctx_size)
        task = Preparation(
            asked=asked,
            log_level=self._server.log_level,
            beside=True,
            rooms=tuple(map(dict, rooms)),
        )
        try:
            return finish(task.start(), Prepared)
        except SetupError as error:
            # The client knows the folder; the answer may travel further.
            reason = str(error).replace(str(path), path.name)
            fits = not isinstance(error, NotEnoughMemory) or not rooms
            raise (ReloadFailed if fits else NotEnoughMemory)(reason) from None

    def is_current(self, prepared: Prepared) -> bool:
        """Whether the files are still those that were prepared."""
        with contextlib.suppress(OSError):
            return all(stamp(Path(each[0])) == each for each in prepared.stamps)
        return False

    def make(self, prepared: Prepared, on_loading: Callable[[float], None] | None = None) -> EngineClient:
        """An engine, not started."""
        server = self._server
        module = CLUSTER_WORKER if isinstance(prepared.config, ClusterConfig) else ""
        return EngineClient(
            ProcessExecutor(prepared.config, log_level=server.log_level, engine_module=module),
            queue_size=server.queue_size,
            queue_tokens=server.queue_tokens,
            max_timeout_s=server.max_timeout_s,
            tenants=self.tenants,
            on_loading=on_loading,
        )


def find_model(folder: str, name: str) -> Path:
    """A file of the folder, with links resolved. Raises Forbidden for anything outside it."""
    if not folder:
        raise Forbidden("model: no other file may be loaded; start the server with --model-dir FOLDER")
    with contextlib.suppress(OSError, ConfigError, RuntimeError):
        return path_below(Path(folder).expanduser(), name, follow_links=True)
    raise Forbidden("model: this is not a file in --model-dir")

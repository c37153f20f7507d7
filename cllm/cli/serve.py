"""`cllm serve`: from settings to a listening server, and to the engines that it loads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Argument

from cllm.backend.compute_turns import share_turns
from cllm.cli.options import with_options
from cllm.cli.prepare import Answer, PrepareTask, SurveyTask, finish, stamp
from cllm.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    ModelConfig,
    PreparedModel,
    ServerConfig,
    make_config,
    name_settings,
)
from cllm.errors import ConfigError, Forbidden, NotEnoughMemory, ReloadFailed, SetupError
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import Memory, ServedModel
from cllm.frontend.tenants import Tenants
from cllm.models.files import format_memory, format_size, parse_file_type
from cllm.models.survey import Survey
from cllm.names import make_visible, path_below
from cllm.process import configure_logging, new_event_loop
from cllm.server.app import check_defaults, read_defaults
from cllm.server.keys import KeyRing
from cllm.server.serve import Listeners, bind, make_tls, serve
from cllm.workers.executor import ProcessExecutor

CLUSTER_WORKER = "cllm.cluster.cluster_worker"
MAX_SHOWN = 8  # names in the line that says what is served


@with_options(EngineConfig, ServerConfig)
def serve_command(config: Config, more: Annotated[list[str] | None, Argument(hidden=True)] = None) -> None:
    """Serve GGUF models over HTTP: the APIs of OpenAI, Anthropic and llama-server."""
    configure_logging(config.server.log_level)
    with contextlib.suppress(KeyboardInterrupt):
        run(config, more or ())


def run(config: Config, more: Sequence[str] = ()) -> None:
    """Check everything that needs no model first; then load and serve until a signal ends it.

    `more` are the models before the last one, which is the configuration's own.
    """
    config = config.with_disk_cache()
    if config.server.model_dir:
        os.environ["CLLM_MODEL_DIR"] = config.server.model_dir  # its models have names
    read_defaults(config.server.defaults)  # what is wrong is refused before anything is loaded
    KeyRing(config.server.api_keys, config.server.api_key)
    make_tls(config.server)
    if config.server.otlp_endpoint:
        from cllm.server.tracing import import_exporter

        import_exporter()
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
        ready = _run_task(PrepareTask(asked=model.engine, log_level=server.log_level), PreparedModel)
        server = server.for_media() if ready.config.mmproj else server
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("loading the model", total=1.0)
        loader = EngineLoader(server)
        engine = loader.make(ready, lambda at: progress.update(task, completed=at))

        def announce(url: str) -> None:
            progress.stop()
            assert engine.info is not None and engine.limits is not None
            info = engine.info
            quant, size = parse_file_type(info.description).quant, format_size(info.size_bytes)
            kind = f"{info.name} ({' '.join((info.architecture, quant)).strip()}"
            memory = sum(ready.memory.values())
            takes = f"; takes up to {format_memory(memory)} of memory" if memory else ""
            console.print(
                f"cllm serves {make_visible(kind)}, {size}) at {url}\n"
                f"{engine.limits.max_running} requests at a time, up to {engine.limits.request_tokens} "
                f"tokens each{takes}; open {url} to chat and to see what it does; Ctrl-C ends it"
            )

        path = Path(ready.config.model)
        model = replace(model, name=next(iter(ready.config.names), path.stem))
        served = ServedModel(model, loader, engine=engine, prepared=ready, created=int(path.stat().st_mtime))
        _run(serve(EngineRegistry([served], tenants=loader.tenants), server, listeners, announce))


def _serve_several(config: Config, models: Sequence[ModelConfig], listeners: Listeners) -> None:
    """Serve models by their names; each is loaded when it is asked for."""
    console, server = Console(stderr=True, highlight=False, soft_wrap=True), config.server
    if any(model.engine.mmproj for model in models):
        server = server.for_media()
    if config.engine.alias:
        raise ConfigError("--alias names one model: give several their names in [models.NAME] of the file")
    common, level = make_common(config), server.log_level
    task = SurveyTask(models=tuple(models), common=common, all_models=server.all, log_level=level)
    found = _run_task(task, Survey)
    loader = EngineLoader(server, several=True)
    served = [ServedModel(each.config, loader, info=each.info, created=each.created) for each in found.models]
    limit = {} if server.cluster else dict(found.memory)
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
        sizes = ", ".join(f"{size >> 20} MiB of {device}" for device, size in limit.items())
        memory = f"the cluster at {server.cluster}" if server.cluster else sizes
        plural = "s" if len(names) > 1 else ""
        console.print(
            f"cllm serves {len(names)} model{plural} ({listed}) at {url}\n"
            f"each is loaded when it is asked for, within {memory or 'unknown memory'}; "
            f"open {url} to chat and to see what it does; Ctrl-C ends it"
        )

    _run(serve(registry, server, listeners, announce))


# The models of a server --------------------------------------------------------------------------


class ModelSection(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `[models.NAME]` beside those of the engine."""

    aliases: tuple[str, ...] = ()
    context: int = 0  # tokens of one request
    defaults: dict[str, Any] = {}
    keep: bool = False
    ttl: float | None = None


def choose_models(config: Config, more: Sequence[str] = ()) -> list[ModelConfig]:
    """The models that are asked for: by arguments, else by the file's sections, else the embedded one.

    An argument may be the name or an alias of a section. Raises ConfigError.
    """
    sections = [_read_section(name, table, config) for name, table in config.models.items()]
    references = [*more, config.engine.model] if config.engine.model else [*more]
    common = make_common(config)
    if not references and (sections or config.server.all):
        return sections
    named = {name.lower(): each for each in reversed(sections) for name in (each.name, *each.aliases)}
    return [
        named.get(each.lower()) or replace(common, engine=replace(common.engine, model=each))
        for each in references or [""]
    ]


def make_common(config: Config) -> ModelConfig:
    """The settings of a model that has none of its own."""
    engine, more = replace(config.engine, model=""), tuple(config.engine.names[1:])
    return ModelConfig(name="", engine=engine, aliases=more, ttl=config.server.sleep_idle_s)


def is_several(models: Sequence[ModelConfig], config: Config) -> bool:
    """Return True if the server chooses a model by its name. A folder may hold several."""
    if config.server.all or len(models) != 1:
        return True
    reference = models[0].engine.model
    if models[0].name or not reference or not Path(reference).expanduser().is_dir():
        return False
    from cllm.models.store import scan_folder

    return len(scan_folder(Path(reference).expanduser(), deep=False)) > 1


def _read_section(name: str, table: Any, config: Config) -> ModelConfig:
    where = f"[models.{name}]"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table")
    try:  # each part takes its own fields
        settings = name_settings(table, ModelSection, EngineConfig)
        section = make_config(ModelSection, settings)
        limit = {"max_request_tokens": section.context} if section.context else {}
        inherited = {**msgspec.structs.asdict(config.engine), "model": name, "alias": name}
        engine = make_config(EngineConfig, {**inherited, **settings, **limit})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return ModelConfig(
        name=name,
        engine=engine,
        aliases=section.aliases,
        defaults=check_defaults(section.defaults, f"{where} defaults"),
        keep=section.keep,
        ttl=max(0.0, config.server.sleep_idle_s if section.ttl is None else section.ttl),
    )


def prepare_gateway(engine: EngineConfig, cluster: str) -> PreparedModel:
    """Settings of a gateway, whose tokenizer reads the model here. Raises SetupError. Ray is not imported."""
    from cllm.cluster.directory import check_head, digest_model, name_deployment
    from cllm.models.resolve import resolve

    if engine.mmproj:
        raise ConfigError("--mmproj: the models of a cluster take text only; leave out one of the two")
    address = check_head(cluster)
    path = resolve(engine.model, offline=engine.offline)
    settings = {**msgspec.structs.asdict(engine), "model": str(path), "cluster": address}
    name, digest = name_deployment(engine, path), digest_model(path)
    config = ClusterConfig(**settings, deployment=name, digest=digest)
    return PreparedModel(config=config, stamps=(stamp(path),))


def _run_task(task: PrepareTask | SurveyTask, kind: type[Answer]) -> Answer:
    """Run a task in a process of its own, and pass interrupts on to it."""
    process = task.start()
    handler = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
    try:
        return finish(process, kind)
    finally:
        signal.signal(signal.SIGINT, handler)


def _run(serving: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serving)


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
    ) -> PreparedModel:
        """Settings for a file of --model-dir, or for the model's own. Raises CllmError."""
        if self._server.cluster:
            if file:
                raise Forbidden("model: the models of a cluster are changed by `cllm cluster deploy`")
            return prepare_gateway(model.engine, self._server.cluster)
        path = self.find_file(file) if file else Path((serving or model.engine).model)
        poll = 0 if self._turns is not None and model.engine.poll is None else model.engine.poll
        asked = replace(model.engine, model=str(path), poll=poll)
        if serving is not None and str(path) == serving.model:
            # The context as now: what fits beside others must not change which requests get a 400.
            asked = replace(asked, parallel=serving.parallel, ctx_size=serving.ctx_size)
        level, given = self._server.log_level, tuple(map(dict, rooms))
        task = PrepareTask(asked=asked, log_level=level, beside=True, rooms=given)
        try:
            return finish(task.start(), PreparedModel)
        except SetupError as error:
            # The client knows the folder; the answer may travel further.
            reason = str(error).replace(str(path), path.name)
            fits = not isinstance(error, NotEnoughMemory) or not rooms
            raise (ReloadFailed if fits else NotEnoughMemory)(reason) from None

    def find_file(self, name: str) -> Path:
        """A file of --model-dir, with links resolved. Raises Forbidden for anything outside it."""
        if not (folder := self._server.model_dir):
            raise Forbidden("model: no other file may be loaded; start the server with --model-dir FOLDER")
        with contextlib.suppress(OSError, ConfigError, RuntimeError):
            return path_below(Path(folder).expanduser(), name, follow_links=True)
        raise Forbidden("model: this is not a file in --model-dir")

    def is_current(self, prepared: PreparedModel) -> bool:
        """Return True if the files are still those that were prepared."""
        with contextlib.suppress(OSError):
            return all(stamp(Path(each[0])) == each for each in prepared.stamps)
        return False

    def make(self, prepared: PreparedModel, report: Callable[[float], None] | None = None) -> EngineClient:
        """An engine, not started."""
        server = self._server
        module = CLUSTER_WORKER if isinstance(prepared.config, ClusterConfig) else ""
        return EngineClient(
            ProcessExecutor(prepared.config, log_level=server.log_level, engine_module=module),
            queue_size=server.queue_size,
            queue_tokens=server.queue_tokens,
            max_timeout_s=server.max_timeout_s,
            tenants=self.tenants,
            on_loading=report,
        )

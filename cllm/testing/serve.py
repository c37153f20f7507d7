"""A server of the scripted model, and its workers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from cllm.backend.base import ModelRunner
from cllm.config import ClusterConfig, EngineConfig, ServerConfig
from cllm.testing.scripted import CHAT_TEMPLATE, FakeVocabulary, ScriptedRunner
from cllm.types import Pooling


def _make_runner(config: EngineConfig, progress: Callable[[float], None]) -> ModelRunner:
    """The engine worker's runner. The configuration's `model` is the time a step takes, in milliseconds."""
    progress(1.0)
    return ScriptedRunner(
        sequences=config.parallel or 8,
        cells=config.ctx_size or 8192,
        batch_tokens=config.batch_tokens,
        unified=config.unified_kv,
        step_s=float(config.model or 0) / 1000,
        pooling=Pooling(config.pooling or "mean"),
        chat_template=CHAT_TEMPLATE,
    )


def main(arguments: list[str]) -> int:
    """Serve `ScriptedRunner` over HTTP until a signal ends it, or be a worker of such a server."""
    if arguments[:1] != ["serve"]:
        from cllm.workers.engine_worker import main as run_worker
        from cllm.workers.tokenizer import TokenizerWorker, answer_tasks

        given = TokenizerWorker(FakeVocabulary(), CHAT_TEMPLATE).perform, FakeVocabulary.bound
        return run_worker(arguments, _make_runner, lambda channel, _: answer_tasks(channel, *given))
    parser = argparse.ArgumentParser(prog="python -m cllm.testing serve")
    numbers = {"port": 0, "parallel": 8, "ctx-size": 8192, "queue-size": 1024, "draft-tokens": 0}
    texts = {"host": "127.0.0.1", "log-level": "warning", "api-key": "", "api-keys": "", "cors-origins": ""}
    texts |= dict.fromkeys(("pooling", "cache-dir", "cluster", "engine-module"), "")
    for name, default in (texts | numbers | {"step-ms": 0.0}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    options = vars(parser.parse_args(arguments[1:]))
    names = ("parallel", "ctx_size", "draft_tokens", "pooling", "cache_dir")
    settings = {name: options.pop(name) for name in names}
    settings |= {"model": str(options.pop("step_ms")), "batch_tokens": 512}
    settings["cache_disk_mb"] = 64 if settings["cache_dir"] else 0
    cluster, module = options.pop("cluster"), options.pop("engine_module")
    engine = EngineConfig(**settings)
    if cluster:
        engine = ClusterConfig(**settings, cluster=cluster, deployment="scripted")
        module = module or "cllm.cluster.cluster_worker"
    _serve(engine, ServerConfig(**options, drain_s=1.0), module)
    return 0


def _serve(config: EngineConfig, server: ServerConfig, engine_module: str) -> None:
    """The engine may be another worker's."""
    from cllm.frontend.engine_client import EngineClient
    from cllm.frontend.engine_registry import EngineRegistry
    from cllm.process import configure_logging, new_event_loop
    from cllm.server.serve import bind, serve
    from cllm.workers.executor import ProcessExecutor

    configure_logging(server.log_level)
    options = {"log_level": server.log_level, "module": "cllm.testing", "engine_module": engine_module}
    engine = EngineClient(ProcessExecutor(config, **options), queue_size=server.queue_size)
    announce = partial(print, "cllm serves fake (a script) at", flush=True)
    with contextlib.closing(bind(server)) as listeners, asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(EngineRegistry.of(engine), server, listeners, announce))

"""`python -m cllm.cli.fake serve`: the whole server on a model that costs nothing and says what it is told.

For measuring and testing everything around the engine: HTTP, admission, both child processes and the
scheduler are the real ones. The children are this module too: `python -m cllm.cli.fake FD engine|text LEVEL`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable

from cllm.backend.base import ModelRunner
from cllm.cli.serve import _new_event_loop
from cllm.config import EngineConfig, ServerConfig
from cllm.frontend.engine_client import EngineClient
from cllm.logs import configure_logging
from cllm.server.serve import bind, serve
from cllm.testing import CHAT_TEMPLATE, FakeVocabulary, ScriptedRunner
from cllm.workers.channel import Channel
from cllm.workers.engine_worker import main as child_main
from cllm.workers.executor import ProcessExecutor
from cllm.workers.tokenizer import TokenizerWorker, answer_tasks


def make_runner(config: EngineConfig, progress: Callable[[float], None]) -> ModelRunner:
    """The configuration's `model` is the time a step takes, in milliseconds."""
    progress(1.0)
    return ScriptedRunner(
        sequences=config.parallel,
        cells=config.ctx_size,
        batch_tokens=config.batch_tokens,
        unified=config.unified_kv,
        step_s=float(config.model) / 1000,
        chat_template=CHAT_TEMPLATE,
    )


def serve_tokenizer(channel: Channel, config: EngineConfig) -> None:
    answer_tasks(channel, TokenizerWorker(FakeVocabulary(), CHAT_TEMPLATE))


def run(config: EngineConfig, server: ServerConfig) -> None:
    """Serve until told to stop."""
    configure_logging(server.log_level)
    host = ProcessExecutor(config, log_level=server.log_level, module="cllm.cli.fake")
    engine = EngineClient(host, queue_size=server.queue_size)

    def announce(url: str) -> None:
        print(f"cllm serves fake (a script) at {url}", flush=True)

    with contextlib.closing(bind(server)) as listener, asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(serve(engine, server, listener, announce))


def main(arguments: list[str]) -> int:
    if arguments[:1] != ["serve"]:
        return child_main(arguments, make_runner, serve_tokenizer)
    parser = argparse.ArgumentParser(prog="python -m cllm.cli.fake serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--ctx-size", type=int, default=8192, help="cells in all, shared equally")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a step takes")
    parser.add_argument("--queue-size", type=int, default=1024)
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args(arguments[1:])
    engine = EngineConfig(
        model=str(options.step_ms),
        parallel=options.parallel,
        ctx_size=options.ctx_size,
        batch_tokens=512,
        draft_tokens=0,
    )
    run(
        engine,
        ServerConfig(
            host=options.host,
            port=options.port,
            queue_size=options.queue_size,
            log_level=options.log_level,
            drain_s=1.0,
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

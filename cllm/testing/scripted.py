"""A runner that answers with the text its prompt holds, and a server of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cllm.backend.base import Batch, ModelRunner, StepResult, StepStatus
from cllm.config import ClusterConfig, EngineConfig, ServerConfig
from cllm.testing.fake_runner import END_TOKEN, TOKEN_BITS, TURN, FakeRunner, FakeVocabulary
from cllm.types import Pooling, SamplingParams

# Roles and tools as text; an answer, earlier or to come, follows on TURN. Calls are written as Hermes does.
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}, to be used as <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|x|>{{ message.content or '' }}{% for call in message.tool_calls %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% else %}{{ message.role }}: {{ message.content or '' }}{% endif %}\n"
    "{% endfor %}<|x|>"
)
BEGIN, NEXT, END, FAIL = "\x02", "\x1e", "\x03", "\x04"


def say(text: str, *later: str, fails: bool = False) -> str:
    """A prompt, or a part of one, that makes `ScriptedRunner` answer `text` and then, with `fails`, fail.

    The turns that follow on it without a script of their own, such as the result of a tool call, are answered
    by the texts of `later`, one each; the last of all texts again and again.
    """
    return f"{BEGIN}{NEXT.join((text, *later))}{FAIL if fails else ''}{END}"


def call_tool(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as the scripted model writes it: a text for `say`."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def find_script(memory: Sequence[int]) -> tuple[bytes, bool] | None:
    """The rest of the last script in a sequence's tokens; True where it fails after that."""
    tokens = np.asarray(memory, np.uint16) & ((1 << TOKEN_BITS) - 1)
    turns = np.flatnonzero(tokens == TURN)
    plain = np.where(tokens < END_TOKEN, tokens, 0).astype(np.uint8).tobytes()
    begin = plain.rfind(BEGIN.encode(), 0, int(turns[-1]) if len(turns) else len(plain))
    end = plain.find(END.encode(), begin)
    if begin < 0 or end < 0:
        return None
    answer = int(turns[-1]) + 1 if len(turns) else end + 1
    answered = int(np.count_nonzero(turns > end)) - 1
    texts = plain[begin + 1 : end].split(NEXT.encode())
    text = texts[max(0, min(answered, len(texts) - 1))]
    return text.removesuffix(FAIL.encode())[len(memory) - answer :], text.endswith(FAIL.encode())


class ScriptedRunner(FakeRunner):
    """A `FakeRunner` that answers with the text its prompt holds (`say`)."""

    def _decode(self, batch: Batch) -> StepResult:
        for row in batch.rows:
            if row.outputs and find_script([*self.memory[row.seq_id], *row.tokens]) == (b"", True):
                return StepResult(StepStatus.BAD_BATCH, code=-1)
        return super()._decode(batch)

    def _next_token(self, memory: Sequence[int], params: SamplingParams) -> int:
        script = find_script(memory)
        if script is None:
            return super()._next_token(memory, params)
        return script[0][0] if script[0] else END_TOKEN


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
    new_loop = asyncio.Runner(loop_factory=new_event_loop)
    with contextlib.closing(bind(server)) as listeners, new_loop as runner:
        runner.run(serve(EngineRegistry.of(engine), server, listeners, announce))

"""The text process: vocabulary only, no weights, no KV."""

from __future__ import annotations

import logging
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel
from cllm.config import EngineConfig
from cllm.text.chat_template import deadly_guard
from cllm.workers.channel import Channel
from cllm.workers.tokenizer import (
    Numbered,
    NumberedAnswer,
    Refused,
    TokenizerAnswer,
    TokenizerTask,
    TokenizerWorker,
)

log = logging.getLogger(__name__)
WORKERS = 2  # a long prompt must not hold up the short ones behind it
MAX_MEMORY = 4 << 30  # bytes beyond what it has when the vocabulary is loaded


def serve_tokenizer(channel: Channel, config: EngineConfig) -> None:
    """Answer text tasks until the parent closes its end."""
    model = LlamaModel(load(), Path(config.model), DeferredFrees(), vocabulary_only=True)
    info = model.info(config.chat_template)
    worker = TokenizerWorker(
        model.vocabulary, info.chat_template, deadly_guard, tool_template=info.tool_template
    )
    _bound_memory()
    answer_tasks(channel, worker)


def answer_tasks(channel: Channel, worker: TokenizerWorker) -> None:
    """Do what is asked, several tasks at a time, until the parent closes its end."""
    decoder = msgspec.msgpack.Decoder(Numbered)

    def answer(numbered: Numbered) -> None:
        reply = NumberedAnswer(numbered.number, _perform(worker, numbered.task))
        channel.send(msgspec.msgpack.encode(reply))

    with ThreadPoolExecutor(WORKERS) as pool:
        while (frame := channel.receive()) is not None:
            pool.submit(answer, decoder.decode(frame))


def _perform(worker: TokenizerWorker, task: TokenizerTask) -> TokenizerAnswer:
    """Every task gets an answer, even one that finds a fault of ours. What is logged names no text."""
    try:
        return worker.perform(task)
    except Exception as error:
        log.error("a text task failed: %s in %s", type(error).__name__, type(task).__name__)
        return Refused("engine_error", "this text could not be processed")


def _bound_memory() -> None:
    """Hostile input may end this process, not the machine's memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):
        pass  # not where the system cannot tell or keep it

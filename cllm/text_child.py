"""The text process: vocabulary only, no weights, no KV."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from cllm.backend.llama.library import load
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.ownership import Graveyard
from cllm.config import EngineConfig
from cllm.engine.child import Channel
from cllm.errors import EngineError
from cllm.text.work import Numbered, NumberedAnswer, Refused, TextWorker

log = logging.getLogger(__name__)
WORKERS = 2  # a long prompt must not hold up the short ones behind it


def serve_text(channel: Channel, config: EngineConfig) -> None:
    """Answer text tasks until the parent closes its end."""
    model = LlamaModel(load(), Path(config.model), Graveyard(), vocabulary_only=True)
    answer_tasks(channel, TextWorker(model.vocabulary, model.facts().chat_template))


def answer_tasks(channel: Channel, worker: TextWorker) -> None:
    """Do what is asked, several tasks at a time, until the parent closes its end."""
    decoder = msgspec.msgpack.Decoder(Numbered)

    def answer(numbered: Numbered) -> None:
        try:
            reply = msgspec.msgpack.encode(NumberedAnswer(numbered.number, worker.perform(numbered.task)))
        except Exception:  # whoever waits must hear of it at once, not when their time is up
            log.exception("a text task failed")
            refused = Refused(EngineError.code, "this text could not be processed; the log has the details")
            reply = msgspec.msgpack.encode(NumberedAnswer(numbered.number, refused))
        channel.send(reply)

    with ThreadPoolExecutor(WORKERS) as pool:
        while (frame := channel.receive()) is not None:
            pool.submit(answer, decoder.decode(frame))

"""Text work for routes: off the event loop, bounded in time."""

from __future__ import annotations

import asyncio

from cllm.engine.engine import Engine
from cllm.errors import EngineNotReady, InvalidRequest
from cllm.text.work import TextAnswer, TextTask, TokenizeText, Tokens
from cllm.types import Limits, ModelFacts

TEXT_LIMIT_S = 30.0  # tokenising 8 MiB takes a few seconds; what takes longer hangs


def loaded(engine: Engine) -> tuple[ModelFacts, Limits]:
    """What is known once the model is loaded; raises EngineNotReady before."""
    if engine.facts is None or engine.limits is None:
        raise EngineNotReady("the model is still loading")
    return engine.facts, engine.limits


async def do_text(engine: Engine, task: TextTask) -> TextAnswer:
    """Do a text task; one that hangs is given up, and its process with it."""
    future = engine.text.submit(task)
    try:
        async with asyncio.timeout(TEXT_LIMIT_S):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        engine.text.abort(future)
        raise InvalidRequest(f"the text could not be processed within {TEXT_LIMIT_S:.0f} s") from None


async def to_tokens(engine: Engine, task: TextTask) -> tuple[int, ...]:
    """The tokens of a prompt or a conversation."""
    answer = await do_text(engine, task)
    assert isinstance(answer, Tokens)
    return answer.tokens


async def tokenize(engine: Engine, text: str) -> tuple[int, ...]:
    return await to_tokens(engine, TokenizeText(text))

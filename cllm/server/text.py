"""Text work for routes: off the event loop, bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cllm.engine.engine import Engine
from cllm.errors import CllmError, EngineNotReady, InvalidRequest
from cllm.server.schema import ConstrainedBody, SamplingBody
from cllm.text.work import CheckConstraint, TextAnswer, TextTask, TokenizeText, Tokens
from cllm.types import ConstraintSpec, Limits, ModelFacts, SamplingParams

GRAMMAR_LIMIT_S = 5.0  # the first one also builds the compiler
TEXT_LIMIT_S = 30.0  # tokenising 8 MiB takes a few seconds; what takes longer hangs


def loaded(engine: Engine) -> tuple[ModelFacts, Limits]:
    """What is known once the model is loaded; raises EngineNotReady before."""
    if engine.facts is None or engine.limits is None:
        raise EngineNotReady("the model is still loading")
    return engine.facts, engine.limits


def checked_tokens(engine: Engine, tokens: Sequence[int], field: str) -> tuple[int, ...]:
    """Token ids a client sent; raises InvalidRequest for one outside the vocabulary."""
    size = loaded(engine)[0].vocabulary_size
    if (largest := max(tokens, default=0)) >= size:
        raise InvalidRequest(f"{field}: {largest} is no token id (0 to {size - 1})", field=field)
    return tuple(tokens)


async def do_text(engine: Engine, task: TextTask, limit_s: float = TEXT_LIMIT_S) -> TextAnswer:
    """Do a text task; one that hangs is given up, and its process with it."""
    future = engine.text.submit(task)
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        engine.text.abort(future)
        raise InvalidRequest(f"the text could not be processed within {limit_s:.0f} s") from None
    except CllmError as error:
        engine.metrics.refused.labels(error.code).inc()
        raise


async def constraint_of(engine: Engine, body: ConstrainedBody) -> ConstraintSpec | None:
    """What the answer must look like, known to compile. Raises InvalidRequest."""
    try:
        spec = body.constraint()
    except ValueError as error:
        raise InvalidRequest(str(error), field="response_format") from None
    if spec is not None:
        await do_text(engine, CheckConstraint(spec), GRAMMAR_LIMIT_S)
    return spec


async def constraint_as(engine: Engine, body: ConstrainedBody, field: str) -> ConstraintSpec | None:
    """The same where the form of an answer is asked for in another field than `response_format`."""
    try:
        return await constraint_of(engine, body)
    except InvalidRequest as error:
        if error.field in (None, "response_format"):
            field = "json_schema" if body.json_schema is not None else field
            message = error.message.removeprefix("response_format: ")
            raise InvalidRequest(f"{field}: {message}", field) from None
        raise


def sampling_of(body: SamplingBody, vocabulary_size: int) -> SamplingParams:
    """The sampling parameters. Raises InvalidRequest."""
    try:
        return body.sampling(vocabulary_size)
    except ValueError as error:
        raise InvalidRequest(str(error), field="logit_bias") from None


async def to_tokens(engine: Engine, task: TextTask) -> tuple[int, ...]:
    """The tokens of a text or a conversation."""
    answer = await do_text(engine, task)
    assert isinstance(answer, Tokens)
    return answer.tokens


async def prompt_tokens(engine: Engine, text: str) -> tuple[int, ...]:
    """The tokens of a prompt; one that cannot fit raises ContextLengthExceeded."""
    return await to_tokens(engine, TokenizeText(text, loaded(engine)[1].request_tokens))

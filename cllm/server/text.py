"""Text work for routes: off the event loop, bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cllm.engine.engine import Engine
from cllm.errors import CllmError, EngineNotReady, InvalidRequest, ModelNotFound
from cllm.server.schema import ConstrainedBody, SamplingBody
from cllm.text.constraint import FIELDS
from cllm.text.work import CheckConstraint, TextAnswer, TextTask, TokenizeText, Tokens
from cllm.types import ConstraintKind, ConstraintSpec, Limits, ModelFacts, SamplingParams

GRAMMAR_LIMIT_S = 5.0  # the first one also builds the compiler
TEXT_LIMIT_S = 30.0  # tokenising 8 MiB takes a few seconds; what takes longer hangs


def loaded(engine: Engine) -> tuple[ModelFacts, Limits]:
    """What is known once the model is loaded; raises EngineNotReady before."""
    if engine.facts is None or engine.limits is None:
        raise EngineNotReady("the model is still loading")
    return engine.facts, engine.limits


def check_model(name: str | None) -> None:
    """Any plain name is served by the one loaded model; a path is not a name."""
    if name is not None and (".." in name or name.startswith(("/", "~")) or "\\" in name):
        raise ModelNotFound("there is no such model; GET /v1/models lists what is served")


def model_name(engine: Engine, asked: str | None) -> str:
    """What an answer calls the model: as it was asked for, or its own name."""
    return asked or loaded(engine)[0].name


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
        raise InvalidRequest(f"the text could not be processed within {limit_s:.0f} s; shorten it") from None
    except CllmError as error:
        engine.metrics.refused.labels(error.code).inc()
        raise


async def constraint_of(engine: Engine, body: ConstrainedBody) -> ConstraintSpec | None:
    """What the answer must look like, known to compile. Raises InvalidRequest."""
    try:
        spec = body.constraint()
    except ValueError as error:
        raise InvalidRequest(str(error), body.form_field) from None
    if spec is None:
        return None
    try:
        await do_text(engine, CheckConstraint(spec), GRAMMAR_LIMIT_S)
    except InvalidRequest as error:
        if spec.kind is not ConstraintKind.JSON_SCHEMA:
            raise
        # Every API has its own name for where a schema stands.
        field, told = body.form_field, error.message.removeprefix(f"{FIELDS[spec.kind]}: ")
        raise InvalidRequest(f"{field}: {told}", field) from None
    return spec


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
    """The tokens of a prompt; one that cannot fit raises ContextLengthExceeded, a full queue QueueFull."""
    engine.check_room()
    return await to_tokens(engine, TokenizeText(text, loaded(engine)[1].request_tokens))

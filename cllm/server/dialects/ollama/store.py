"""Ollama's /api/pull and /api/delete: the models of this machine, for operators."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.responses import Response, StreamingResponse

from cllm.errors import CllmError, ConfigError, InvalidRequest, ModelNotFound, SetupError
from cllm.models.files import HubReference, parse_hub
from cllm.server.dialect import NDJSON, StructResponse, encode_line
from cllm.server.dialects.ollama import answers, bodies, ollama

POLL_S = 0.5  # between two lines about a pull
_NOT_FOUND = ("model_not_found", "there is no model 'x' on this machine", "No such model")
_NOT_REMOVED = ("invalid_request", "x is used by process 4711: unload it first", "It is in use, or embedded")


@ollama.post("/api/pull", answers.ProgressLine("success"), lines=map(encode_line, answers.PULL_LINES))
async def pull(body: bodies.PullBody) -> Response:
    """Get a model from Hugging Face or ModelScope; continues where it was interrupted."""
    text = bodies.strip_tag(body.model)
    reference = _parse(text)
    if body.stream:
        return StreamingResponse(_lines(text, reference), media_type=NDJSON)
    try:
        async for _ in _pull(text, reference):
            pass
    except SetupError as error:
        raise InvalidRequest(error.message, "model") from None
    return StructResponse(answers.ProgressLine("success"))


def _parse(text: str) -> HubReference:
    """A reference to a hub. Raises InvalidRequest for any other name, and for any other address."""
    with suppress(ConfigError):
        if (found := parse_hub(text)) is not None and not found.endpoint:
            return found
    raise InvalidRequest(
        "model: give a model of a hub as hf.co/USER/REPO:QUANT or ms:USER/REPO:QUANT; names of Ollama's own "
        "library lead nowhere here",
        "model",
    )


async def _lines(text: str, reference: HubReference) -> AsyncIterator[bytes]:
    try:
        async for line in _pull(text, reference):
            yield encode_line(line)
    except CllmError as error:
        yield ollama.frame_error(error)


async def _pull(text: str, reference: HubReference) -> AsyncIterator[answers.ProgressLine]:
    """The progress of a pull, which runs in a process of its own and ends with its reader."""
    yield answers.ProgressLine("pulling manifest")
    plan = await asyncio.to_thread(_Plan, reference)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cllm", "pull", "--", text),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    ending = asyncio.ensure_future(child.communicate())
    try:
        while not (await asyncio.wait((ending,), timeout=POLL_S))[0]:
            yield await asyncio.to_thread(plan.look)
        said = (await ending)[1].decode(errors="replace").strip()
        if child.returncode:
            raise SetupError(said.rpartition("\n")[2].removeprefix("cllm: ") or "the pull was ended")
    finally:
        if child.returncode is None:
            child.terminate()
        ending.cancel()
    yield answers.ProgressLine("success")


class _Plan:
    """What is to be pulled, and how much of it is here."""

    def __init__(self, reference: HubReference) -> None:
        from cllm.models.hub import make_hub
        from cllm.models.pull import Pull, PullOptions, find_model

        with make_hub(reference) as hub:
            model = find_model(hub, reference)
            self._pull = Pull(hub, reference, model, PullOptions())
        self._total = model.chosen.size
        self._digest = f"sha256:{model.files[0].etag}"

    def look(self) -> answers.ProgressLine:
        here = self._total - self._pull.missing_bytes()
        return answers.ProgressLine("pulling", self._digest, self._total, max(0, here))


@ollama.delete("/api/delete", answers.ProgressLine("success"), errors={400: _NOT_REMOVED, 404: _NOT_FOUND})
async def delete(body: bodies.DeleteBody) -> Response:
    """Remove a model from this machine; one that is loaded is refused."""
    try:
        await asyncio.to_thread(_delete, bodies.strip_tag(body.model))
    except (SetupError, OSError) as error:
        raise InvalidRequest(str(error), "model") from None
    return StructResponse(answers.ProgressLine("success"))


def _delete(name: str) -> None:
    from cllm.models.store import find_stored, find_users, plan_removal, remove, scan

    reference = parse_hub(name)
    if reference is not None:
        model = find_stored(reference)
    else:
        wanted = name.lower()
        model = next(
            (
                each
                for each in scan()
                if wanted in (each.name.lower(), each.stem.lower(), each.path.name.lower())
            ),
            None,
        )
    if model is None:
        raise ModelNotFound(f"there is no model {name!r} on this machine")
    removal = plan_removal(model)
    if users := find_users(removal.paths):
        raise InvalidRequest(f"{model.name} is used by process {next(iter(users))}: unload it first", "model")
    remove(model, removal)

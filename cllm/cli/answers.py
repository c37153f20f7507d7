"""Answers to a conversation: of a running server, or of a model that is loaded here. Both stream alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from cllm.cli.client import ServedModel, ServerClient
from cllm.config import EngineConfig
from cllm.errors import CllmError, ConfigError, ModelNotFound, Unauthorized
from cllm.types import SamplingParams

if TYPE_CHECKING:
    from cllm.llm import LLM

ROUTE = "/v1/chat/completions"
SAMPLING = frozenset(field.name for field in msgspec.structs.fields(SamplingParams))
Messages = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]  # fields of /v1/chat/completions


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    reasoning: bool = False


class AnswerEnd(NamedTuple):
    """What an answer took, in tokens; None where the server does not say."""

    prompt_tokens: int | None = None
    tokens: int | None = None
    cached_tokens: int = 0
    cut: bool = False  # by the limit of tokens


class AnswerStats:
    """The times and tokens of one answer, as its reader sees them."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._first: float | None = None
        self.end = AnswerEnd()

    def see_piece(self) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    @property
    def tokens(self) -> int:
        return self.end.tokens or 0

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self._last - (self._first or self._last)

    def describe(self, context: int) -> str:
        """One line: tokens, tokens/s, first token, cached tokens, context used."""
        parts = []
        if self.end.tokens is not None:
            parts.append(f"{self.tokens} tokens")
        if self.tokens > 1 and self.seconds > 0:
            parts.append(f"{(self.tokens - 1) / self.seconds:.1f} tokens/s")
        if self._first is not None:
            parts.append(f"first token {self._first - self._began:.2f} s")
        if self.end.prompt_tokens is not None:
            parts.append(f"{self.end.cached_tokens} of {self.end.prompt_tokens} prompt tokens cached")
            used = self.end.prompt_tokens + self.tokens
            parts.append(f"context {used:,}" + (f" of {context:,}" if context else ""))
        return ", ".join(parts) + ("; cut by the limit of tokens" if self.end.cut else "")


Answer = Generator[Piece | AnswerEnd, None, None]  # pieces, then one end


class AnswerSource(Protocol):
    """Where answers come from. Every method raises CllmError with one line."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def context(self) -> int:
        """Tokens that a conversation may have; 0: not known."""

    @property
    def where(self) -> str:
        """The address of the server, or that the model is loaded here."""

    def answer(self, messages: Messages, options: Options) -> Answer: ...

    def list_models(self) -> list[str]:
        """The names that `change_model` takes."""

    def change_model(self, name: str) -> None: ...

    def close(self) -> None: ...


class ServerAnswers:
    """Answers of a running server."""

    def __init__(self, client: ServerClient, model: str = "") -> None:
        """Raises ModelNotFound, with the list, where the server has no model of this name."""
        self._client = client
        self.where = client.url
        self.name, self.context = self._find(model)[:2]

    def _find(self, name: str) -> ServedModel:
        models = self._client.models()
        found = next((model for model in models if not name or model.is_called(name)), None)
        if found is None:
            names = ", ".join(model.name for model in models) or "none"
            raise ModelNotFound(f"the server at {self.where} has no model {name!r}; it serves: {names}")
        return found

    def list_models(self) -> list[str]:
        return [model.name for model in self._client.models()]

    def change_model(self, name: str) -> None:
        self.name, self.context = self._find(name)[:2]

    def answer(self, messages: Messages, options: Options) -> Answer:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.name, "messages": messages, **options, **usage}
        end = AnswerEnd()
        with closing(self._client.stream(ROUTE, body)) as events:
            for event in events:
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield Piece(thought, reasoning=True)
                    if text := delta.get("content"):
                        yield Piece(text)
                    end = end._replace(cut=end.cut or choice.get("finish_reason") == "length")
                if used := event.get("usage"):
                    cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    end = AnswerEnd(used["prompt_tokens"], used["completion_tokens"], cached, end.cut)
        yield end

    def close(self) -> None:
        self._client.close()


class LocalAnswers:
    """Answers of a model that is loaded for them."""

    where = "loaded here"

    def __init__(self, config: EngineConfig, report: Callable[[str], None]) -> None:
        """Load the model, which is pulled first where it is missing. `report` takes what goes on."""
        self._config, self._report = config, report
        self._llm = self._open(config)

    @property
    def name(self) -> str:
        return self._llm.info.name

    @property
    def context(self) -> int:
        return self._llm.limits.request_tokens

    def _open(self, config: EngineConfig) -> LLM:
        from cllm.llm import LLM

        llm = LLM(config=config)
        self._report(f"loading {config.model or 'the embedded model'} …")
        return llm.__enter__()

    def list_models(self) -> list[str]:
        from cllm.models.store import scan

        return [model.name for model in scan(os.environ.get("CLLM_MODEL_DIR", ""))]

    def change_model(self, name: str) -> None:
        """Open another model in the place of this one, which is opened again where that fails."""
        config = msgspec.structs.replace(self._config, model=name)
        self._llm.close()  # memory may not suffice for both
        try:
            self._llm = self._open(config)
            self._config = config
        except CllmError:
            self._llm = self._open(self._config)
            raise

    def answer(self, messages: Messages, options: Options) -> Answer:
        sampling = SamplingParams(**{name: value for name, value in options.items() if name in SAMPLING})
        more: dict[str, Any] = {name: value for name, value in options.items() if name not in SAMPLING}
        more.setdefault("max_tokens", self.context)
        for chunk in self._llm.chat(messages, sampling, stream=True, **more):
            if chunk.reasoning:
                yield Piece(chunk.reasoning, reasoning=True)
            if chunk.text:
                yield Piece(chunk.text)
            if chunk.reply is not None:
                usage = chunk.reply.usage
                cut = chunk.reply.finish_reason == "length"
                yield AnswerEnd(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, cut)

    def close(self) -> None:
        self._llm.close()


def open_source(
    model: str, url: str, config: EngineConfig, report: Callable[[str], None], *, local: bool = False
) -> AnswerSource:
    """The running server where it has the model, else the model loaded here. Raises CllmError.

    With a `url` only that server is meant.
    """
    if local:
        return LocalAnswers(config, report)
    client = ServerClient(url)
    if url or client.is_running():
        try:
            return ServerAnswers(client, model)
        except ModelNotFound as error:
            client.close()
            if url:
                raise
            report(f"{error}; it is loaded here")
        except Unauthorized:
            client.close()
            raise ConfigError(
                f"the server at {client.url} needs an API key: set CLLM_API_KEY; --local loads a model here"
            ) from None
        except BaseException:
            client.close()
            raise
    return LocalAnswers(config, report)

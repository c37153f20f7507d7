"""Errors: every exception that cllm raises on purpose.

Four kinds: the request is wrong (`ClientError`), it cannot be served now (`CapacityError`), cllm or llama.cpp
failed (`EngineError`), cllm cannot start (`SetupError`). `cllm.server.errors` maps them to HTTP.
"""

from __future__ import annotations

import math


class CllmError(Exception):
    """Root of the tree. `code` is stable and machine-readable; the message is for people."""

    code = "error"

    @property
    def message(self) -> str:
        return str(self)


class ClientError(CllmError):
    code = "invalid_request_error"  # the request is wrong; sending it again fails again


class InvalidRequest(ClientError):
    """A field is missing, mistyped or out of range; `field` names it."""

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def no_generation(cls, model: str, architecture: str) -> InvalidRequest:
        """Text was asked of a model that only embeds."""
        return cls(
            f"{model} is an embedding model ({architecture}) and generates no text: "
            "use /v1/embeddings, or /v1/rerank where it is a reranker",
            field="model",
        )


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"  # the prompt does not fit

    def __init__(
        self,
        prompt_tokens: int,
        limit: int,
        *,
        at_least: bool = False,
        message: str = "",
        field: str = "prompt",
    ) -> None:
        """`at_least`: the prompt was not tokenised; its bytes alone are too many."""
        count = f"at least {prompt_tokens}" if at_least else prompt_tokens
        super().__init__(
            message
            # Clients recognise this error by Anthropic's words (then they shorten it) and by OpenAI's.
            or f"prompt is too long: {prompt_tokens} tokens > {limit} maximum. It has {count} tokens, "
            f"but this model's maximum context length is {limit}, prompt and answer together; "
            "shorten the prompt or start the server with a larger --ctx-size",
            field=field,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit

    @classmethod
    def of_input(
        cls, index: int, tokens: int, limit: int, field: str = "input", *, at_least: bool = False
    ) -> ContextLengthExceeded:
        """The same for an embedding input or a rerank prompt."""
        count = f"at least {tokens}" if at_least else tokens
        message = (
            f"{field} {index} has {count} tokens, but a text to embed may hold at most {limit}; "
            "shorten it or start the server with a larger --embed-tokens"
        )
        return cls(tokens, limit, message=message, field=field)


class CacheFileError(ClientError):
    code = "cache_file_invalid"  # a saved slot is corrupt, or of another model


class ReloadFailed(ClientError):
    code = "reload_failed"  # the model could not be changed; the old one serves


class ModelBusy(ClientError):
    code = "model_busy"  # requests need the model: it is not unloaded


class AdapterRefused(ClientError):
    code = "adapter_refused"  # the file is no LoRA adapter of this model, or has changed


class AdapterBusy(ClientError):
    code = "adapter_busy"  # requests need the adapter, or its name is taken


class SlowReader(ClientError):
    code = "slow_reader"  # the client does not read its stream


class ClientGone(ClientError):
    code = "client_gone"  # the client disconnected before its text was tokenised


class Unauthorized(ClientError):
    code = "invalid_api_key"  # no API key, or an unknown one


class Forbidden(ClientError):
    code = "forbidden"  # the key lacks the right, or `Host` is not allowed


class NotFound(ClientError):
    code = "not_found"  # no such route or request


class ModelNotFound(NotFound):
    code = "model_not_found"  # no such model


class NotSupported(ClientError):
    code = "not_supported"  # this server was started without it


class CapacityError(CllmError):
    code = "capacity_error"  # the request is valid, but cannot be served now
    retry_after_s: float = 1.0


class QueueFull(CapacityError):
    code = "queue_full"  # the request queue is full

    def __init__(self, waiting: int, limit: int, retry_after_s: float, *, what: str = "requests") -> None:
        super().__init__(
            f"{waiting} {what} are waiting and the queue holds {limit}; try again in {retry_after_s:.0f} s"
        )
        self.retry_after_s = retry_after_s


class RateLimited(CapacityError):
    code = "rate_limit_exceeded"  # the tenant has used up its rate limit

    def __init__(self, limit: str, retry_after_s: float) -> None:
        super().__init__(f"this key is limited to {limit}; try again in {max(1, math.ceil(retry_after_s))} s")
        self.retry_after_s = retry_after_s


class DeadlineExceeded(CapacityError):
    code = "deadline_exceeded"  # the request's timeout has passed

    def __init__(self, timeout_s: float, where: str) -> None:
        super().__init__(f"the request was not done within its {timeout_s:g} s: it was {where}")


class TokenizerBusy(CapacityError):
    code = "tokenizer_busy"  # too much text waits to be tokenised


class TooManyListeners(CapacityError):
    code = "too_many_listeners"  # of the live feed


class EngineNotReady(CapacityError):
    code = "engine_not_ready"  # the engine is loading or restarting


class ShuttingDown(CapacityError):
    code = "shutting_down"  # the server is draining


class EngineError(CllmError):
    code = "engine_error"  # a failure of cllm or llama.cpp


class EngineDied(EngineError):
    code = "engine_died"  # the engine process ended while the request ran


class PoisonRequest(EngineError):
    code = "poison_request"  # the engine died each time it ran this request


class BadBatch(EngineError):
    code = "bad_batch"  # llama.cpp refused this sequence's rows


class StorageFailed(EngineError):
    code = "storage_failed"  # the disk is full, or fails


class PositionMismatch(EngineError):
    code = "position_mismatch"  # the invariant of derived positions is violated


class IntegrityError(EngineError):
    code = "integrity_error"  # the invariant of KV accounting is violated


class SetupError(CllmError):
    code = "setup_error"  # cllm cannot start: one line, exit code 2


class ModelFileError(SetupError):
    code = "model_file_error"  # missing, truncated, corrupt, not GGUF


class HubError(SetupError):
    code = "hub_error"  # a hub refuses, cannot be reached, or sends what it did not list; or the disk is full


class LibraryError(SetupError):
    code = "library_error"  # no native library, or one that cannot run here


class NotEnoughMemory(SetupError):
    code = "not_enough_memory"  # model + KV do not fit


class ServerUnreachable(SetupError):
    code = "server_unreachable"  # no cllm server answers at the address


class ModelDoesNotFit(NotEnoughMemory):
    code = "model_does_not_fit"  # not even alone beside the models that are kept


class PortInUse(SetupError):
    code = "port_in_use"  # another program listens on the port


class ConfigError(SetupError):
    code = "config_error"  # a flag, a variable or the TOML file has an invalid value


def _by_code(root: type[CllmError]) -> dict[str, type[CllmError]]:
    found: dict[str, type[CllmError]] = {}
    for child in root.__subclasses__():
        found.update(_by_code(child))
    return {**found, root.code: root}


def from_code(code: str, message: str, field: str | None = None, counts: tuple[int, ...] = ()) -> CllmError:
    """Make the error that crossed a process boundary; unknown codes become EngineError."""
    kind = _by_code(CllmError).get(code, EngineError)
    error = kind.__new__(kind)
    CllmError.__init__(error, message)
    if isinstance(error, InvalidRequest):
        error.field = field
    if isinstance(error, ContextLengthExceeded):
        error.prompt_tokens, error.limit = counts or (0, 0)
    return error

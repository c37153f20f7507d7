"""Errors: every exception that cllm raises on purpose.

    CllmError
    ├── ClientError            the request is wrong; sending it again fails again           400
    │   ├── InvalidRequest         a field is missing, mistyped or out of range             400
    │   ├── ContextLengthExceeded  the prompt does not fit                                  400
    │   ├── StateFileError         a saved prefix file is corrupt, or of another model      400
    │   ├── SlowReader             the client does not read its stream                      408
    │   ├── Unauthorized           no API key, or an unknown one                            401
    │   ├── Forbidden              the key lacks the right, or `Host` is not allowed        403
    │   ├── NotFound               no such route or request                                 404
    │   │   └── ModelNotFound      no such model                                            404
    │   └── ReloadFailed           the model could not be changed; the old one serves       409
    ├── CapacityError          the request is valid, but cannot be served now               503
    │   ├── QueueFull              the request queue is full                                429
    │   ├── RateLimited            the tenant has used up its rate limit                    429
    │   ├── DeadlineExceeded       the request's timeout has passed                         504
    │   ├── EngineNotReady         the engine is loading or restarting                      503
    │   └── ShuttingDown           the server is draining                                   503
    ├── EngineError            a failure of cllm or llama.cpp                               500
    │   ├── EngineDied             the engine process ended while the request ran           500
    │   ├── PoisonRequest          the engine died each time it ran this request            500
    │   ├── BadBatch               llama.cpp refused this sequence's rows                   500
    │   ├── StorageFailed          the disk is full, or fails                               507
    │   ├── PositionMismatch       the invariant of derived positions is violated           500
    │   └── IntegrityError         the invariant of KV accounting is violated               500
    └── SetupError             cllm cannot start: one line, exit code 2
        ├── ModelFileError         missing, truncated, corrupt, not GGUF
        ├── LibraryError           no native library, or one that cannot run here
        ├── NotEnoughMemory        model + KV do not fit
        ├── PortInUse              another program listens on the port
        └── ConfigError            a flag, a variable or the TOML file has an invalid value

The table that maps them to HTTP is in `cllm.server.errors`.
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
    code = "invalid_request_error"


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
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int, *, message: str = "", field: str = "prompt") -> None:
        super().__init__(
            message
            # Clients recognise this error by OpenAI's words: "maximum context length is".
            or f"the prompt has {prompt_tokens} tokens, but this model's maximum context length is {limit}: "
            "at most that many fit (prompt and answer together, at least one of them generated); "
            "shorten the prompt or start the server with a larger --ctx-size",
            field=field,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit

    @classmethod
    def of_input(cls, index: int, tokens: int, limit: int, field: str = "input") -> ContextLengthExceeded:
        """The same for an embedding input or a rerank prompt."""
        message = (
            f"{field} {index} has {tokens} tokens, but a text to embed may hold at most {limit}; "
            "shorten it or start the server with a larger --embed-tokens"
        )
        return cls(tokens, limit, message=message, field=field)


class StateFileError(ClientError):
    code = "state_file_invalid"


class ReloadFailed(ClientError):
    code = "reload_failed"


class SlowReader(ClientError):
    code = "slow_reader"


class Unauthorized(ClientError):
    code = "invalid_api_key"


class Forbidden(ClientError):
    code = "forbidden"


class NotFound(ClientError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class CapacityError(CllmError):
    code = "capacity_error"
    retry_after_s: float = 1.0


class QueueFull(CapacityError):
    code = "queue_full"

    def __init__(self, waiting: int, limit: int, retry_after_s: float, *, what: str = "requests") -> None:
        super().__init__(
            f"{waiting} {what} are waiting and the queue holds {limit}; try again in {retry_after_s:.0f} s"
        )
        self.retry_after_s = retry_after_s


class RateLimited(CapacityError):
    code = "rate_limit_exceeded"

    def __init__(self, limit: str, retry_after_s: float) -> None:
        super().__init__(f"this key is limited to {limit}; try again in {max(1, math.ceil(retry_after_s))} s")
        self.retry_after_s = retry_after_s


class DeadlineExceeded(CapacityError):
    code = "deadline_exceeded"

    def __init__(self, timeout_s: float, where: str) -> None:
        super().__init__(f"the request was not done within its {timeout_s:g} s: it was {where}")


class EngineNotReady(CapacityError):
    code = "engine_not_ready"


class ShuttingDown(CapacityError):
    code = "shutting_down"


class EngineError(CllmError):
    code = "engine_error"


class EngineDied(EngineError):
    code = "engine_died"


class PoisonRequest(EngineError):
    code = "poison_request"


class BadBatch(EngineError):
    code = "bad_batch"


class StorageFailed(EngineError):
    code = "storage_failed"


class PositionMismatch(EngineError):
    code = "position_mismatch"


class IntegrityError(EngineError):
    code = "integrity_error"


class SetupError(CllmError):
    code = "setup_error"


class ModelFileError(SetupError):
    code = "model_file_error"


class LibraryError(SetupError):
    code = "library_error"


class NotEnoughMemory(SetupError):
    code = "not_enough_memory"


class PortInUse(SetupError):
    code = "port_in_use"


class ConfigError(SetupError):
    code = "config_error"


def _by_code(root: type[CllmError]) -> dict[str, type[CllmError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_by_code(child))
    return found


def from_code(code: str, message: str) -> CllmError:
    """Make the error that crossed a process boundary; unknown codes become EngineError."""
    kind = _by_code(CllmError).get(code, EngineError)
    error = kind.__new__(kind)
    CllmError.__init__(error, message)
    if isinstance(error, InvalidRequest):
        error.field = None
    return error

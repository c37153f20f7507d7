"""Every error cllm raises on purpose.

    CllmError
    ├── ClientError            the request is wrong; the same request will fail again       400
    │   ├── InvalidRequest         a field is missing, mistyped or out of range             400
    │   ├── ContextLengthExceeded  the prompt does not fit                                  400
    │   ├── StateFileError         a saved state that is corrupt, or of another model       400
    │   ├── SlowReader             the client does not read its stream                      408
    │   ├── Unauthorized           no key, or one nobody has                                401
    │   ├── Forbidden              the key (or the name the server was called by) is not enough 403
    │   ├── NotFound               no such route or request                                 404
    │   │   └── ModelNotFound      no such model                                            404
    │   └── ReloadFailed           the model could not be changed; the old one serves       409
    ├── CapacityError          the request is fine; not now                                 503
    │   ├── QueueFull              the waiting line is full                                 429
    │   ├── RateLimited            this tenant has had what it may have for now             429
    │   ├── DeadlineExceeded       the request's time was up                                504
    │   ├── EngineNotReady         loading or restarting                                    503
    │   └── ShuttingDown           draining                                                 503
    ├── EngineError            our fault, or llama.cpp's                                    500
    │   ├── EngineDied             the engine process ended while the request ran           500
    │   ├── PoisonRequest          the engine died each time with this request              500
    │   ├── BadBatch               llama.cpp refused this sequence's rows                   500
    │   ├── StorageFailed          the disk is full, or fails                               507
    │   ├── PositionMismatch       law 3 broken                                             500
    │   └── IntegrityError         law 7 broken                                             500
    └── SetupError             cllm cannot start; one clear line, exit code 2
        ├── ModelFileError         missing, truncated, corrupt, not GGUF
        ├── LibraryError           no native library, or one that cannot run here
        ├── NotEnoughMemory        model + KV do not fit
        ├── PortInUse              somebody listens there already
        └── ConfigError            a flag, variable or file says something impossible

The table that maps them to HTTP is in `cllm.server.errors`.
"""

from __future__ import annotations

import math


class CllmError(Exception):
    """The root. `code` is stable and machine-readable; the message is for people."""

    code = "error"

    @property
    def message(self) -> str:
        return str(self)


class ClientError(CllmError):
    code = "invalid_request_error"


class InvalidRequest(ClientError):
    """A field is wrong. `field` names it."""

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
            # Clients tell this error from others by the words OpenAI uses: "maximum context length is".
            or f"the prompt has {prompt_tokens} tokens, but this model's maximum context length is {limit}: "
            "at most that many fit (prompt and answer together, at least one of them generated); "
            "shorten the prompt or start the server with a larger --ctx-size",
            field=field,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit

    @classmethod
    def of_input(cls, index: int, tokens: int, limit: int, field: str = "input") -> ContextLengthExceeded:
        """The same for a text that is to become a vector."""
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
    """Rebuild an error that crossed a process boundary; unknown codes become EngineError."""
    kind = _by_code(CllmError).get(code, EngineError)
    error = kind.__new__(kind)
    CllmError.__init__(error, message)
    if isinstance(error, InvalidRequest):
        error.field = None
    return error

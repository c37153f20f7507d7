"""The engine as everybody else sees it: submit a request, read its stream.

Lives in the parent. It keeps the ledger, feeds the host, hands deltas to streams, and survives the host.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import msgspec

from cllm.core.embedding import refuse_impossible
from cllm.errors import (
    CllmError,
    DeadlineExceeded,
    EngineDied,
    EngineNotReady,
    PoisonRequest,
    ShuttingDown,
    SlowReader,
    StateFileError,
    StorageFailed,
    from_code,
)
from cllm.frontend.metrics import EngineMetrics
from cllm.frontend.output_stream import OutputStream
from cllm.frontend.request_queue import RequestQueue, RequestState, Stage
from cllm.frontend.timeouts import RequestTimeouts
from cllm.types import (
    Failure,
    FinishReason,
    Limits,
    ModelInfo,
    Request,
    RequestOutput,
    Snapshot,
    TenantLimits,
    Usage,
)
from cllm.workers.executor import Host
from cllm.workers.messages import (
    Cancel,
    Command,
    Died,
    Inspect,
    Inspection,
    Loading,
    Ready,
    Report,
    RestorePrefixes,
    SavePrefixes,
    StateFileDone,
    StepReport,
    Submit,
)
from cllm.workers.tokenizer_client import TokenizerClient

log = logging.getLogger(__name__)
StreamKind = TypeVar("StreamKind", bound=OutputStream)


class Health(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


def _at_once(call: Callable[..., None], *arguments: Any) -> None:
    call(*arguments)


class EngineClient:
    """Accepts requests from any thread; every accepted one gets exactly one terminal delta (law 4).

    `deliver` decides on which thread reports are handled: an event loop's `call_soon_threadsafe` brings a
    whole step across in one call; by default the host's own thread handles them.
    """

    RESTARTS_IN_A_ROW = 5  # without a single finished request in between: then it is not coming back

    def __init__(
        self,
        host: Host,
        *,
        queue_size: int = 1024,
        queue_tokens: int = 0,
        max_timeout_s: float = 0.0,
        deliver: Callable[..., Any] = _at_once,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self.metrics = EngineMetrics()
        self.health = Health.LOADING
        self.info: ModelInfo | None = None
        self.limits: Limits | None = None
        self.deliver = deliver
        self._host = host
        self._on_loading = on_loading
        self._admission = RequestQueue(queue_size, queue_tokens, max_timeout_s)
        self._deadlines = RequestTimeouts(self._due)
        self._lock = threading.RLock()
        self._epoch = 0  # of the host's run; reports of an earlier one are stale
        self._restarts = 0
        self._loaded: Future[None] = Future()
        self._error: CllmError | None = None
        self._questions = PendingCalls()

    # EngineSim ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load. Returns at once."""
        with self._lock:
            self._start_host()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the model is loaded; raises what kept it from loading."""
        self._loaded.result(timeout)

    def drain(self) -> None:
        """Accept nobody new; those inside go on."""
        with self._lock:
            self.health = Health.DRAINING

    def stop(self) -> None:
        """End now: everybody still here gets an error as their last delta. Idempotent."""
        with self._lock:
            if self.health is Health.STOPPED:
                return
            self.health = Health.STOPPED
            self._epoch += 1
            self._error = ShuttingDown("the server is shutting down")
            self._end_all(self._error)
        self._deadlines.stop()
        self._host.stop()

    def end_all(self) -> None:
        """The time to drain is over: everybody still here gets an error as their last delta."""
        with self._lock:
            self._end_all(ShuttingDown("the server is shutting down"))

    def _end_all(self, error: CllmError) -> None:
        for ticket in self._admission.requests:
            self._drop(ticket, error)
        self._questions.fail_all(error)

    @property
    def text(self) -> TokenizerClient:
        """Tokenising and templates for this model."""
        return self._host.text

    @property
    def loaded(self) -> Future[None]:
        """Done when the model is loaded; fails with what kept it from loading."""
        return self._loaded

    def _start_host(self) -> None:
        self._epoch += 1
        self._host.start(partial(self._deliver, self._epoch))

    def _deliver(self, epoch: int, report: Report) -> None:
        """Bring a report to the thread that handles it. Called on the host's thread."""
        try:
            self.deliver(self._receive, epoch, report)
        except RuntimeError:
            if self.health is not Health.STOPPED:  # then the event loop may be gone already
                raise

    # Requests --------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise what `submit` would raise for any request: before a prompt is even tokenised."""
        with self._lock, self.metrics.refusals():
            self._refuse_unless_open()
            self._admission.refuse_if_full(1)

    def submit(self, request: Request, kind: type[StreamKind]) -> StreamKind:
        """Accept a request or raise at once. Never waits for a step."""
        stream = kind(request.id)
        with self._lock, self.metrics.refusals():
            self._refuse_unless_open()
            if self.info is not None:
                refuse_impossible(request, self.info)
            ticket = self._admission.admit(request, stream, self.limits)
            self.metrics.accepted.inc()
            if ticket.timeout_s is not None:
                self._deadlines.add(request.id, ticket.arrived + ticket.timeout_s)
            self._dispatch()
            stream.queue_position = self._admission.position(ticket)
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; one that has ended already is left alone."""
        with self._lock:
            ticket = self._admission.find(request_id)
            if ticket is None or ticket.cancelled:
                return
            ticket.cancelled = True
            if ticket.stage is Stage.QUEUED:
                self._end(ticket, RequestOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED))
            else:
                self._host.send(Cancel(request_id))

    def set_tenants(self, limits: Mapping[str, TenantLimits]) -> None:
        """Who may have how much, by `Request.tenant`; replaces what was set. Others have no limits."""
        with self._lock:
            self._admission.set_tenants(limits)

    def _due(self, request_id: str) -> None:
        """A deadline has passed. On the timer's thread, so it is brought to the one that handles reports."""
        self.deliver(self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        """End a request whose time is up: the client hears of it now, not when the step is over."""
        with self._lock:
            ticket = self._admission.find(request_id)
            if ticket is None or ticket.cancelled:
                return
            self.metrics.deadlines.labels(ticket.stage.value).inc()
            where = "still waiting" if ticket.stage is Stage.QUEUED else "still being computed"
            self._drop(ticket, DeadlineExceeded(ticket.timeout_s or 0.0, where))
            self._dispatch()

    def _drop(self, ticket: RequestState, error: CllmError) -> None:
        """End a request from this side; the engine frees what it holds as after a cancel."""
        if ticket.stage is Stage.ENGINE:
            self._host.send(Cancel(ticket.request.id))
        self._end_with(ticket, error)

    def inspect(self) -> Future[Snapshot]:
        """The engine's own account of itself, taken between two steps."""
        return self._question(Inspect)

    def save_prefixes(self, name: str) -> Future[StateFileDone]:
        """Write what the RAM tier holds to a state file; fails with why not."""
        return self._question(lambda ticket: SavePrefixes(ticket, name))

    def restore_prefixes(self, name: str) -> Future[StateFileDone]:
        """Put a state file's entries into the RAM tier; fails with why not, and then nothing has changed."""
        return self._question(lambda ticket: RestorePrefixes(ticket, name))

    def _question(self, command: Callable[[int], Command]) -> Future[Any]:
        with self._lock:
            ticket, future = self._questions.ask()
            if self.health in (Health.READY, Health.DRAINING):
                self._host.send(command(ticket))
            else:
                self._questions.answer(ticket, EngineNotReady(f"the engine is {self.health.value}"))
            return future

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """The ledger as it is now."""
        with self._lock:
            return self._admission.requests

    def _refuse_unless_open(self) -> None:
        match self.health:
            case Health.DRAINING | Health.STOPPED:
                raise ShuttingDown("the server is shutting down and takes no new requests")
            case Health.FAILED:
                raise self._error or EngineDied("the engine is gone")

    def _dispatch(self) -> None:
        if self.limits is None or self.health not in (Health.READY, Health.DRAINING):
            return
        for ticket in self._admission.next_for_engine(self.limits):
            self._host.send(Submit(ticket.request))
        self.metrics.queued(self._admission)

    # Reports ---------------------------------------------------------------------------------------

    def _receive(self, epoch: int, report: Report) -> None:
        with self._lock:
            if epoch != self._epoch:
                return
            match report:
                case StepReport(deltas, stats):
                    self.metrics.step(stats)
                    self._take_outputs(deltas)
                case Inspection(ticket, snapshot):
                    self._questions.answer(ticket, snapshot)
                case StateFileDone(ticket, failure=None):
                    self._questions.answer(ticket, report)
                case StateFileDone(ticket, failure=Failure(code, message)):
                    if isinstance(error := from_code(code, message), StateFileError | StorageFailed):
                        self.metrics.state_file_failures.inc()
                    self._questions.answer(ticket, error)
                case Loading(progress):
                    if self._on_loading is not None:
                        self._on_loading(progress)
                case Ready(info, limits, memory):
                    self.metrics.loaded(limits, memory)
                    self._on_ready(info, limits)
                case Died(code, message):
                    self._on_death(from_code(code, message))

    def _on_ready(self, info: ModelInfo, limits: Limits) -> None:
        self.info, self.limits = info, limits
        if self.health is not Health.DRAINING:
            self.health = Health.READY
        if not self._loaded.done():
            self._loaded.set_result(None)
        self._dispatch()

    def _take_outputs(self, deltas: tuple[RequestOutput, ...]) -> None:
        now = time.monotonic()
        ended = False
        generated = 0
        for delta in deltas:
            ticket = self._admission.find(delta.request_id)
            if ticket is None or ticket.stage is not Stage.ENGINE:
                continue
            self.metrics.delta(ticket, delta, now)
            if delta.tokens:
                ticket.first_token = ticket.first_token or now
                ticket.last_token = now
                self._admission.generated(ticket, len(delta.tokens), now)
                generated += len(delta.tokens)
            if delta.finish_reason is None:
                ticket.stream.push(delta)
                if ticket.stream.overfull:  # FAULTS 34: nobody reads
                    ended = True
                    self.metrics.slow_readers.inc()
                    self._drop(ticket, SlowReader("the answer was not read: too much of it was waiting"))
            else:
                ended = True
                self._end(ticket, delta)
        self.metrics.generated_tokens.inc(generated)
        if ended:
            self._restarts = 0
            self._dispatch()

    def _on_death(self, error: CllmError) -> None:
        """Law 8: what has begun gets an error, what has sent nothing is replayed, a new host starts."""
        self.metrics.gone()
        self._questions.fail_all(error)
        if not self._loaded.done():
            self._give_up(error)
            self._loaded.set_exception(error)
            return
        lost, kept = self._admission.engine_died()
        log.error("the engine died: %s (%d requests lost, %d replayed)", error, len(lost), len(kept))
        for ticket in lost:
            if ticket.cancelled:
                self._end(
                    ticket, RequestOutput(request_id=ticket.request.id, finish_reason=FinishReason.CANCELLED)
                )
            elif ticket.begun:
                self._end_with(ticket, EngineDied("the engine process ended while this answer was computed"))
            else:
                self._restarts = 0  # the culprit is found: that is progress, not a crash loop
                self._end_with(ticket, PoisonRequest("the engine died each time it computed this request"))
        if not self._host.restartable or self._restarts >= self.RESTARTS_IN_A_ROW:
            self._give_up(error)
            return
        if self.health is not Health.DRAINING:
            self.health = Health.RESTARTING
        delay = 0.0 if self._restarts == 0 else min(8.0, 0.25 * 2**self._restarts)
        self._restarts += 1
        self.metrics.restarts.inc()
        self._epoch += 1
        timer = threading.Timer(delay, self._restart, (self._epoch,))
        timer.daemon = True
        timer.start()

    def _restart(self, epoch: int) -> None:
        with self._lock:
            if epoch == self._epoch:  # nobody stopped us meanwhile
                self._start_host()

    def _give_up(self, error: CllmError) -> None:
        """A dead engine tells present and later callers."""
        self.health = Health.FAILED
        self._error = error
        for ticket in self._admission.requests:
            self._end_with(ticket, error)
        log.critical("the engine is gone for good: %s", error)

    # Endings ---------------------------------------------------------------------------------------

    def _end_with(self, ticket: RequestState, error: CllmError) -> None:
        failure = Failure(error.code, error.message)
        self._end(
            ticket,
            RequestOutput(request_id=ticket.request.id, finish_reason=FinishReason.ERROR, error=failure),
        )

    def _end(self, ticket: RequestState, delta: RequestOutput) -> None:
        """The one place where a request leaves the ledger."""
        now = time.monotonic()
        delta = with_usage(ticket, delta)
        self._admission.close(ticket)
        self._deadlines.remove(delta.request_id)
        self.metrics.closed(ticket, delta)
        self.metrics.queued(self._admission)
        self.metrics.queue_time.observe((ticket.dispatched or now) - ticket.arrived)
        log_end(ticket, delta, now)
        ticket.stream.push(delta)


log = logging.getLogger(__name__)


def with_usage(ticket: RequestState, delta: RequestOutput) -> RequestOutput:
    """A terminal delta that says what the request cost; one made in the parent does not know it all."""
    if delta.usage is not None:
        return delta
    usage = Usage(prompt_tokens=ticket.request.input_tokens, completion_tokens=ticket.generated)
    return msgspec.structs.replace(delta, usage=usage)


def log_end(ticket: RequestState, delta: RequestOutput, now: float) -> None:
    """One line per request, with nothing of what was said in it."""
    assert delta.usage is not None and delta.finish_reason is not None
    log.info(
        "request %s: %s%s, %d prompt tokens (%d cached), %d generated, "
        "queued %.3f s, first token %s, total %.3f s",
        delta.request_id,
        delta.finish_reason.value,
        f" ({delta.error.code})" if delta.error else "",
        delta.usage.prompt_tokens,
        delta.usage.cached_tokens,
        delta.usage.completion_tokens,
        (ticket.dispatched or now) - ticket.arrived,
        f"{ticket.first_token - ticket.arrived:.3f} s" if ticket.first_token else "never",
        now - ticket.arrived,
    )


class PendingCalls:
    """Open questions by ticket. The engine's lock guards it."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._open: dict[int, Future[Any]] = {}

    def ask(self) -> tuple[int, Future[Any]]:
        """A new ticket, and where its answer will be."""
        ticket, future = next(self._tickets), Future[Any]()
        self._open[ticket] = future
        return ticket, future

    def answer(self, ticket: int, answer: object) -> None:
        """Tell whoever asked: a CllmError is raised there. Nobody may be waiting any more."""
        future = self._open.pop(ticket, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(answer, CllmError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def fail_all(self, error: CllmError) -> None:
        """The engine that was asked is gone."""
        for ticket in tuple(self._open):
            self.answer(ticket, error)

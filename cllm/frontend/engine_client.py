"""Engine client: submit a request, read its output stream; in the process of the caller (HTTP or Python API).

It holds the request table, dispatches to the executor, hands outputs to streams, restarts a crashed engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from cllm.errors import (
    CllmError,
    DeadlineExceeded,
    EngineDied,
    EngineError,
    EngineNotReady,
    InvalidRequest,
    PoisonRequest,
    ShuttingDown,
    SlowReader,
    from_code,
)
from cllm.frontend.metrics import EngineMetrics, describe_end
from cllm.frontend.output_stream import OutputStream
from cllm.frontend.request_queue import RequestQueue
from cllm.frontend.request_state import RequestState, Stage
from cllm.frontend.tenants import Tenants
from cllm.frontend.timers import Timers
from cllm.messages import (
    CacheDone,
    Cancel,
    ClearCache,
    ClusterReport,
    Command,
    Died,
    Inspect,
    Inspection,
    Loading,
    Ready,
    Report,
    SlotAction,
    StepReport,
    Submit,
    Unready,
    UseSlot,
)
from cllm.text.chat_format import ChatFormat
from cllm.types import (
    Failure,
    FinishReason,
    Health,
    Limits,
    ModelInfo,
    Request,
    RequestOutput,
    Snapshot,
    Usage,
)
from cllm.workers.executor import Executor, TokenizerClient, settle
from cllm.workers.supervisor import Backoff

log = logging.getLogger(__name__)
StreamKind = TypeVar("StreamKind", bound=OutputStream)
_CLOSED = (Health.DRAINING, Health.STOPPED, Health.FAILED)


class EngineClient:
    """Accepts requests from any thread; every accepted one gets exactly one terminal output.

    `deliver` decides on which thread reports are handled: an event loop's `call_soon_threadsafe` brings a
    whole step across in one call; by default the executor's own thread handles them.
    """

    shutdown_message = "the server is shutting down"
    unread_limit: int | None = 1 << 20  # bytes of one stream; None never ends a reader that is slow

    def __init__(
        self,
        executor: Executor,
        *,
        queue_size: int = 1024,
        queue_tokens: int = 0,
        max_timeout_s: float = 0.0,
        tenants: Tenants | None = None,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self.health = Health.LOADING
        self.info: ModelInfo | None = None
        self.limits: Limits | None = None
        self.deliver: Callable[..., Any] = lambda call, *arguments: call(*arguments)
        self.loaded: Future[None] = Future()  # fails with what kept the model from loading
        self._executor = executor
        self._on_loading = on_loading
        self._queue = RequestQueue(queue_size, queue_tokens, max_timeout_s, tenants)
        self.tenants = self._queue.tenants  # their accounts; the engines of a server share them
        # By request: its deadline. By None: the next look at the queue.
        self._timers: Timers[str | None] = Timers(lambda key: self.deliver(self._timer_fired, key))
        self._lock = threading.RLock()
        self._run = 0  # of the executor; reports of an earlier run are stale
        self._computing = False  # this run is Ready and has not died: it may be sent commands
        self._backoff = Backoff()
        self.error: CllmError | None = None  # why requests wait; while health is FAILED, are refused
        self._call_ids = itertools.count()
        self._calls: dict[int, Future[Any]] = {}  # to the engine, not yet answered, by id
        self.chat_formats: dict[bool, ChatFormat] = {}  # of conversations with tools and without
        self.metrics = EngineMetrics()
        self.metrics.watch(self._queue)

    # From start to stop ------------------------------------------------------------------------------

    def start(self, delay_s: float = 0.0) -> None:
        """Begin to load, after the delay, unless it was stopped before. Returns at once."""
        with self._lock:
            if self.health is Health.STOPPED:
                return
            self._run += 1
            self._executor.start(partial(self._deliver, self._run), delay_s)

    def use_metrics(self, metrics: EngineMetrics) -> None:
        """Go on with the metrics of the model's last engine: clients see one set across both."""
        if metrics is not self.metrics:
            metrics.take_over(self.metrics)
            self.metrics = metrics
            self.metrics.watch(self._queue)

    def drain(self) -> None:
        """Accept no new requests; accepted ones go on."""
        with self._lock:
            self.health = Health.DRAINING

    def end_all(self) -> None:
        """The time to drain is over: every request and every tokenizer task left ends with an error."""
        self._executor.end_tasks(self.shutdown_message)
        error = ShuttingDown(self.shutdown_message)
        with self._lock:
            for state in self._queue.requests:
                self._drop(state, error)
            self._fail_calls(error)

    def stop(self) -> None:
        """End now: every request left ends with an error. From any thread; idempotent."""
        with self._lock:
            if self.health is not Health.STOPPED:
                self.health = Health.STOPPED
                self._computing = False
                self._run += 1
            if not self.loaded.done():
                self.loaded.set_exception(ShuttingDown("it was closed while the model was loading"))
        # Streams are woken where they are read; an event loop that is closed has no readers left.
        with contextlib.suppress(RuntimeError):
            self.deliver(self.end_all)
        self._timers.stop()
        self._executor.stop()

    @property
    def tokenizer(self) -> TokenizerClient:
        """Tokenising, chat templates and grammar checks for this model."""
        return self._executor.tokenizer

    def _deliver(self, run: int, report: Report) -> None:
        """Bring a report to the thread that handles it. Called on the executor's thread."""
        try:
            self.deliver(self._receive, run, report)
        except RuntimeError:
            if self.health is not Health.STOPPED:  # then the event loop may be gone already
                raise

    # Requests ----------------------------------------------------------------------------------------

    def check_capacity(self) -> None:
        """Raise what `submit` would raise for any request: before a prompt is even tokenised."""
        try:
            with self._lock:
                if self.health in _CLOSED:
                    raise self._closed_error()
                self._queue.refuse_if_full(1)
        except CllmError as error:
            self.metrics.refused.labels(error.code).inc()
            raise

    def submit(self, request: Request, kind: type[StreamKind]) -> StreamKind:
        """Accept a request or raise at once. Never waits for a step."""
        stream = kind(request.id)
        try:
            with self._lock:
                if self.health in _CLOSED:
                    raise self._closed_error()
                if self.info is not None and not (self.info.generates or request.embed):
                    raise InvalidRequest.no_generation(self.info.name, self.info.architecture)
                state = self._queue.admit(request, stream, self.limits)
                self.metrics.accepted.inc()
                if state.timeout_s is not None:
                    self._timers.set(request.id, state.arrived + state.timeout_s)
                self._dispatch()
                if state.stage is Stage.QUEUED:
                    stream.queue_position = self._queue.position(state)
        except CllmError as error:
            self.metrics.refused.labels(error.code).inc()
            raise
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; one that has ended already is left alone."""
        with self._lock:
            state = self._queue.states.get(request_id)
            if state is None or state.cancelled:
                return
            state.cancelled = True
            if state.stage is Stage.QUEUED:
                self._end(state, RequestOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED))
                self._dispatch()  # others may have waited for it
            else:
                self._executor.send(Cancel(request_id))

    def inspect(self) -> Future[Snapshot]:
        """The engine's own account of itself, taken between two steps."""
        return self._call(Inspect)

    def use_slot(self, action: SlotAction, slot: int, name: str = "") -> Future[CacheDone]:
        """Save what a slot holds under a name, restore it, or forget it; fails with why not."""
        return self._call(lambda call_id: UseSlot(call_id, action, slot, name))

    def clear_cache(self) -> Future[CacheDone]:
        """Forget every cached prefix, in all tiers."""
        return self._call(ClearCache)

    def _call(self, command: Callable[[int], Command]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._computing:
                call_id = next(self._call_ids)
                self._calls[call_id] = future
                self._executor.send(command(call_id))
            else:
                future.set_exception(EngineNotReady(f"the engine is {self.health.value}"))
        return future

    def _answer(self, call_id: int, answer: object) -> None:
        """Settle a call, unless that has been done; a CllmError is raised there."""
        if (future := self._calls.pop(call_id, None)) is not None:
            settle(future, answer)

    def _fail_calls(self, error: CllmError) -> None:
        for call_id in tuple(self._calls):
            self._answer(call_id, error)

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """The request table as it is now."""
        with self._lock:
            return self._queue.requests

    def _closed_error(self) -> CllmError:
        if self.health is Health.FAILED:
            return self.error or EngineDied("the engine is gone")
        return ShuttingDown(f"{self.shutdown_message} and takes no new requests")

    def _dispatch(self) -> None:
        """Send the requests whose turn it is. One that cannot be sent fails, and the next has its place."""
        while self._computing and self.limits is not None:
            sent = [self._send(state) for state in self._queue.next_for_engine(self.limits)]
            if all(sent):
                if self._queue.look_again_at is not None:
                    self._timers.set(None, self._queue.look_again_at)
                return

    def _send(self, state: RequestState) -> bool:
        try:
            self._executor.send(Submit(state.submission))
        except CllmError as error:
            self._fail(state, error)
        except Exception:
            log.exception("request %s could not be sent to the engine", state.request.id)
            self._fail(state, EngineError("this request could not be sent to the engine"))
        return state.stage is Stage.ENGINE

    def _timer_fired(self, request_id: str | None) -> None:
        """A request's time is up: the client gets the error now, not when the step is over."""
        with self._lock:
            if request_id is None:
                self._dispatch()
                return
            state = self._queue.states.get(request_id)
            if state is None or state.cancelled:
                return
            self.metrics.deadlines.labels(state.stage.value).inc()
            where = "still waiting" if state.stage is Stage.QUEUED else "still being computed"
            self._drop(state, DeadlineExceeded(state.timeout_s or 0.0, where))
            self._dispatch()

    # Reports -----------------------------------------------------------------------------------------

    def _receive(self, run: int, report: Report) -> None:
        with self._lock:
            if run != self._run:
                return
            match report:
                case StepReport(outputs, stats):
                    self.metrics.step(stats)
                    self._process_outputs(outputs)
                case Inspection(call_id, snapshot):
                    self._answer(call_id, snapshot)
                case CacheDone(call_id, failure=failure):
                    self._answer(call_id, from_code(failure.code, failure.message) if failure else report)
                case Loading(progress):
                    if self._on_loading is not None:
                        self._on_loading(progress)
                case Ready(info, limits, memory):
                    self.metrics.loaded(limits, memory)
                    self.info, self.limits, self.error = info, limits, None
                    self._computing = True
                    self._backoff.ready()
                    if self.health is not Health.DRAINING:
                        self.health = Health.READY
                    if not self.loaded.done():
                        self.loaded.set_result(None)
                    self._dispatch()
                case Unready(message, given_up):
                    self._computing = False
                    self.metrics.ready.set(0)
                    self._give_up(EngineNotReady(message), waits=not given_up)
                case ClusterReport():
                    self.metrics.replicas.report = report
                case Died(code, message):
                    self._on_crash(from_code(code, message))

    def _process_outputs(self, outputs: tuple[RequestOutput, ...]) -> None:
        now = time.monotonic()
        changed = completed = False  # changed: others may go to the engine
        generated = 0
        for output in outputs:
            state = self._queue.states.get(output.request_id)
            if state is None or state.stage is not Stage.ENGINE:
                continue
            if count := len(output.tokens):
                if state.last_token is None:
                    self.metrics.time_to_first_token.observe(now - state.arrived)
                else:
                    self.metrics.inter_token.observe(now - state.last_token)
                state.add(output, now)
                changed |= state.crashes > 0 and state.clear_by_progress()
                state.tenant.charge(count, now)
                generated += count
            if output.finish_reason is not None:
                changed = True
                completed |= output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                self._end(state, output)
                continue
            state.stream.push(output)
            # A client that does not read must not fill the memory.
            if self.unread_limit is not None and state.stream.unread_bytes > self.unread_limit:
                changed = True
                self.metrics.slow_readers.inc()
                self._drop(state, SlowReader("the answer was not read: too much of it was waiting"))
        self.metrics.generated_tokens.inc(generated)
        if completed:
            self._backoff.progress()
        if changed:
            self._dispatch()

    def _on_crash(self, error: CllmError) -> None:
        """Survive native death: a new run starts, and requests go on there with what they have said."""
        self.metrics.crashed()
        self._computing = False
        self._fail_calls(error)
        if not self.loaded.done():
            self._give_up(error)
            self.loaded.set_exception(error)
            return
        lost, kept = self._queue.requeue_after_crash()
        log.error("the engine died: %s (%d requests lost, %d go on)", error, len(lost), len(kept))
        for state in lost:
            if state.cancelled:
                reason = FinishReason.CANCELLED
                self._end(state, RequestOutput(request_id=state.request.id, finish_reason=reason))
            else:
                self._backoff.progress()
                self._fail(state, PoisonRequest("the engine died each time it computed this request"))
        delay_s = self._backoff.next_delay()
        if self._backoff.exhausted:
            times = f"the engine crashed {self._backoff.count} times in a row"
            refusal = EngineNotReady(f"{times}; it is started again in {delay_s:.0f} s: {error}")
            refusal.retry_after_s = delay_s
            self._give_up(refusal)
        elif self.health is not Health.DRAINING:
            self.health = Health.RESTARTING
        self.metrics.restarts.inc()
        self.start(delay_s)

    def _give_up(self, error: CllmError, *, waits: bool = False) -> None:
        """No engine is there: every request, present and later, fails until Ready, unless it `waits`."""
        if self.health is not Health.DRAINING:
            self.health = Health.RESTARTING if waits else Health.FAILED
        self.error = error
        if not waits:
            for state in self._queue.requests:
                self._fail(state, error)
            log.critical("the engine is given up: %s", error)

    # Endings -----------------------------------------------------------------------------------------

    def _drop(self, state: RequestState, error: CllmError) -> None:
        """End a request from this side; the engine frees what it holds as after a cancel."""
        if state.stage is Stage.ENGINE:
            self._executor.send(Cancel(state.request.id))
        self._fail(state, error)

    def _fail(self, state: RequestState, error: CllmError) -> None:
        failure = Failure(error.code, error.message)
        self._end(
            state,
            RequestOutput(request_id=state.request.id, finish_reason=FinishReason.ERROR, error=failure),
        )

    def _end(self, state: RequestState, output: RequestOutput) -> None:
        """The one place where a request leaves the table, with its one terminal output."""
        now = time.monotonic()
        if (usage := output.usage) is None:  # made here, where the whole cost is not known
            usage = Usage(prompt_tokens=state.input_tokens, completion_tokens=state.generated)
        output = msgspec.structs.replace(output, usage=state.whole_usage(usage))
        self._queue.close(state)
        self._timers.cancel(output.request_id)
        self.metrics.ended(state, output, now)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", describe_end(state, output, now))
        state.stream.push(output)

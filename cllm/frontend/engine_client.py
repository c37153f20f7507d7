"""Engine client: submit a request, read its output stream; in the process of the caller (HTTP or Python API).

It holds the request table, dispatches to the executor, hands outputs to streams, restarts a crashed engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from cllm import errors, messages, types
from cllm.frontend.engine_adapters import EngineAdapters
from cllm.frontend.metrics import EngineMetrics
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.request_queue import TRACE, RequestQueue, RequestState, Stage
from cllm.frontend.tenants import Tenants
from cllm.workers.executor import ProcessExecutor, settle
from cllm.workers.supervisor import Backoff

log = logging.getLogger(__name__)
StreamKind = TypeVar("StreamKind", bound=AsyncOutputStream)
_CLOSED = (types.Health.DRAINING, types.Health.STOPPED, types.Health.FAILED)


class EngineClient:
    """Accepts requests; every accepted one gets exactly one terminal output.

    All methods but `stop` are called on the thread of its event loop, on which reports are handled, too.
    """

    shutdown_message = "the server is shutting down"
    unread_limit: int | None = 1 << 20  # bytes of one stream; None never ends a reader that is slow

    def __init__(
        self,
        executor: ProcessExecutor,
        *,
        queue_size: int = 1024,
        queue_tokens: int = 0,
        max_timeout_s: float = 0.0,
        tenants: Tenants | None = None,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self.health = types.Health.LOADING
        self.info: types.ModelInfo | None = None
        self.limits: types.Limits | None = None
        self.loaded: Future[None] = Future()  # fails with what kept the model from loading
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor = executor
        self.tokenizer, self.media = executor.tokenizer, executor.media
        self._on_loading = on_loading
        self._queue = RequestQueue(queue_size, queue_tokens, max_timeout_s, tenants)
        self.tenants = self._queue.tenants  # their accounts; the engines of a server share them
        self._looks_at = 0.0  # when a timer looks at the queue
        self._run = 0  # of the executor; reports of an earlier run are stale
        self._computing = False  # this run is Ready and has not died: it may be sent commands
        self._backoff = Backoff()
        self.error: errors.CllmError | None = None  # why requests wait; while health is FAILED, are refused
        self._encoding = 0  # requests whose pictures are encoded now
        self._call_ids = itertools.count()
        self._calls: dict[int, Future[Any]] = {}  # to the engine, not yet answered, by id
        self.adapters = EngineAdapters(self._call, lambda: (each.request.prompt for each in self.requests))
        self.metrics = EngineMetrics()
        self.metrics.watch(self._queue)

    @property
    def sees(self) -> bool:
        """It takes pictures or sound."""
        return self.media is not None

    @property
    def streaming(self) -> bool:
        """Some request's answer has begun, and goes on."""
        return any(each.last_token is not None for each in self._queue.requests)

    # From start to stop ------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to load, unless it was stopped before. Returns at once."""
        self._loop = loop
        self._start_run()

    def _start_run(self, delay_s: float = 0.0) -> None:
        if self.health is not types.Health.STOPPED:
            self._run += 1
            self._executor.start(partial(self._deliver, self._receive, self._run), delay_s)

    def _deliver(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call on the event loop, from any thread. One that is closed has no readers left."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(call, *arguments)

    def use_metrics(self, metrics: EngineMetrics) -> None:
        """Go on with the metrics of the model's last engine: clients see one set across both."""
        if metrics is not self.metrics:
            metrics.take_over(self.metrics)
            self.metrics = metrics
            self.metrics.watch(self._queue)

    def drain(self) -> None:
        """Accept no new requests; accepted ones go on."""
        self.health = types.Health.DRAINING

    def end_all(self) -> None:
        """The time to drain is over: every request and every tokenizer task left ends with an error."""
        for worker in (self.tokenizer, self.media):
            if worker is not None:
                worker.end(self.shutdown_message)
        error = errors.ShuttingDown(self.shutdown_message)
        for state in self._queue.requests:
            self._drop(state, error)
        self._fail_calls(error)

    def stop(self, *, wake: bool = True) -> None:
        """End now, and wait for that. Every request left ends with an error, unless no reader is to `wake`.

        From any thread; idempotent.
        """
        self.health = types.Health.STOPPED
        if not wake:
            self._loop = None  # it stays asleep: at exit, its thread must not run any more
        elif self._loop is None:
            self._close()
        else:
            self._deliver(self._close)
        self._executor.stop()

    def _close(self) -> None:
        self.health = types.Health.STOPPED  # whatever was reported meanwhile
        self._computing = False
        if not self.loaded.done():
            self.loaded.set_exception(errors.ShuttingDown("it was closed while the model was loading"))
        self.end_all()

    # Requests ----------------------------------------------------------------------------------------

    def check_capacity(self, tenant: str = "") -> None:
        """Raise what `submit` would raise for any request of a tenant: before a prompt is even tokenised."""
        try:
            if self.health in _CLOSED:
                raise self._closed_error()
            if self._queue.states:
                self._queue.refuse_if_full(1, self.tenants.open(tenant))
        except errors.CllmError as error:
            self.metrics.refused.labels(error.code).inc()
            raise

    def submit(self, request: types.Request, kind: type[StreamKind]) -> StreamKind:
        """Accept a request or raise at once. Never waits for a step."""
        stream = kind(request.id)
        try:
            if self.health in _CLOSED:
                raise self._closed_error()
            if request.adapter:
                request = self.adapters.apply(request)
            if self.info is not None and not (self.info.generates or request.embed):
                raise errors.InvalidRequest.no_generation(self.info.name, self.info.architecture)
            state = self._queue.admit(request, stream, self.limits)
        except errors.CllmError as error:
            self.metrics.refused.labels(error.code).inc()
            raise
        self.metrics.accepted.inc()
        if (trace := TRACE.get()) is not None and trace.open:
            trace.open += 1
            state.trace = trace
        if state.timeout_s is not None and state.timeout_s < math.inf:
            assert self._loop is not None
            state.deadline = self._loop.call_later(state.timeout_s, self._time_out, state)
        self._dispatch()
        stream.queue_position = self._queue.position(state)
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; one that has ended already is left alone."""
        if (state := self._queue.states.get(request_id)) is None or state.cancelled:
            return
        state.cancelled = True
        if state.stage is Stage.QUEUED:
            self._end(state, state.make_end())
            self._dispatch()  # others may have waited for it
        else:
            self._executor.send(messages.Cancel(request_id))

    @contextlib.contextmanager
    def encoding(self) -> Iterator[None]:
        """While pictures are encoded: where both compute on a CPU, the engine leaves cores to that.

        Two threads of a step that wait for each other on one core would stop the streams for seconds.
        """
        self._encoding += 1
        if self._computing:
            self._executor.send(messages.Encoding(active=True))
        try:
            yield
        finally:
            self._encoding -= 1
            if self._computing and not self._encoding:
                self._executor.send(messages.Encoding(active=False))

    def inspect(self) -> Future[types.Snapshot]:
        """The engine's own account of itself, taken between two steps."""
        return self._call(messages.Inspect)

    def use_slot(self, action: messages.SlotAction, slot: int, name: str = "") -> Future[messages.CacheDone]:
        """Save what a slot holds under a name, restore it, or forget it; fails with why not."""
        return self._call(lambda call_id: messages.UseSlot(call_id, action, slot, name))

    def clear_cache(self) -> Future[messages.CacheDone]:
        """Forget every cached prefix, in all tiers, and rows of pictures."""
        if self.media is not None:
            self.media.submit(messages.EncodeMedia((), forget=True))
        return self._call(messages.ClearCache)

    def _call(self, command: Callable[[int], messages.Command]) -> Future[Any]:
        future: Future[Any] = Future()
        if self._computing:
            call_id = next(self._call_ids)
            self._calls[call_id] = future
            self._executor.send(command(call_id))
        else:
            future.set_exception(errors.EngineNotReady(f"the engine is {self.health.value}"))
        return future

    def _fail_calls(self, error: errors.CllmError) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            settle(future, error)

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """The request table as it is now."""
        return self._queue.requests

    def _closed_error(self) -> errors.CllmError:
        if self.health is types.Health.FAILED:
            return self.error or errors.EngineDied("the engine is gone")
        return errors.ShuttingDown(f"{self.shutdown_message} and takes no new requests")

    def _dispatch(self) -> None:
        """Send the requests whose turn it is. One that cannot be sent fails, and the next has its place."""
        sent = False
        while not sent and self._computing and self.limits is not None:
            sent = True
            for state in self._queue.next_for_engine(self.limits):
                request = state.resumption or state.request
                try:
                    if state.backlogged:
                        request = msgspec.structs.replace(request, backlogged=True)
                    self._executor.send(messages.Submit(request))
                except Exception as error:
                    sent = False
                    if not isinstance(error, errors.CllmError):
                        log.exception("request %s could not be sent to the engine", state.request.id)
                        error = errors.EngineError("this request could not be sent to the engine")
                    self._end(state, state.make_end(error))
        due = self._queue.look_again_at
        if sent and due is not None and due > self._looks_at:
            assert self._loop is not None
            self._looks_at = due
            self._loop.call_later(due - time.monotonic(), self._look)

    def _look(self) -> None:
        """Look at the queue, though nothing has happened: places that were kept may be free."""
        self._looks_at = 0.0
        self._dispatch()

    def _time_out(self, state: RequestState) -> None:
        """End a request whose time is up: the client gets the error now, not when the step is over."""
        if state.cancelled:
            return
        self.metrics.deadlines.labels(state.stage.value).inc()
        where = "still waiting" if state.stage is Stage.QUEUED else "still being computed"
        self._drop(state, errors.DeadlineExceeded(state.timeout_s or 0.0, where))
        self._dispatch()

    # Reports -----------------------------------------------------------------------------------------

    def _receive(self, run: int, report: messages.Report) -> None:
        """Handle a report of a run; hand outputs to their streams."""
        if run != self._run or self.health is types.Health.STOPPED:
            return
        if not isinstance(report, messages.StepReport):
            self._change_state(report)
            return
        self.metrics.step(report.stats)
        now = time.monotonic()
        changed = completed = False  # changed: others may go to the engine
        generated = 0
        for request_id, seconds in report.spent.items():
            if (state := self._queue.states.get(request_id)) is not None:
                state.pay(seconds)
        for output in report.outputs:
            state = self._queue.states.get(output.request_id)
            if state is None or state.stage is not Stage.ENGINE:
                continue
            if count := len(output.tokens):
                if state.last_token is None:
                    state.first_token = now
                    self.metrics.time_to_first_token.observe(now - state.arrived)
                else:
                    self.metrics.inter_token.observe(now - state.last_token)
                state.last_token = now
                state.add_tokens(output)
                changed |= state.ending or (state.crashes > 0 and state.clear_by_progress())
                state.tenant.charge(count, now)
                generated += count
            if output.finish_reason is not None:
                changed = True
                completed |= output.finish_reason in (types.FinishReason.STOP, types.FinishReason.LENGTH)
                self._end(state, output)
                continue
            state.stream.push(output)
            # A client that does not read must not fill the memory.
            if self.unread_limit is not None and state.stream.unread_bytes > self.unread_limit:
                changed = True
                self.metrics.slow_readers.inc()
                self._drop(state, errors.SlowReader("the answer was not read: too much of it was waiting"))
        self.metrics.generated_tokens.inc(generated)
        if completed and self._backoff.count:
            self._backoff.progress()
        if changed:
            self._dispatch()

    def _change_state(self, report: messages.Report) -> None:
        match report:
            case messages.Inspection(call_id, snapshot) if call_id in self._calls:
                settle(self._calls.pop(call_id), snapshot)
            case messages.CacheDone(call_id) if call_id in self._calls:
                settle(self._calls.pop(call_id), report.failure or report)
            case messages.AdapterDone(call_id, adapter, loaded_bytes, failure) if call_id in self._calls:
                self.metrics.memory.labels("adapters").set(loaded_bytes)
                settle(self._calls.pop(call_id), failure or adapter)
            case messages.LoadProgress(fraction):
                if self._on_loading is not None:
                    self._on_loading(fraction)
            case messages.Ready(info, limits, memory):
                self.metrics.loaded(limits, memory)
                self.info, self.limits, self.error = info, limits, None
                self._computing = True
                self._backoff.ready()
                self.adapters.restore()
                if self.health is not types.Health.DRAINING:
                    self.health = types.Health.READY
                if not self.loaded.done():
                    self.loaded.set_result(None)
                self._dispatch()
            case messages.Unready(message, given_up):
                self._computing = False
                self.metrics.ready.set(0)
                self._give_up(errors.EngineNotReady(message), waits=not given_up)
            case messages.ClusterReport():
                self.metrics.replicas.report = report
            case messages.Died(code, message):
                self._on_crash(errors.from_code(code, message))

    def _on_crash(self, error: errors.CllmError) -> None:
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
                self._end(state, state.make_end())
            else:
                self._backoff.progress()
                poison = errors.PoisonRequest("the engine died each time it computed this request")
                self._end(state, state.make_end(poison))
        delay_s = self._backoff.next_delay()
        if self._backoff.exhausted:
            times = f"the engine crashed {self._backoff.count} times in a row"
            refusal = errors.EngineNotReady(f"{times}; it is started again in {delay_s:.0f} s: {error}")
            refusal.retry_after_s = delay_s
            self._give_up(refusal)
        elif self.health is not types.Health.DRAINING:
            self.health = types.Health.RESTARTING
        self.metrics.restarts.inc()
        self._start_run(delay_s)

    def _give_up(self, error: errors.CllmError, *, waits: bool = False) -> None:
        """No engine is there: every request, present and later, fails until Ready, unless it `waits`."""
        if self.health is not types.Health.DRAINING:
            self.health = types.Health.RESTARTING if waits else types.Health.FAILED
        self.error = error
        if not waits:
            for state in self._queue.requests:
                self._end(state, state.make_end(error))
            log.critical("the engine is given up: %s", error)

    # Endings -----------------------------------------------------------------------------------------

    def _drop(self, state: RequestState, error: errors.CllmError) -> None:
        """End a request from this side; the engine frees what it holds as after a cancel."""
        if state.stage is Stage.ENGINE:
            self._executor.send(messages.Cancel(state.request.id))
        self._end(state, state.make_end(error))

    def _end(self, state: RequestState, output: types.RequestOutput) -> None:
        """The one place where a request leaves the table, with its one terminal output."""
        now = time.monotonic()
        if (usage := output.usage) is None:  # made here, where the whole cost is not known
            usage = types.Usage(prompt_tokens=state.input_tokens, completion_tokens=state.generated)
        if output.usage is None or state.resumption is not None:
            output = msgspec.structs.replace(output, usage=state.whole_usage(usage))
        self._queue.close(state)
        if state.deadline is not None:
            state.deadline.cancel()
        self.metrics.ended(state, output, now)
        if state.trace is not None:
            state.trace.requests.append((state, output, now))
            state.trace.close()
        state.stream.push(output)

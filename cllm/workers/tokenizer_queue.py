"""Tokenizer queue: tasks that wait for the tokenizer worker, fair between tenants and bounded in bytes."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future

from cllm.errors import CllmError, EngineDied, InvalidRequest, TokenizerBusy
from cllm.messages import Prepare, RenderChat, TokenizerAnswer, TokenizerTask
from cllm.text.chat_template import GUARD_LIMIT_S
from cllm.text.prompt import Chat
from cllm.workers.supervisor import Attempt

THREADS = 2  # of the worker: a long prompt must not hold up the short ones behind it
LARGE_BYTES = 64 << 10  # takes some 30 ms; at most THREADS - 1 such tasks are in the worker at a time
MAX_WAITING_BYTES = 128 << 20
WAIT_LIMIT_S = 30.0
TEXT_LIMIT_S = 30.0  # in the worker; tokenising 8 MiB takes a few seconds: what takes longer hangs
GRAMMAR_LIMIT_S = 5.0  # the first grammar also builds the compiler


class Call(Attempt):
    """A task on its way to the tokenizer worker and back. Its time limit begins when the worker gets it."""

    retries_together = 0  # clients wait a few seconds for their text, and each start of a process takes one

    def __init__(self, call_id: int, task: TokenizerTask, frame: bytes, tenant: str = "") -> None:
        self.call_id = call_id
        self.frame = frame
        self.tenant = tenant
        self.future: Future[TokenizerAnswer] = Future()
        self.made_at = time.monotonic()
        self.sent_at = 0.0
        self.abandoned = False  # its caller has gone
        chats = [each for each in task.inputs if isinstance(each, Chat)] if isinstance(task, Prepare) else []
        self._renders = bool(chats) or isinstance(task, RenderChat)
        self._grammar_field = "tools" if any(chat.tools for chat in chats) else ""
        if isinstance(task, Prepare) and task.constraint is not None:
            self._grammar_field = task.constraint.field
        long = len(frame) > LARGE_BYTES
        self.limit_s = GRAMMAR_LIMIT_S if self._grammar_field and not long else TEXT_LIMIT_S
        # One grammar is compiled at a time: a second one would wait for it on the other thread.
        self.large = bool(self._grammar_field) or long

    @property
    def overdue_s(self) -> float:
        """How long it has been in the worker beyond its limit."""
        return time.monotonic() - self.sent_at - self.limit_s

    def timeout_error(self) -> CllmError:
        """The answer when it hangs in the worker."""
        return InvalidRequest(f"the text could not be processed within {self.limit_s:.0f} s: shorten it")

    def rejection_error(self, exit_signal: int) -> CllmError:
        """The answer when the process has crashed because of it."""
        if exit_signal == signal.SIGPROF and self._renders:
            message = f"the model's chat template was stopped: it computes for more than {GUARD_LIMIT_S:g} s"
            return InvalidRequest(message, field="messages")
        if self._grammar_field:
            message = f"{self._grammar_field}: it is too complex to be compiled"
            return InvalidRequest(message, field=self._grammar_field)
        return EngineDied("this text could not be processed: the tokenizer process crashed on it")


def busy_error(what: str) -> TokenizerBusy:
    return TokenizerBusy(f"too much text waits to be tokenised: {what}; try again in a moment")


class TokenizerQueue:
    """Calls that wait, a line for each tenant. The tenants take turns."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Call]] = {}  # in the order of their turns
        self._again: deque[Call] = deque()  # were in a worker that ended; they go first
        self._bytes: dict[str, int] = {}  # that wait, by tenant

    def __iter__(self) -> Iterator[Call]:
        yield from self._again
        for line in self._lines.values():
            yield from line

    def put(self, call: Call) -> None:
        """Raises TokenizerBusy when too much waits, unless this tenant has less than its share of it."""
        held = self._bytes.get(call.tenant, 0) + len(call.frame)
        share = MAX_WAITING_BYTES / len({*self._bytes, call.tenant})
        if held > share and sum(self._bytes.values()) + len(call.frame) > MAX_WAITING_BYTES:
            raise busy_error(f"the limit is {MAX_WAITING_BYTES >> 20} MiB")
        self._lines.setdefault(call.tenant, deque()).append(call)
        self._bytes[call.tenant] = held

    def expired(self) -> list[Call]:
        """Those that have waited too long."""
        oldest = time.monotonic() - WAIT_LIMIT_S
        return [call for call in self if not call.sent_at and call.made_at < oldest]

    def put_back(self, call: Call) -> None:
        """A call that was in a worker that has ended."""
        self._again.append(call)

    def take(self, running: Collection[Call]) -> Call | None:
        """The next call for a worker that has these; None while they must be finished first."""
        if len(running) >= THREADS or any(call.alone for call in running):
            return None
        if self._again:
            if running and self._again[0].alone:
                return None
            return self._again.popleft()
        room = sum(call.large for call in running) < THREADS - 1
        for line in self._lines.values():
            call = next((call for call in line if room or not call.large), None)
            if call is not None:
                self.remove(call)
                return call
        return None

    def remove(self, call: Call) -> None:
        """Take a call out; its tenant's next turn is after all others'."""
        if call in self._again:
            self._again.remove(call)
            return
        line = self._lines.pop(call.tenant)
        line.remove(call)
        self._bytes[call.tenant] -= len(call.frame)
        if line:
            self._lines[call.tenant] = line
        else:
            del self._bytes[call.tenant]

"""Channel: frames over a socket pair, and the worker process at its other end. No process is orphaned."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

import msgspec

from cllm.errors import EngineNotReady
from cllm.messages import Command

log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
CHUNK = 1 << 16  # bytes read at a time
BAD_COMMAND = 3  # the exit code after a command that cannot be decoded; its content is not logged


def pack_frame(frame: bytes) -> bytes:
    """A frame as it is sent: after its length."""
    return _LENGTH.pack(len(frame)) + frame


class FrameBuffer:
    """Bytes of a stream, to be taken as whole frames. However large, each byte is copied once."""

    def __init__(self) -> None:
        self._chunks: deque[bytes | memoryview] = deque()
        self._size = 0  # of all chunks
        self._wanted: int | None = None  # the length of the next frame, once it is known

    def __len__(self) -> int:
        return self._size

    def __iadd__(self, chunk: bytes) -> Self:
        self._chunks.append(chunk)
        self._size += len(chunk)
        return self

    def take(self) -> bytes | None:
        """The next frame, or None until more of it has been added."""
        if self._wanted is None and self._size >= _LENGTH.size:
            (self._wanted,) = _LENGTH.unpack(self._cut(_LENGTH.size))
        if self._wanted is None or self._size < self._wanted:
            return None
        size, self._wanted = self._wanted, None
        return self._cut(size)

    def _cut(self, size: int) -> bytes:
        """The first bytes, which are there."""
        self._size -= size
        parts: list[memoryview] = []
        while size:
            chunk = memoryview(self._chunks.popleft())
            parts.append(chunk[:size])
            if size < len(chunk):
                self._chunks.appendleft(chunk[size:])
            size -= len(parts[-1])
        return b"".join(parts)


class Channel:
    """Length-prefixed frames over a blocking socket: the worker's end. Several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._buffer = FrameBuffer()

    def send(self, frame: bytes) -> None:
        """Send a whole frame, waiting for the other side; raises OSError when that is gone."""
        with self._lock:
            self._socket.sendall(pack_frame(frame))

    def receive(self) -> bytes | None:
        """The next frame, or None at the end."""
        while (frame := self._buffer.take()) is None:
            try:
                chunk = self._socket.recv(CHUNK)
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._buffer += chunk
        return frame

    def close(self) -> None:
        # shutdown wakes a reader that blocks in another thread; close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def read_commands(
    channel: Channel, post: Callable[[Command], None], at_end: Callable[[], None] = lambda: None
) -> None:
    """Pass the parent's commands on. The end of the input ends the process, as does a wrong command."""
    decoder = msgspec.msgpack.Decoder(Command)
    try:
        while (frame := channel.receive()) is not None:
            post(decoder.decode(frame))
    except Exception as error:  # else the worker would live on without hearing anything
        log.critical("a command could not be read: %s", type(error).__name__)
        os._exit(BAD_COMMAND)
    at_end()
    os._exit(0)


class WorkerProcess:
    """`python -m MODULE FD ROLE arguments…`, never forked. It exits when its end of the pair reads EOF.

    One thread runs it: `open`, `frames`, `close`. Any thread may `send`, `kill` and `end`; none of these
    waits. What the process does not read yet is kept here and written by the thread in `frames`.
    """

    MAX_PENDING_BYTES = 64 << 20  # kept for a process that does not read
    END_LIMIT_S = 3.0  # for a process whose input has ended to exit
    SETTLE_S = 0.2  # silence is judged after this time without a byte, even when this process was suspended

    def __init__(self, module: str, role: str, *arguments: str, silence_limit_s: float) -> None:
        self.role = role
        self.silence_limit_s = silence_limit_s  # without a frame for this time it is killed
        self._command = (module, role, *arguments)
        self._lock = threading.Lock()
        self._pending = bytearray()  # sent, but not yet written
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._waker: socket.socket | None = None  # a byte sent here ends the wait in `frames`
        self._wakeups: socket.socket | None = None  # and is read here
        self.killed = False
        self._killed_for: str | None = None
        self._ended = False

    def open(self) -> None:
        """Start the process, unless it was ended already. Raises OSError."""
        if self.killed or self._ended:
            return
        with contextlib.ExitStack() as on_error:
            ours, theirs = map(on_error.enter_context, socket.socketpair())
            wakeups, waker = map(on_error.enter_context, socket.socketpair())
            for each in (ours, wakeups, waker):
                each.setblocking(False)
            module, *arguments = self._command
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the parent, which then ends the worker in good order.
                start_new_session=True,
            )
            on_error.pop_all()
        theirs.close()
        with self._lock:
            self._process, self._socket, self._wakeups, self._waker = process, ours, wakeups, waker
            if self.killed:
                process.kill()
            if self._ended:
                self._shut_down(ours)

    def send(self, frame: bytes, *, refusable: bool = False) -> None:
        """Send a frame without waiting. A process that has ended drops it.

        Raises EngineNotReady where the frame is `refusable` and the process does not read what it has.
        """
        with self._lock:
            pending = len(self._pending)
            if refusable and pending and pending + len(frame) > self.MAX_PENDING_BYTES:
                raise EngineNotReady(
                    f"the {self.role} process does not read its input: {pending >> 20} MiB wait for it, "
                    f"at most {self.MAX_PENDING_BYTES >> 20} MiB may; try again in a few seconds"
                )
            if self._ended:
                return
            self._pending += pack_frame(frame)
            if not pending and self._waker is not None:
                self._write()
                if self._pending:
                    with contextlib.suppress(OSError):
                        self._waker.send(b"\0")

    def _write(self) -> None:
        """Write what the socket takes now."""
        assert self._socket is not None
        try:
            del self._pending[: self._socket.send(self._pending)]
        except BlockingIOError:
            pass
        except OSError:  # it is gone: `frames` reads the end
            self._pending.clear()
            self._ended = True

    def frames(self) -> Iterator[bytes]:
        """The frames of the process, until it ends. Silence beyond the limit kills it."""
        connection, wakeups = self._socket, self._wakeups
        if connection is None or wakeups is None:
            return
        buffer = FrameBuffer()
        heard = time.monotonic()
        poll = select.poll()
        poll.register(wakeups, select.POLLIN)
        while True:
            # Read without the lock: what is sent from now on wakes the wait.
            poll.register(connection, select.POLLIN | (select.POLLOUT if self._pending else 0))
            left_s = heard + self.silence_limit_s - time.monotonic()
            ready = dict(poll.poll(1000 * max(self.SETTLE_S, left_s)))
            if wakeups.fileno() in ready:
                wakeups.recv(CHUNK)
            happened = ready.get(connection.fileno(), 0)
            if happened & select.POLLOUT:
                with self._lock:
                    self._write()
            if happened & ~select.POLLOUT:
                try:
                    chunk = connection.recv(CHUNK)
                except BlockingIOError:
                    continue
                except OSError:
                    return
                if not chunk:
                    return
                buffer += chunk
                while (frame := buffer.take()) is not None:
                    yield frame
                    heard = time.monotonic()
            elif time.monotonic() >= heard + self.silence_limit_s:
                self.kill(f"it said nothing for {self.silence_limit_s:.0f} s")

    def kill(self, because: str | None = None) -> None:
        """End it now; one that has not been started will not be."""
        with self._lock:
            self.killed = True
            self._killed_for = self._killed_for or because
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()

    def end(self) -> None:
        """Close its input, on which it exits; `close` waits for that. One not yet started will not be."""
        with self._lock:
            self._ended = True
            self._pending.clear()
            if self._socket is not None:
                self._shut_down(self._socket)

    @staticmethod
    def _shut_down(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wait until it has exited; SIGKILL if that takes too long. Then nothing is left of it."""
        self.end()
        with self._lock:
            for each in (self._socket, self._waker, self._wakeups):
                if each is not None:
                    each.close()
            self._socket = self._waker = self._wakeups = None
        if self._process is None:
            return
        for _ in range(2):
            try:
                self._process.wait(self.END_LIMIT_S)
                return
            except subprocess.TimeoutExpired:
                log.warning("the %s process did not exit by itself: killing it", self.role)
                self.kill()
        log.error("the %s process cannot be ended", self.role)

    @property
    def exit_signal(self) -> int:
        """The signal that ended it, or 0 where it exited by itself. After `close`."""
        if self._process is None or self._process.returncode is None:
            return int(signal.SIGKILL)
        return max(0, -self._process.returncode)

    def exit_reason(self) -> str:
        """How it ended, in a sentence. After `close`."""
        if self._killed_for:
            return f"the {self.role} process was killed: {self._killed_for}"
        if number := self.exit_signal:
            return f"the {self.role} process was ended by {signal.Signals(number).name}"
        assert self._process is not None
        return f"the {self.role} process exited with code {self._process.returncode}"

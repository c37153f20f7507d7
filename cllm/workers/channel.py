"""Channel: frames over a socket pair, and the worker process at its other end. No process is orphaned."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")


class Channel:
    """Length-prefixed frames over a socket. Sending is safe from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._timeout_s: float | None = None

    def send(self, frame: bytes) -> None:
        """Send a whole frame; raises OSError when the other side is gone."""
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next frame, or None at the end; TimeoutError when nothing comes for that long."""
        if timeout_s != self._timeout_s:  # a system call each time otherwise
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s
        while True:
            if len(self._buffer) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    break
            try:
                chunk = self._socket.recv(1 << 16)
            except ConnectionError:
                chunk = b""
            if not chunk:
                return None
            self._buffer += chunk
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame

    def close(self) -> None:
        # shutdown wakes a reader that blocks in another thread; close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class WorkerProcess:
    """`python -m MODULE FD ROLE arguments…`, never forked. It exits when its end of the pair reads EOF."""

    def __init__(self, module: str, role: str, *arguments: str, silence_limit_s: float | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), role, *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the parent, which then ends the worker in good order.
                start_new_session=True,
            )
        self.role = role
        self.channel = Channel(ours)
        self.silence_limit_s = silence_limit_s  # None: it may be silent for ever
        self._killed_for: str | None = None

    def frames(self) -> Iterator[bytes]:
        """The frames of the process, until it ends. Silence beyond the limit kills it."""
        while True:
            try:
                frame = self.channel.receive(self.silence_limit_s)
            except TimeoutError:
                self._killed_for = f"it said nothing for {self.silence_limit_s:.0f} s"
                self.kill()
                continue
            except OSError:
                break
            if frame is None:
                break
            yield frame
        self.kill()  # EOF without an exit would leave a zombie
        self._process.wait()
        self.channel.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    @property
    def exit_signal(self) -> int:
        """The signal that ended it; 0: it exited by itself. Waits for the end."""
        return max(0, -self._process.wait())

    def exit_reason(self) -> str:
        """How it ended, in a sentence. Waits for the end."""
        if self._killed_for:
            return f"the {self.role} process was killed: {self._killed_for}"
        if number := self.exit_signal:
            return f"the {self.role} process was ended by {signal.Signals(number).name}"
        return f"the {self.role} process exited with code {self._process.wait()}"

    def close(self) -> None:
        """End it: EOF first, SIGKILL if that is not enough. Returns when it is gone."""
        self.channel.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            log.warning("the %s process did not exit by itself: killing it", self.role)
            self.kill()
            self._process.wait()

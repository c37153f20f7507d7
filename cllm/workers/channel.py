"""A child process at the other end of a socket pair: frames both ways, and no orphan, ever."""

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
        header = self._exactly(_LENGTH.size)
        return None if header is None else self._exactly(_LENGTH.unpack(header)[0])

    def _exactly(self, count: int) -> bytes | None:
        while len(self._buffer) < count:
            try:
                chunk = self._socket.recv(1 << 16)
            except ConnectionError:
                chunk = b""
            if not chunk:
                return None
            self._buffer += chunk
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def close(self) -> None:
        # shutdown wakes a reader that blocks in another thread; close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class ChildProcess:
    """`python -m MODULE FD arguments…`, never forked. It ends itself when its end of the pair reads EOF."""

    def __init__(self, module: str, role: str, *arguments: str, silence_limit_s: float | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), role, *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the parent, which then ends the child in good order.
                start_new_session=True,
            )
        self.role = role
        self._channel = Channel(ours)
        self.silence_limit_s = silence_limit_s  # None: it may be quiet for ever
        self._killed_for: str | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: bytes) -> None:
        """Send a frame; to a child that is gone it is dropped: its end is being told by `frames`."""
        with contextlib.suppress(OSError):
            self._channel.send(frame)

    def frames(self) -> Iterator[bytes]:
        """What the child says, until it ends. Silence beyond the limit kills it."""
        while True:
            try:
                frame = self._channel.receive(self.silence_limit_s)
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
        self._channel.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def exit_reason(self) -> str:
        """How it ended, in a sentence."""
        if self._killed_for:
            return f"the {self.role} process was killed: {self._killed_for}"
        code = self._process.wait()
        if code < 0:
            return f"the {self.role} process was ended by {signal.Signals(-code).name}"
        return f"the {self.role} process exited with code {code}"

    @property
    def ended_by(self) -> signal.Signals | None:
        """The signal that ended it, if one did. Waits for the end."""
        code = self._process.wait()
        return signal.Signals(-code) if code < 0 else None

    def close(self) -> None:
        """End it: EOF first, SIGKILL if that does not do. Returns when it is gone."""
        self._channel.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            log.warning("the child process did not end by itself: killing it")
            self.kill()
            self._process.wait()

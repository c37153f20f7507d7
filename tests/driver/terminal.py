"""A program on a pseudo terminal: keys are typed, its output is waited for. Every wait has a limit."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Self

from tests.driver.server import environment

LIMIT_S = 20.0
ENTER, ALT_ENTER, TAB, CTRL_C, CTRL_D = "\r", "\x1b\r", "\t", "\x03", "\x04"
_STYLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>78]|\x1b\][^\x07]*\x07|\r|\x08")


class Terminal:
    """`cllm ARGUMENTS` on a terminal of its own. A context manager: leaving it ends the program."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        terminal = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from cllm.cli.main import main; main()", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={name: text for name, text in environment(**terminal).items() if name != "NO_COLOR"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw = ""
        self._seen = 0  # how much of the output has been waited for

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(LIMIT_S)
        os.close(self._master)

    @property
    def text(self) -> str:
        """The output so far without styles."""
        return _STYLE.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def send(self, line: str) -> None:
        self.type(line + ENTER)

    def expect(self, wanted: str, limit_s: float = LIMIT_S) -> str:
        """Wait for a text after what was waited for before; what came with it."""
        deadline = time.monotonic() + limit_s
        while (place := self.text.find(wanted, self._seen)) < 0:
            left_s = deadline - time.monotonic()
            assert left_s > 0 and self._read(left_s), f"no {wanted!r} in {self.text[self._seen :]!r}"
        began, self._seen = self._seen, place + len(wanted)
        return self.text[began : self._seen]

    def wait_output(self, count: int, limit_s: float = LIMIT_S) -> None:
        """Wait for so many characters after what was waited for before, whatever they are."""
        deadline = time.monotonic() + limit_s
        while len(self.text) < self._seen + count:
            assert self._read(max(0.0, deadline - time.monotonic())), f"no output after {self.text[-80:]!r}"

    def wait_closed(self, limit_s: float = LIMIT_S) -> int:
        """Wait until the program has ended; its exit code."""
        deadline = time.monotonic() + limit_s
        while self._read(max(0.0, deadline - time.monotonic())):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, limit_s: float) -> bool:
        """Read what there is, or comes within the limit; False at the end."""
        if not select.select([self._master], [], [], limit_s)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # its other end is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

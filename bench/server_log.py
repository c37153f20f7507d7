"""The log of a server: what no server logs unless its test causes it.

Requests are replayed on the next worker, so answers and figures alone do not show that one died.
"""

from __future__ import annotations

import re

_FAILURE = re.compile(
    r"^\S+ \S+ (?:(?:ERROR|CRITICAL) .*"
    r"|WARNING .*(?:the \w+ process ended: |did not exit by itself).*)$",
    re.MULTILINE,
)


def find_failures(text: str) -> list[str]:
    """Find the lines at ERROR and CRITICAL, and those that say that a worker died."""
    return _FAILURE.findall(text)

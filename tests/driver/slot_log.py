"""The slots in a server's log, replayed cell by cell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_LINE = re.compile(
    r"leased seq (?P<leased>\d+) for request (?P<heir>\S+)"
    r"|request (?P<starter>\S+) in seq (?P<started>\d+): "
    r"(?P<kept>\d+) cells kept, (?P<cut>\d+) cut, (?P<pending>\d+) tokens to compute"
    r"|released seq (?P<released>\d+) of request (?P<leaver>\S+): (?P<left>\d+) cells kept"
    r"|cleared KV of seq (?P<cleared>\d+) \((?P<cells>\d+) cells\)"
    r"|request (?P<mover>\S+) moved from seq (?P<source>\d+) to seq (?P<place>\d+)"
    r"|moved (?P<moved>\d+) cells to seq (?P<target>\d+)"
)
_BAD_POSITION = re.compile(
    r"inconsistent (sequence )?position|position[_ ]mismatch|PositionMismatch|positions remain consecutive",
    re.IGNORECASE,
)


class SlotLog:
    """Who held which slot, and what free slots kept: a request begins with what was matched, or with nothing.

    `problems` says what must not be: a slot leased while it is held, cells that no request left there, …
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.leases: Counter[str] = Counter()  # by request id
        self.releases: Counter[str] = Counter()
        self.slots: list[tuple[int, str]] = []  # each lease, in order
        self.held: dict[int, str] = {}  # request by slot
        self.cached: dict[int, int] = {}  # cells by free slot, as far as they are known
        self.problems: list[str] = []
        for line in lines:
            if _BAD_POSITION.search(line):
                self.problems.append(f"position error: {line.strip()[:160]}")
            elif found := _LINE.search(line):
                self._replay(found)

    def _replay(self, found: re.Match[str]) -> None:
        if found["leased"]:
            self._lease(int(found["leased"]), found["heir"])
        elif found["started"]:
            self._start(int(found["started"]), found["starter"], int(found["kept"]), int(found["cut"]))
        elif found["released"]:
            self._release(int(found["released"]), found["leaver"], int(found["left"]))
        elif found["mover"]:
            source, place = int(found["source"]), int(found["place"])
            if self.held.pop(source, None) != found["mover"] or place in self.held:
                self.problems.append(f"{found['mover']} moved from slot {source} to {place}")
            self.held[place] = found["mover"]
            self.cached.pop(place, None)
            self.cached.pop(source, None)  # its cells are still there, and cleared next
        elif found["cleared"]:
            slot, cells = int(found["cleared"]), int(found["cells"])
            known = self.cached.get(slot, cells)
            if slot not in self.held and known != cells:
                self.problems.append(f"{cells} cells cleared in slot {slot}, which kept {known}")
            self.cached[slot] = 0
        else:
            self.cached[int(found["target"])] = int(found["moved"])

    def _lease(self, slot: int, request: str) -> None:
        if slot in self.held:
            self.problems.append(f"slot {slot} leased to {request} while {self.held[slot]} held it")
        self.held[slot] = request
        self.leases[request] += 1
        self.slots.append((slot, request))

    def _start(self, slot: int, request: str, kept: int, cut: int) -> None:
        if self.held.get(slot) != request:
            self.problems.append(f"{request} began in slot {slot}, which it did not hold")
        known = self.cached.get(slot, 0)
        if known and known != kept + cut:
            self.problems.append(f"slot {slot} kept {known} cells, {request} found {kept + cut}")
        self.cached[slot] = 0

    def _release(self, slot: int, request: str, left: int) -> None:
        if self.held.pop(slot, None) != request:
            self.problems.append(f"slot {slot} released by {request}, which did not hold it")
        self.releases[request] += 1
        self.cached[slot] = left

    def find_faults(self, request_ids: Iterable[str]) -> list[str]:
        """Everything wrong: its problems, and requests without exactly one lease and one release."""
        faults = [*self.problems, *(f"slot {slot} is still held" for slot in self.held)]
        for request in request_ids:
            counts = self.leases[request], self.releases[request]
            if counts != (1, 1):
                faults.append(f"request {request}: {counts[0]} leases, {counts[1]} releases")
        return faults

"""What the server's debug log says of sequence ids: who had one, and whether its KV was cleared after."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LEASED = re.compile(r"leased seq (\d+) for request (\S+)")
_CLEARED = re.compile(r"cleared KV of seq (\d+) \((\d+) cells\)")
_BAD_POSITION = re.compile(
    r"inconsistent (sequence )?position|position[_ ]mismatch|PositionMismatch|positions remain consecutive",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class LeaseLog:
    """The audit of one log. `cleared` holds, per request, the cells removed when its lease ended."""

    leases: dict[str, int]  # by request id: how many it had
    cleared: dict[str, int]
    problems: tuple[str, ...]  # an id leased again before it was cleared, cleared without a lease, …

    @classmethod
    def read(cls, lines: Iterable[str]) -> LeaseLog:
        leases: dict[str, int] = {}
        cleared: dict[str, int] = {}
        holders: dict[str, str] = {}
        problems = []
        for line in lines:
            if _BAD_POSITION.search(line):
                problems.append(f"position error: {line.strip()[:160]}")
            if found := _LEASED.search(line):
                sequence, request = found.groups()
                if sequence in holders:
                    problems.append(f"seq {sequence} leased to {request} while {holders[sequence]} held it")
                holders[sequence] = request
                leases[request] = leases.get(request, 0) + 1
            elif found := _CLEARED.search(line):
                sequence, cells = found.groups()
                owner = holders.pop(sequence, None)
                if owner is None:
                    problems.append(f"seq {sequence} cleared, but nobody held it")
                else:
                    cleared[owner] = cleared.get(owner, 0) + int(cells)
        problems.extend(f"seq {sequence} of {request} never cleared" for sequence, request in holders.items())
        return cls(leases, cleared, tuple(problems))

    def faults(self, request_ids: Iterable[str]) -> list[str]:
        """Everything wrong: its own problems, and requests without exactly one lease and one clearing."""
        faults = list(self.problems)
        for request in request_ids:
            count = self.leases.get(request, 0)
            if count != 1:
                faults.append(f"request {request} has {count} lease lines")
            elif request not in self.cleared:
                faults.append(f"request {request} has no cleared line")
        return faults

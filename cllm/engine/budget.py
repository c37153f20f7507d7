"""How many tokens a step may carry, so that nobody who is generating waits longer than the target."""

from __future__ import annotations

from cllm.engine.cost import StepClock, StepShape


class StepBudget:
    """Turns a time target into prefill tokens, with the cost of a step as measured.

    With nobody generating, a step is as large as the batch allows.
    """

    SMALLEST_CHUNK = 8  # whatever the clock says: a prompt must get on
    FIRST_CHUNK = 64  # until a prefill was measured
    GROWTH = 4  # no chunk is more than so many times what was measured
    AIM = 0.85  # of the target; the rest is for what is not measured: noise, the time between steps

    def __init__(self, batch_tokens: int, target_s: float, *, split: bool = True) -> None:
        self.batch_tokens = batch_tokens
        self.target_s = target_s
        self.clock = StepClock()
        self._split = split  # then rows of unequal length are computed apart

    @property
    def seconds_per_token(self) -> float | None:
        """What computing one more prompt token costs; None before it was measured."""
        cost = self.clock.cost
        if cost is None or not self.clock.largest_prefill:
            return None
        return cost.prefill_token or None

    def prefill_tokens(self, generating: int, *, context: int = 0, position: int = 0) -> int:
        """Most prefill tokens of the next step, beside one token for each of `generating` sequences.

        Those hold `context` cells together; the prefill goes on at about `position`.
        """
        room = self.batch_tokens - generating
        if generating == 0 or room <= 0:
            return max(0, room)
        cost = self.clock.cost
        measured = self.clock.largest_prefill
        if cost is None or not measured:
            return min(room, self.FIRST_CHUNK)
        low = min(room, self.SMALLEST_CHUNK)
        high = max(low, min(room, max(self.FIRST_CHUNK, self.GROWTH * measured)))
        while low < high:  # the most that is within the aim
            chunk = (low + high + 1) // 2
            shape = StepShape(1 + self._split, chunk, generating, context + chunk * (position + chunk / 2))
            if cost.seconds(shape) <= self.AIM * self.target_s:
                low = chunk
            else:
                high = chunk - 1
        return low

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a finished step."""
        self.clock.observe(shape, seconds)

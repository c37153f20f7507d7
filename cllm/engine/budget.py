"""How many tokens a step may carry, so that nobody who is generating waits longer than the target."""

from __future__ import annotations


class StepBudget:
    """Turns a time target into a token count, from the steps it has seen.

    Prefill is close to linear in tokens, so one figure is kept: seconds per token of steps dominated by
    prefill, smoothed. With nobody generating, a step is as large as the batch allows.
    """

    SMALLEST_CHUNK = 32  # below this the fixed cost of a step dominates and nothing is won
    FIRST_GUESS_TOKENS = 128  # until a prefill has been measured
    SMOOTHING = 0.3

    def __init__(self, batch_tokens: int, target_s: float) -> None:
        self.batch_tokens = batch_tokens
        self.target_s = target_s
        self._seconds_per_token: float | None = None

    def prefill_tokens(self, generating: int) -> int:
        """Most prefill tokens of the next step when `generating` sequences each get their token too."""
        room = self.batch_tokens - generating
        if generating == 0:
            return room
        if self._seconds_per_token is None:
            return min(room, self.FIRST_GUESS_TOKENS)
        affordable = int(self.target_s / self._seconds_per_token) - generating
        return max(min(room, self.SMALLEST_CHUNK), min(room, affordable))

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a finished step; those without a sizeable prefill say nothing about its cost."""
        if tokens < self.SMALLEST_CHUNK or seconds <= 0:
            return
        cost = max(seconds / tokens, 1e-9)
        if self._seconds_per_token is None:
            self._seconds_per_token = cost
        else:
            self._seconds_per_token += self.SMOOTHING * (cost - self._seconds_per_token)

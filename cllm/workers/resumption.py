"""Resumption: a request with what was said of its answer, so that another engine goes on from there."""

from __future__ import annotations

from array import array

import msgspec

from cllm.types import Request, RequestOutput, Usage
from cllm.workers.supervisor import Attempt


class ResumableRequest(Attempt):
    """A request, its answer so far, and its usage over all engines that have computed it.

    A request that crashed an engine before is cleared of that by `CLEARING_TOKENS` more of its answer: what
    kills each time it is computed gets no further.
    """

    CLEARING_TOKENS = 16

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cancelled = False
        self._answer = array("i")  # the tokens generated, without those that it came with
        self._resumed_at = 0  # how many of them came from engines that died
        self._clearing_tokens = self.CLEARING_TOKENS
        self._usage: Usage | None = None  # as far as it is known
        self._earlier: Usage | None = None  # the same, when the last engine died

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self._answer)

    @property
    def submission(self) -> Request:
        """The request as an engine is to have it: with what was generated before."""
        if not self._answer:
            return self.request
        prefix = (*self.request.generated_prefix, *self._answer)
        return msgspec.structs.replace(self.request, generated_prefix=prefix)

    def add_tokens(self, output: RequestOutput) -> None:
        """Tokens have come."""
        self._answer.extend(output.tokens)
        if output.usage_so_far is not None:
            self._usage = self.whole_usage(output.usage_so_far)

    def clear_by_progress(self) -> bool:
        """Clear it of earlier crashes, if it has come far enough since the last of them."""
        if self.generated < self._resumed_at + self._clearing_tokens:
            return False
        self._clearing_tokens *= 2  # one that kills now and then is found out all the same
        self.clear()
        return True

    def resume(self) -> None:
        """Its engine is gone: the next one goes on from here."""
        self._resumed_at = self.generated
        self._earlier = self._usage

    def whole_usage(self, usage: Usage) -> Usage:
        """The usage over all engines that have computed it. What one took from its cache counts once."""
        if (earlier := self._earlier) is None:
            return usage
        return msgspec.structs.replace(
            usage,
            cached_tokens=earlier.cached_tokens,
            cached_from=earlier.cached_from,
            drafted_tokens=earlier.drafted_tokens + usage.drafted_tokens,
            accepted_tokens=earlier.accepted_tokens + usage.accepted_tokens,
        )

"""The crashing worker as `ProcessTokenizer` runs it: it says first that it is ready."""

from __future__ import annotations

from cllm.messages import TokenizerReady
from cllm.types import TokenBound
from tests.unit.workers.crashing_worker import main

LONGEST = 10

if __name__ == "__main__":
    main(TokenizerReady(TokenBound(LONGEST)))

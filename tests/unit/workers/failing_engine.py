"""Workers whose first engine fails: `python -m tests.unit.workers.failing_engine FD engine|tokenizer LEVEL`.

The configuration's `model` is a path. While there is no file, an engine makes one, and all its steps fail.
The next engine finds the file and works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from cllm.backend.base import ModelRunner, StepStatus
from cllm.config import EngineConfig
from cllm.testing import FakeVocabulary
from cllm.workers.engine_worker import main
from cllm.workers.tokenizer import TokenizerWorker, answer_tasks
from tests.driver.fake_runner import FakeRunner


def make_runner(config: EngineConfig, progress: Callable[[float], None]) -> ModelRunner:
    mark = Path(config.model)
    first = not mark.exists()
    mark.touch()
    return FakeRunner(
        sequences=4, fail=lambda _, name: StepStatus.FAILED if first and name == "collect" else None
    )


if __name__ == "__main__":
    given = TokenizerWorker(FakeVocabulary(), None).perform, FakeVocabulary.bound
    sys.exit(main(sys.argv[1:], make_runner, lambda channel, _: answer_tasks(channel, *given)))

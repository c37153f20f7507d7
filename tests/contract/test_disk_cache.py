"""The disk tier on every kind of memory: after a restart the same texts, and less to compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.core.kv_cache.transfer import KVTransfer
from cllm.messages import UseSlot
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import HYBRIDS, LAYOUTS, Kind, Opened
from tests.driver.same_text import Reference

SYSTEM = words(77, 150)
QUESTION = words(78, 30)


@pytest.mark.parametrize("kind", (*LAYOUTS, *HYBRIDS), ids=lambda kind: kind.label)
def test_a_conversation_goes_on_from_a_saved_slot(
    kind: Kind, opened: Opened, reference: Reference, tmp_path: Path
) -> None:
    def start() -> StepDriver:
        return StepDriver(opened(kind), cache_mb=64, cache_disk_mb=64, cache_dir=str(tmp_path))

    driver = start()
    driver.submit(ask("before", SYSTEM, 20, ignore_eos=True))
    answer = driver.finish()["before"]
    (slot,) = driver.prefix_cache.device.lengths
    saved = driver.use_cache(UseSlot(1, "save", slot, "chat"))
    driver = start()
    assert driver.use_cache(UseSlot(1, "restore", slot, "chat")) == saved and saved.tokens == 169
    prompt = SYSTEM + answer.tokens + QUESTION
    driver.submit(ask("after", prompt, 12, ignore_eos=True))
    answer = driver.finish()["after"]
    assert answer.work.cached_tokens == 169 and answer.work.cached_from.startswith("ram")
    reference.check(kind, prompt, 12, answer, endless=True)


@pytest.mark.parametrize("kind", (*LAYOUTS, *HYBRIDS), ids=lambda kind: kind.label)
def test_a_conversation_goes_on_after_a_restart(
    kind: Kind, opened: Opened, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVTransfer, "DEFAULT_TOKEN_S", 0.1)  # to compute, in the eyes of the cost model

    def start() -> StepDriver:
        runner = opened(kind)
        return StepDriver(runner, cache_mb=64, cache_disk_mb=64, cache_dir=str(tmp_path))

    driver = start()
    driver.submit(ask("before", SYSTEM, 20, ignore_eos=True))
    answer = driver.finish()["before"]
    driver.close_disk()
    # The whole state serves the next turn; another answer to the first needs it cut, or a checkpoint of it.
    for prompt, cached in ((SYSTEM + answer.tokens + QUESTION, 169), (SYSTEM, 149)):
        driver = start()
        driver.submit(ask("after", prompt, 12, ignore_eos=True))
        answer = driver.finish()["after"]
        assert answer.work.cached_tokens == cached and answer.work.cached_from.startswith("disk")
        reference.check(kind, prompt, 12, answer, endless=True)

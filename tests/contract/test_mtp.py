"""MTP: the text is the model's whatever its head drafts, whose memory goes where the sequence goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cllm.backend.base import Batch, ModelRunner, Row
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.core.kv_cache.transfer import KVTransfer
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import Kind
from tests.driver.runner import GREEDY
from tests.driver.same_text import Reference
from tests.tiny_architectures import make_head

KINDS = [Kind("head"), Kind("head", unified=True), Kind("head-delta")]
LONG = 130  # tokens: more than wait for the head
Opened = Callable[..., LlamaRunner]


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is right about 80 % of all tokens."""
    return make_head(tmp_path_factory.mktemp("mtp") / "knowing.gguf", right=0.8)


@pytest.fixture(params=[False, True], ids=["as-needed", "repeats"])
def opened(models: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Also with steps of the head as a GPU gets them."""
    runners: list[LlamaRunner] = []

    def make(model: Path | Kind, *, draft: str = "mtp", unified: bool = False) -> LlamaRunner:
        unified |= isinstance(model, Kind) and model.unified
        path = models[model.model] if isinstance(model, Kind) else model
        config = EngineConfig(
            model=str(path),
            draft=draft,
            draft_rollback=4,
            unified_kv=unified,
            parallel=4,
            ctx_size=2048,
            max_request_tokens=1024 if unified else 0,
            threads=1,
            batch_tokens=64,
            flash_attention=False,
            cache_type_k="f32",
            cache_type_v="f32",
        )
        runners.append(LlamaRunner(config))
        if runners[-1]._head is not None:
            runners[-1]._head.repeats = request.param
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


class Text:
    """A text that grows in a slot of a bare runner, step by step, and what the head says of it."""

    def __init__(self, runner: ModelRunner, slot: int, tokens: list[int]) -> None:
        self.runner, self.slot, self.tokens = runner, slot, tokens
        self.sampler = runner.create_sampler(GREEDY)

    def compute(self) -> None:
        while (at := self.runner.next_position(self.slot)) < len(self.tokens):
            chunk = self.tokens[at : at + self.runner.limits.batch_tokens]
            last = at + len(chunk) == len(self.tokens)
            result = self.runner.run(Batch((Row(self.slot, at, chunk, int(last), self.sampler),)))
        self.tokens += result.rows[0].tokens

    def drafts(self) -> list[int]:
        """Three drafts to follow the newest token."""
        return self.runner.draft({self.slot: self.tokens[-1]}, 3)[self.slot]


def fresh(runner: ModelRunner, slot: int, tokens: list[int]) -> list[int]:
    """What the head says of a text that was computed anew in an empty slot."""
    runner.truncate(slot, 0)
    text = Text(runner, slot, tokens[:-1])
    text.compute()
    text.tokens[-1] = tokens[-1]
    drafts = text.drafts()
    runner.truncate(slot, 0)
    return drafts


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("drafts", [True, False])
def test_the_heads_memory_follows_the_sequence(kind: Kind, drafts: bool, opened: Opened) -> None:
    """Its drafts depend on every token and hidden row: they are those of a text that was computed anew."""
    runner = opened(kind)
    text = Text(runner, 0, [*words(1, LONG)])
    for step in range(12):
        text.compute()
        if drafts and step % 3 < 2:
            assert len(text.drafts()) == 3
    said = text.drafts()
    assert said == fresh(runner, 1, text.tokens)
    length = len(text.tokens) - 1
    state = runner.save(0)
    assert state is not None
    runner.truncate(0, 0)
    assert text.drafts() != said, "another text"
    assert runner.restore(0, state) and text.drafts() == said
    assert runner.copy(0, 2, length) == length
    assert Text(runner, 2, text.tokens).drafts() == said
    assert runner.draft_gaps == 0


def test_cells_that_the_model_has_freed_keep_no_state_out(opened: Opened) -> None:
    """One pool that holds the text once: the head still has it when the model has emptied the slot."""
    runner = opened(Kind("head", unified=True))
    text = Text(runner, 0, [*words(1, 1100)])
    text.compute()
    said, state = text.drafts(), runner.save(0)
    assert state is not None
    runner.truncate(0, 0)
    assert runner.restore(1, state)
    assert Text(runner, 1, text.tokens).drafts() == said and runner.draft_gaps == 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_text_with_drafts_is_that_without(kind: Kind, opened: Opened, reference: Reference) -> None:
    """Several slots of unequal length; drafts of random weights are nearly always wrong."""
    driver = StepDriver(opened(kind), cache_mb=16, draft_tokens=4)
    plain = kind._replace(flash=False, unified=False)
    for turn in range(2):  # the second one goes on from what the first has left
        names = {f"{turn}-{seed}": words(seed, 9 + 37 * seed + 5 * turn) for seed in range(6)}
        driver.submit(*(ask(name, prompt, 24, ignore_eos=True) for name, prompt in names.items()))
        answers = driver.finish()
        for name, prompt in names.items():
            reference.check(plain, prompt, 24, answers[name], endless=True)
            assert turn or answers[name].work.drafted_tokens > 0


def test_what_the_head_holds_comes_back_from_ram_disk_and_another_engine(
    knowing: Path, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much is accepted after a restore as before, and the text is the same."""
    monkeypatch.setattr(KVTransfer, "DEFAULT_TOKEN_S", 0.1)  # to compute, in the eyes of the cost model
    request = ask("whole", words(1, LONG), 120, ignore_eos=True)
    plain = StepDriver(opened(knowing, draft="off"), draft="off")
    plain.submit(request)
    whole = plain.finish()["whole"].tokens

    def start(disk_mb: int = 64) -> StepDriver:
        disk: dict[str, Any] = {"cache_disk_mb": disk_mb, "cache_dir": str(tmp_path)}
        return StepDriver(opened(knowing), cache_mb=64, draft_tokens=3, **disk)

    def goes_on(driver: StepDriver, name: str, said: int, source: str) -> None:
        """It answers with the second half; half of that would be wrong if the head began anew."""
        more = replace(request, id=name, generated_prefix=whole[:said])
        driver.submit(more)
        answer = driver.finish()[name]
        assert answer.tokens == whole[said:]
        work = answer.work
        assert work.cached_from == source and work.drafter == "mtp"
        rates.append(work.accepted_tokens / work.drafted_tokens)
        assert driver.runner.inner.draft_gaps == 0

    rates: list[float] = []
    driver = start()
    driver.submit(replace(request, id="before", max_tokens=60))
    before = driver.finish()["before"]
    assert before.tokens == whole[:60]
    driver.close_disk()
    goes_on(driver, "slot", 60, "device")
    driver = start()
    goes_on(driver, "disk", 60, "disk")
    goes_on(start(0), "nothing", 60, "")  # from a killed engine's request, computed again
    driver = start(0)
    driver.submit(replace(request, id="before", max_tokens=60))
    driver.finish()
    driver.offload()
    goes_on(driver, "ram", 60, "ram")
    assert max(rates) - min(rates) < 0.05, rates
    assert min(rates) > 0.6


def test_preempted_sequences_draft_on(knowing: Path, opened: Opened) -> None:
    """One KV pool for requests that do not fit: they are swapped, and the head's memory with them."""
    runner, driven = opened(knowing, unified=True), opened(knowing, draft="off", unified=True)
    prompts = {f"r{seed}": words(seed, 180 + 9 * seed) for seed in range(4)}
    texts = []
    for each, kind in ((runner, "mtp"), (driven, "off")):
        driver = StepDriver(each, draft=kind, draft_tokens=3)
        driver.submit(*(ask(name, prompt, 400, ignore_eos=True) for name, prompt in prompts.items()))
        answers = driver.finish()
        texts.append({name: answers[name].tokens for name in prompts})
        if kind == "mtp":
            assert driver.scheduler.transfer.swap_ins > 0
            work = [answer.work for answer in answers.values()]
            assert sum(one.accepted_tokens for one in work) > 0.6 * sum(one.drafted_tokens for one in work)
    assert texts[0] == texts[1]

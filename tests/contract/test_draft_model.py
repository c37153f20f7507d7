"""Speculative decoding with a draft model: the text is the target model's, whatever the draft model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.backend.llama.draft_model import DraftModel, ModelDrafter
from cllm.backend.llama.memory import prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ModelFileError
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE
from tests.driver.same_text import Reference
from tests.tiny_models import make_dense

Drafted = Callable[..., LlamaRunner]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary, other weights."""
    return make_dense(tmp_path_factory.mktemp("draft") / "other.gguf", seed=9)


@pytest.fixture
def drafted(models: dict[str, Path]) -> Iterator[Drafted]:
    runners: list[LlamaRunner] = []

    def make(draft: Path, model: str = "dense", *, unified: bool = False) -> LlamaRunner:
        config = EngineConfig(
            model=str(models[model]),
            draft_model=str(draft),
            parallel=3,
            ctx_size=1536,
            threads=1,
            batch_tokens=64,
            unified_kv=unified,
        )
        runners.append(LlamaRunner(config))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def drafts_of(runner: LlamaRunner) -> DraftModel:
    assert runner._drafts is not None
    return runner._drafts


@pytest.mark.parametrize("unified", [False, True])
def test_a_model_that_drafts_for_itself_is_right(
    unified: bool, drafted: Drafted, models: dict[str, Path], reference: Reference
) -> None:
    driver = StepDriver(drafted(models["dense"], unified=unified), draft_model="draft")
    driver.submit(ask("r", words(1, 150), 60, ignore_eos=True))  # a prompt of several steps
    answer = driver.finish()["r"]
    reference.check(DENSE, words(1, 150), 60, answer, endless=True)
    work = answer.work
    assert work.drafted_tokens > 30 and work.accepted_tokens > 0.8 * work.drafted_tokens
    assert work.steps < 30 and answer.recomputed == 0


def test_another_model_is_mostly_wrong_and_changes_nothing(
    drafted: Drafted, other: Path, reference: Reference
) -> None:
    driver = StepDriver(drafted(other), draft_model="draft")
    for seed in range(4):
        driver.submit(ask(f"r{seed}", words(seed, 30), 40, ignore_eos=True))
        answer = driver.finish()[f"r{seed}"]
        reference.check(DENSE, words(seed, 30), 40, answer, endless=True)
        assert answer.work.drafted_tokens > 0 and answer.recomputed == 0
        assert answer.work.accepted_tokens < 0.5 * answer.work.drafted_tokens


def test_several_at_once_and_one_after_another(
    drafted: Drafted, models: dict[str, Path], reference: Reference
) -> None:
    """Two requests get drafts at a time; later ones find the memory of earlier ones."""
    driver = StepDriver(drafted(models["dense"]), draft_model="draft", draft_tokens=24, cache_mb=16)
    prompts = {f"r{seed}": words(seed % 4, 20 + seed % 4 * 9) for seed in range(9)}
    driver.submit(*(ask(name, prompt, 30, ignore_eos=True) for name, prompt in prompts.items()))
    answers = driver.finish()
    for name, prompt in prompts.items():
        reference.check(DENSE, prompt, 30, answers[name], endless=True)
    assert sum(answer.work.accepted_tokens for answer in answers.values()) > 50


def test_a_slot_belongs_to_one_text_until_that_is_gone(drafted: Drafted, models: dict[str, Path]) -> None:
    model = drafts_of(drafted(models["dense"]))
    first, second, third = (ModelDrafter(model) for _ in range(3))
    texts = [words(seed, 20) for seed in range(3)]
    drafts = [each.propose(text, 4) for each, text in zip((first, second, third), texts, strict=True)]
    assert drafts[0] and drafts[1] and drafts[2] == []
    del first
    assert third.propose(texts[2], 4) and second.propose(texts[1], 4) == drafts[1]


@pytest.mark.parametrize(
    ("left_by", "taken_by", "reused"),
    [("a", "a", True), ("a", "b", False), ("", "", True), (None, None, False), (None, "a", False)],
)
def test_what_a_slot_holds_is_used_by_its_tenant_alone(
    left_by: str | None, taken_by: str | None, reused: bool, drafted: Drafted, models: dict[str, Path]
) -> None:
    """How soon drafts come would show another tenant's text."""
    model = drafts_of(drafted(models["dense"]))
    text = words(3, 40)
    drafter = ModelDrafter(model, left_by)
    said = drafter.propose(text, 4)
    del drafter
    computed: list[int] = []
    run = model._runner.run

    def counted(batch: Batch) -> StepResult:
        computed.append(batch.token_count)
        return run(batch)

    model._runner.run = counted  # type: ignore[method-assign]
    assert ModelDrafter(model, taken_by).propose(text, 4) == said
    assert computed[0] == (1 if reused else len(text))


def test_the_draft_models_memory_follows_the_text(drafted: Drafted, models: dict[str, Path]) -> None:
    """On the drafter itself: it says the same whether it followed step by step or begins anew."""
    model = drafts_of(drafted(models["dense"]))
    following = ModelDrafter(model)
    text = list(words(5, 20))
    for step in range(12):
        drafts = following.propose(text, 5)
        fresh = ModelDrafter(model)
        assert fresh.propose(text, 5) == drafts and len(drafts) == 5
        del fresh
        text += [*drafts[: step % 4], 65 + step]
    for slot in model._slots:
        assert model._runner.next_position(slot.number) == len(slot.held)
    assert following.propose(list(words(6, 510)), 5) == [], "beyond what a request may hold"


@pytest.mark.parametrize("status", [StepStatus.NO_ROOM, StepStatus.FAILED, None])
def test_a_draft_model_that_fails_costs_drafts_and_nothing_else(
    status: StepStatus | None, drafted: Drafted, models: dict[str, Path], reference: Reference
) -> None:
    runner = drafted(models["dense"])
    inner = drafts_of(runner)._runner
    run, calls = inner.run, []

    def failing(batch: Batch) -> StepResult:
        calls.append(batch)
        if len(calls) % 10:
            return run(batch)
        if status is None:
            raise RuntimeError("the draft model broke")
        return StepResult(status, code=-3)

    inner.run = failing  # type: ignore[method-assign]
    driver = StepDriver(runner, draft_model="draft")
    driver.submit(ask("r", words(1, 30), 60, ignore_eos=True))
    answer = driver.finish()["r"]
    reference.check(DENSE, words(1, 30), 60, answer, endless=True)
    assert len(calls) > 10 and answer.work.accepted_tokens > 0


def test_a_model_that_cannot_draft_is_refused_before_serving(
    drafted: Drafted, models: dict[str, Path], tmp_path: Path
) -> None:
    small = make_dense(tmp_path / "small.gguf", vocabulary=400)
    with pytest.raises(ConfigError, match="400 tokens, that of the model 512"):
        drafted(small)
    with pytest.raises(ConfigError, match="the draft model is recurrent"):
        drafted(models["recurrent"])
    with pytest.raises(ConfigError, match="the served model is with a sliding window"):
        drafted(models["dense"], "sliding")
    with pytest.raises(ModelFileError):
        prepare(EngineConfig(model=str(models["dense"]), draft_model=str(tmp_path / "none.gguf")))

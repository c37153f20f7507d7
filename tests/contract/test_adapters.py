"""LoRA adapters on llama.cpp: what they add, what a change of their set leaves behind, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cllm.adapters import Adapter, join_key
from cllm.backend.base import Batch
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.errors import AdapterRefused
from tests.contract.test_spec_decode import knowing
from tests.driver.engine import StepDriver, Tokens, words
from tests.driver.kinds import HYBRIDS, RECURRENT, Kind, open_runner
from tests.driver.runner import native, row
from tests.tiny_models import make_adapter, merge_adapters

EXACT = Kind("dense", flash=False)
PROMPT = words(1, 40)


@pytest.fixture(scope="module")
def folder(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        make_adapter(folder / f"{seed}.gguf", seed=seed)
    return folder


@pytest.fixture
def runner(models: dict[str, Path]) -> Iterator[LlamaRunner]:
    runner = open_runner(models, EXACT, sequences=3)
    yield native(runner)
    runner.close()


def load(runner: LlamaRunner, path: Path) -> str:
    """Load an adapter as the engine does; its digest."""
    adapter = runner.check_adapter(Adapter(name=path.stem, file=str(path)))
    runner.load_adapter(adapter)
    return adapter.digest


def says(runner: LlamaRunner, key: str = "", seq_id: int = 0) -> dict[int, float]:
    """The likeliest tokens after the prompt, computed with a set of adapters, and their logprobs."""
    one = row(runner, seq_id, PROMPT, 1)._replace(logprobs=8)
    result = runner.run(Batch((one,), adapter=key))
    runner.truncate(seq_id, 0)
    return dict(result.rows[0].logprobs[0].top)


def alike(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return one.keys() == other.keys() and np.allclose(
        [one[token] for token in sorted(one)], [other[token] for token in sorted(one)], atol=1e-3
    )


@pytest.mark.parametrize("scales", [{1: 1.0}, {1: 0.5}, {1: 1.0, 2: -0.25}], ids=str)
def test_a_set_computes_what_merged_weights_do(
    scales: dict[int, float], runner: LlamaRunner, models: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    key = join_key((load(runner, folder / f"{each}.gguf"), scale) for each, scale in scales.items())
    paths = {folder / f"{each}.gguf": scale for each, scale in scales.items()}
    merged = open_runner({"dense": merge_adapters(tmp_path / "m.gguf", models["dense"], paths)}, EXACT)
    expected = says(native(merged))
    merged.close()
    assert alike(says(runner, key), expected)
    assert not alike(says(runner), expected)


def test_a_switch_leaves_nothing_behind(runner: LlamaRunner, folder: Path) -> None:
    base = says(runner)
    keys = [join_key([(load(runner, folder / f"{seed}.gguf"), 1.0)]) for seed in (1, 2)]
    alone = [says(runner, key) for key in keys]
    assert says(runner) == base
    assert [says(runner, key) for key in reversed(keys)] == alone[::-1]
    assert says(runner, seq_id=2) == base


def test_only_the_first_change_after_a_load_plans_graphs(
    runner: LlamaRunner, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = load(runner, folder / "1.gguf")
    with caplog.at_level("DEBUG", "llama.cpp"):
        for again in range(2):
            two = load(runner, folder / "2.gguf")
            caplog.clear()
            runner._adapters.use(join_key([(two, 0.5)]))  # and nothing is computed with it
            for scales in ([(one, 1.0)], [], [(two, 1.0)], [(one, 0.5), (two, 1.0)]):
                says(runner, join_key(scales))
            assert sum("reserving ..." in record.message for record in caplog.records) == 1, again
            runner.unload_adapter(two)


def test_unloading_the_set_in_use_goes_back_to_the_base(runner: LlamaRunner, folder: Path) -> None:
    base = says(runner)
    digest = load(runner, folder / "1.gguf")
    says(runner, join_key([(digest, 1.0)]))
    size = runner.memory_bytes()["adapters"]
    assert runner.adapters == {digest: size} and size > 10_000
    runner.unload_adapter(digest)
    runner.unload_adapter(digest)
    assert runner.adapters == {} and says(runner) == base
    again = load(runner, folder / "2.gguf")  # perhaps where the first one lay
    assert not alike(says(runner, join_key([(again, 1.0)])), base)


def test_kv_of_a_sequence_survives_steps_of_other_sets(runner: LlamaRunner, folder: Path) -> None:
    key = join_key([(load(runner, folder / "1.gguf"), 1.0)])
    expected = says(runner, key)
    runner.run(Batch((row(runner, 0, PROMPT[:20]),), adapter=key))
    runner.run(Batch((row(runner, 1, PROMPT),)))
    last = row(runner, 0, PROMPT[20:], 1)._replace(logprobs=8)
    (result,) = runner.run(Batch((last,), adapter=key)).rows
    assert alike(dict(result.logprobs[0].top), expected)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"architecture": "qwen2"}, "is for 'qwen2', and this model is llama"),
        ({"adapter__type": "dora"}, "is no LoRA adapter: its types are 'adapter' and 'dora'"),
        ({"general__type": "model"}, "is no LoRA adapter"),
    ],
    ids=str,
)
def test_an_adapter_of_another_kind_is_refused(
    made: dict[str, str], message: str, runner: LlamaRunner, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "x.gguf", **made)  # type: ignore[arg-type]
    with pytest.raises(AdapterRefused, match=message):
        load(runner, tmp_path / "x.gguf")


def test_a_model_or_no_file_is_no_adapter(runner: LlamaRunner, models: dict[str, Path]) -> None:
    with pytest.raises(AdapterRefused, match="is no LoRA adapter"):
        load(runner, models["dense"])
    with pytest.raises(AdapterRefused, match="there is no model file"):
        load(runner, models["dense"].with_name("none.gguf"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"blk.1.attn_v.weight.lora_a", b"blk.7.attn_v.weight.lora_a", "a pair of matrices"),
        (b"attn_q", b"attn_x", "adapts blk.0.attn_x.weight, which this model does not have"),
        (b"attn_v", b"attn_q", "pair of matrices"),
        (b"attn_v", b"attn_o", "which this model does not have"),
    ],
)
def test_tensors_of_another_model_are_refused(
    old: bytes, new: bytes, message: str, runner: LlamaRunner, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes((folder / "1.gguf").read_bytes().replace(old, new))
    with pytest.raises(AdapterRefused, match=message):
        load(runner, path)


def test_other_shapes_and_ranks_are_refused(runner: LlamaRunner, folder: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "x.gguf", (folder / "1.gguf").read_bytes()
    path.write_bytes(data.replace(b"attn_v.weight", b"attn_k.weight").replace(b"attn_q", b"attn_v"))
    with pytest.raises(AdapterRefused, match=r"is of another model: its blk.0.attn_v.weight is not 64 × 64"):
        load(runner, path)
    at = data.index(b"blk.0.attn_q.weight.lora_b") + len("blk.0.attn_q.weight.lora_b") + 4
    path.write_bytes(data[:at] + (2).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(AdapterRefused, match="differ in their rank"):
        load(runner, path)


def test_a_file_that_changed_under_its_name_is_refused(
    runner: LlamaRunner, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes((folder / "1.gguf").read_bytes())
    known = runner.check_adapter(Adapter(name="x", file=str(path)))
    assert runner.check_adapter(known) == known
    path.write_bytes((folder / "2.gguf").read_bytes())
    with pytest.raises(AdapterRefused, match=r"adapter x: x.gguf has changed since it was loaded"):
        runner.check_adapter(known)


def test_invocation_tokens_of_an_alora_are_read(runner: LlamaRunner, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "x.gguf", invocation=(60, 61, 62))
    assert runner.check_adapter(Adapter(name="x", file=str(path))).invocation == (60, 61, 62)


def test_the_memory_of_adapters_is_predicted(models: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "wide.gguf", rank=64)
    header = GgufHeader(models["dense"])
    config = EngineConfig(model=str(models["dense"]), parallel=2, ctx_size=1024, gpu_layers=0)
    one, two = f"a={path}", f"b={folder / '1.gguf'}:0.5"
    base, fit = (MemoryFit(header, replace(config, adapter=each)) for each in ((), (one, two)))
    with LlamaRunner(config) as runner:
        load(runner, path)
        load(runner, folder / "1.gguf")
        real = runner.memory_bytes()["adapters"]
    assert fit.needed - base.needed == fit.adapters
    assert real <= fit.adapters <= 1.1 * real + 4096


@pytest.mark.parametrize("kind", (RECURRENT, *HYBRIDS), ids=lambda kind: kind.label)
def test_states_of_recurrent_models_are_of_their_set(
    kind: Kind, models: dict[str, Path], tmp_path: Path
) -> None:
    """Sets take turns while drafts are rolled back: each text is the one alone."""
    weights = ("ssm_in", "ssm_out", "attn_q", "attn_v", "attn_output")
    runner = open_runner(models, kind, sequences=4)
    keys = [""]
    for seed in (1, 2):
        path = make_adapter(tmp_path / f"{seed}.gguf", seed=seed, model=models[kind.model], weights=weights)
        keys.append(join_key([(load(native(runner), path), 1.0)]))
    prompts = [words(seed, 20) for seed in range(3)]
    texts: dict[tuple[str, Tokens], Tokens] = {}
    for key in keys:
        for prompt in prompts:
            driver = StepDriver(runner, new_drafter=knowing([], 0.0))
            name = driver.add(prompt, 24, adapter=key, ignore_eos=True)
            texts[key, prompt] = driver.finish()[name].tokens
    assert len(set(texts.values())) == len(texts)
    whole = [prompt + text for (_, prompt), text in texts.items()]
    driver = StepDriver(runner, new_drafter=knowing(whole, 0.3))
    names = {driver.add(prompt, 24, adapter=key, ignore_eos=True): (key, prompt) for key, prompt in texts}
    answers = driver.finish()
    assert {name: answers[name].tokens for name in names} == {
        name: texts[each] for name, each in names.items()
    }
    if native(runner).limits.rollback_tokens:
        assert sum(answers[name].work.accepted_tokens for name in names) > 0
    runner.close()

"""lm-eval, at its newest and in an environment of its own, scores choices as the Python API does.

It is fetched first (0.8 GB), unless it is there. The task and its data are local.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cllm import LLM
from cllm.build.toolchain import cache_directory
from proof.shared.agent_programs import run_quietly
from tests.driver.same_text import EXACT
from tests.driver.server import StartServer
from tests.e2e.clients import QUIET
from tests.tiny_models import make_dense

TASK = {
    "task": "facts",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
FACTS = [
    {"question": "The capital of France is", "choices": ["Paris", "a fish", "Rome"], "answer": 0},
    {"question": "Two and two is", "choices": ["four", "blue and green"], "answer": 0},
]


def find_lm_eval() -> Path:
    """Return the program; install it where it is not there. Raises SetupError."""
    folder = cache_directory() / "lm-eval"
    program = folder / "bin" / "lm_eval"
    if not program.exists():
        run_quietly(sys.executable, "-m", "venv", str(folder))
        run_quietly(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "lm-eval[api]")
    return program


@pytest.mark.timeout(1200)  # the packages are fetched the first time
def test_lm_eval_scores_as_the_python_api(start: StartServer, tmp_path: Path) -> None:
    program, model = find_lm_eval(), make_dense(tmp_path / "tiny.gguf")
    data = tmp_path / "facts.jsonl"
    data.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (tmp_path / "facts.yaml").write_text(json.dumps(task))  # JSON is YAML
    server = start(str(model), "--parallel", "4", *EXACT)
    arguments = f"base_url={server.url}/v1/completions,model=tiny,tokenizer_backend=remote,num_concurrent=2"
    command = [str(program), "--model", "local-completions", "--model_args", arguments, "--tasks", "facts"]
    command += ["--include_path", str(tmp_path), "--batch_size", "2", "--log_samples"]
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", **QUIET}
    run_quietly(*command, "--output_path", str(tmp_path / "out"), cwd=tmp_path, env=variables)
    (samples,) = tmp_path.glob("out/*/samples_facts_*.jsonl")
    exact = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
    scored = 0
    with LLM(model, parallel=4, ctx_size=2048, threads=1, **exact) as llm:
        for line in samples.read_text().splitlines():
            sample = json.loads(line)
            for given, ((found, _),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
                asked = {"content": given["arg_0"]}
                context = len(server.post("/tokenize", asked).json()["tokens"])
                (whole,) = llm.generate(given["arg_0"] + given["arg_1"], max_tokens=1, prompt_logprobs=0)
                expected = sum(entry.logprob for entry in whole.prompt_logprobs[context:])
                assert float(found) == pytest.approx(expected, abs=1e-4)
                scored += 1
    assert scored == 5

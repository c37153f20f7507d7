"""`--draft-model` over HTTP: the same text in fewer steps; a model that cannot draft ends the start."""

from __future__ import annotations

from pathlib import Path

from tests.driver.same_text import EXACT
from tests.driver.server import StartServer, cllm, wait_for
from tests.tiny_architectures import make_head
from tests.tiny_models import make_dense, make_recurrent


def test_a_draft_model_drafts_and_the_text_is_the_same(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--draft-model", str(tiny_model), "--parallel", "2", "--threads", "1")
    plain = server.generate("Once upon a time", 60, speculate=False)
    drafted = server.generate("Once upon a time", 60)
    assert drafted["text"] == plain["text"]
    assert plain["usage"]["drafted_tokens"] == 0
    # How many tokens it drafts depends on their cost here; that it drafts, contract tests show.
    assert drafted["usage"]["accepted_tokens"] <= drafted["usage"]["drafted_tokens"]
    assert (
        server.metrics().get("cllm_accepted_tokens_total{drafter=model}", 0)
        == (drafted["usage"]["accepted_tokens"])
    )
    assert drafted["usage"]["steps"] < plain["usage"]["steps"]
    wait_for(server.idle)
    server.stop()


def test_another_vocabulary_is_refused_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    other = make_dense(tmp_path / "other.gguf", vocabulary=400)
    assert "vocabulary has 400 tokens" in refuse(tiny_model, other)


def test_recurrent_model_takes_no_draft_model(tiny_model: Path, tmp_path: Path) -> None:
    model = make_recurrent(tmp_path / "recurrent.gguf")
    assert "the served model is recurrent" in refuse(model, tiny_model)


def refuse(model: Path, draft_model: Path) -> str:
    """Start a server that must end at once; the one line that says why."""
    arguments = (str(model), "--draft-model", str(draft_model), "--port", "0", "--threads", "1")
    ended = cllm("serve", *arguments)
    assert ended.returncode == 2, ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("cllm: draft_model: ") and "cllm build" not in line, "the library is not to blame"
    return line


def test_a_models_own_head_drafts_again_after_its_engine_was_killed(
    start: StartServer, tmp_path: Path
) -> None:
    model = make_head(tmp_path / "head.gguf", right=0.9)
    server = start(str(model), "--parallel", "2", "--threads", "1", *EXACT)
    plain = server.generate("Once upon a time", 200, speculate=False)
    for _ in range(2):
        drafted = server.generate("Once upon a time", 200)
        assert drafted["text"] == plain["text"]
        assert drafted["usage"]["accepted_tokens"] <= drafted["usage"]["drafted_tokens"]
        server.kill_worker("engine")
        wait_for(lambda: server.client.get("/ready").status_code == 200)
    server.stop()

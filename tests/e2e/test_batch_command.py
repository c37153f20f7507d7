"""`cllm batch`: with a server and without, each line once, and on from where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cllm.cli import batch
from cllm.errors import Unauthorized
from cllm.llm import LLM
from tests.driver.server import Server, StartServer, cllm


def write(path: Path, count: int) -> Path:
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Item {number}", "max_tokens": 4, "temperature": 0},
        }
        for number in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def read(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_answers_are_the_same_with_a_server_and_without(
    tiny: Server, tiny_model: Path, tmp_path: Path
) -> None:
    file, out, other = write(tmp_path / "in.jsonl", 12), tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    done = cllm("batch", str(file), "--out", str(out), "--url", tiny.url)
    assert done.returncode == 0 and "12 answers" in done.stderr, done.stderr
    # A kill left half a line, and the lines after it are gone.
    kept = out.read_bytes().splitlines(keepends=True)[:5]
    other.write_bytes(b"".join(kept) + b'{"custom_id": "9", "resp')
    done = cllm("batch", str(file), "--out", str(other), "--local", "--model", str(tiny_model))
    assert done.returncode == 0 and "5 of them from before, 0 errors" in done.stderr, done.stderr
    assert read(out).keys() == {str(number) for number in range(12)} == read(other).keys()


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", 2)
    file.write_text(file.read_text() + "\n{}")
    done = cllm("batch", str(file), "--out", str(tmp_path / "out.jsonl"), "--local")
    assert done.returncode == 2 and "line 3: custom_id" in done.stderr


def test_a_refused_key_or_a_dead_server_writes_no_answer(
    start: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    file, out = write(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    file.write_text(file.read_text().replace('"max_tokens": 4', '"max_tokens": "wrong"', 1))
    server = start(str(tiny_model), "--api-key", "one")
    command = ("batch", str(file), "--out", str(out), "--url", server.url)
    refused = cllm(*command, CLLM_API_KEY="two")
    assert refused.returncode == 2 and "key" in refused.stderr and not out.read_bytes(), refused.stderr
    done = cllm(*command, CLLM_API_KEY="one")
    assert done.returncode == 1 and "3 answers" in done.stderr and "1 errors" in done.stderr, done.stderr
    server.stop()
    out.unlink()
    dead = cllm(*command)
    assert dead.returncode == 2 and dead.stderr.startswith("cllm: no server answers"), dead.stderr
    assert not out.read_bytes()


async def test_a_failure_of_the_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(_: float) -> None: ...

    async def ask(*answers: tuple[int, str]) -> httpx.Response:
        left = iter(answers)

        def answer(_: httpx.Request) -> httpx.Response:
            status, code = next(left)
            return httpx.Response(status, json={"error": {"code": code, "message": "no"}})

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://any") as client:
            return await batch._ask(client, "/v1/completions", {}, "")

    monkeypatch.setattr("asyncio.sleep", sleep)
    assert (await ask((500, "engine_died"), (429, "queue_full"), (504, ""), (200, ""))).status_code == 200
    assert batch._may_pass(await ask(*[(503, "engine_not_ready")] * batch.MAX_ATTEMPTS))
    assert (await ask((500, "poison_request"))).status_code == 500, "it would end the engine again"
    with pytest.raises(Unauthorized, match="no"):
        await ask((401, "invalid_api_key"))


def test_map_holds_a_few_prompts_and_keeps_their_order(tiny_model: Path) -> None:
    taken = 0

    def prompts() -> Any:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield f"Item {number}" if number % 2 else [{"role": "user", "content": f"Item {number}"}]

    with LLM(tiny_model, parallel=2, threads=1, ctx_size=1024) as llm:
        answers = llm.map(prompts(), max_tokens=4, temperature=0)
        first = next(answers)
        assert taken <= 8
        texts = [first.text, *(answer.text for answer in answers)]
        assert texts[33] == llm.generate("Item 33", max_tokens=4, temperature=0)[0].text
        assert len(texts) == taken == 100
        with pytest.raises(TypeError, match="temperatur"):
            next(llm.map(["a"], temperatur=0))

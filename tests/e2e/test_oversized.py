"""Prompts far beyond the context: refused by their bytes, at little cost to the server and to others."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.driver.http import JSON
from tests.driver.server import PATIENCE_S, Server, cpu_s, wait_for

CLIENTS = 16
SIZE = 7_800_000
MAX_SHARE = 0.1  # of the computing time that tokenising them would take; a conversation is rendered first


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_oversized_prompts_at_once_are_refused_untokenised(embedded: Server, route: str) -> None:
    """Computing time does not depend on how busy the machine is; a share of it, not on how fast."""
    worker = embedded.child("tokenizer")
    part = 8
    before = cpu_s(worker), cpu_s(embedded.process.pid)
    embedded.post("/tokenize", {"content": "word " * (SIZE // part // len("word "))})
    allowed_s = MAX_SHARE * (cpu_s(worker) - before[0]) * part * CLIENTS
    before = cpu_s(worker), cpu_s(embedded.process.pid)
    text = "word " * (SIZE // len("word "))
    chat = "chat" in route
    body = json.dumps(
        {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    ).encode()
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(embedded.client.post, route, content=body, headers=JSON) for _ in range(CLIENTS)]
        while not all(each.done() for each in asked):
            assert embedded.generate("hello", 1, ignore_eos=True)["generated_tokens"] == 1
    answers = [each.result() for each in asked]
    assert [answer.status_code for answer in answers] == [400] * CLIENTS
    assert [answer.text for answer in answers if not re.search(r"at least \d+ ", answer.text)] == []
    assert embedded.child("tokenizer") == worker, "it was not killed"
    assert cpu_s(worker) - before[0] < allowed_s
    assert cpu_s(embedded.process.pid) - before[1] < allowed_s


def test_text_of_a_client_that_has_left_is_not_tokenised(embedded: Server) -> None:
    """One large text is tokenised, others wait behind it; a small one goes past them."""

    def gone() -> float:
        return embedded.metrics().get("cllm_requests_refused_total{reason=client_gone}", 0.0)

    before = gone()
    large = {"content": "word " * 400_000}
    running = embedded.connect(large, "/tokenize")
    waiting = [embedded.connect(large, "/tokenize") for _ in range(3)]
    worker = embedded.child("tokenizer")
    assert embedded.generate("hello", 1, ignore_eos=True)["generated_tokens"] == 1
    for connection in waiting:
        connection.close()
    wait_for(lambda: gone() == before + len(waiting))
    running.settimeout(PATIENCE_S)
    assert running.recv(12) == b"HTTP/1.1 200"
    running.close()
    assert embedded.child("tokenizer") == worker

"""Prompts far beyond the context: refused by their bytes, at little cost to the server and to others."""

from __future__ import annotations

import pytest

from tests.driver.server import PATIENCE_S, Server, cpu_s, wait_for
from tests.soak.oversized import measure

CLIENTS = 16
SIZE = 7_800_000


@pytest.mark.parametrize(
    ("route", "worker_s"),
    [("/v1/completions", 0.1), ("/v1/chat/completions", 0.2)],  # a conversation is rendered first
)
def test_oversized_prompts_at_once_are_refused_untokenised(
    embedded: Server, route: str, worker_s: float
) -> None:
    """Tokenising one of them takes the worker four seconds; CPU time does not depend on how busy we are."""
    worker = embedded.child("tokenizer")
    before = cpu_s(worker), cpu_s(embedded.process.pid)
    big, beside, alone = measure(("127.0.0.1", embedded.port), route, CLIENTS, SIZE)
    assert [one.status for one in big] == [400] * CLIENTS
    assert all("at least 96" in one.message for one in big)
    assert {one.status for one in (*beside, *alone)} == {200} and beside
    assert embedded.child("tokenizer") == worker, "it was not killed"
    assert cpu_s(worker) - before[0] < worker_s * (CLIENTS + 1)
    assert cpu_s(embedded.process.pid) - before[1] < 0.1 * (CLIENTS + 1)
    assert max(one.seconds for one in (*big, *beside)) < 20


def test_text_of_a_client_that_has_left_is_not_tokenised(embedded: Server) -> None:
    """One large text is tokenised, others wait behind it; a small one goes past them."""

    def gone() -> float:
        return embedded.metrics().get("cllm_requests_refused_total{reason=client_gone}", 0.0)

    before = gone()
    large = {"content": "word " * 400_000}
    running = embedded.connect(large, "/tokenize")
    waiting = [embedded.connect(large, "/tokenize") for _ in range(3)]
    worker = embedded.child("tokenizer")
    assert embedded.generate("hello", 1)["generated_tokens"] == 1
    for connection in waiting:
        connection.close()
    wait_for(lambda: gone() == before + len(waiting))
    running.settimeout(PATIENCE_S)
    assert running.recv(12) == b"HTTP/1.1 200"
    running.close()
    assert embedded.child("tokenizer") == worker

"""Refusal is an answer: a full queue says 429 and when to come back."""

from __future__ import annotations

from pathlib import Path

from tests.driver.server import StartServer, wait_for

LONG = {"prompt": "long", "max_tokens": 4000, "temperature": 0}


def test_a_full_queue_is_429_with_retry_after(start: StartServer, tiny_model: Path) -> None:
    server = start(str(tiny_model), "--parallel", "1", "--threads", "1", "--queue-size", "2")
    connections = []
    try:
        answer = None
        while answer is None:  # one runs, some are at the engine's door, two wait: then no more
            connections.append(server.connect(LONG))
            wait_for(lambda: len(server.get("/debug/requests")["requests"]) == len(connections))
            if server.metrics()["cllm_queue_requests"] == 2:
                answer = server.post("/generate", LONG)
            assert len(connections) < 10
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        body = answer.json()
        assert (body["success"], body["error"]) == (False, "queue_full")
        assert "2" in body["message"]
        assert server.post("/generate_stream", LONG).status_code == 429
        refused = server.metrics()["cllm_requests_refused_total{reason=queue_full}"]
        assert refused == 2
        assert server.get("/ready") == {"status": "ready"}
    finally:
        for connection in connections:
            connection.close()
    wait_for(server.idle)
    assert server.generate("room again", 4)["generated_tokens"] == 4
    server.stop()

"""The routes beside /generate: tokens, model info, and what operators look at."""

from __future__ import annotations

import pytest

from cllm.config import EngineConfig, get_cache_ram_mb
from tests.driver.server import Server, wait_for

LONG = 4000
TEXTS = [
    "Hello, world!",
    "a<|im_end|>b <|im_start|>",
    "  spaces  \n\ttabs",
    "naïve café € 日本 😀",
    "a\0b",
    "'s",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_round_trip(tiny: Server, embedded: Server, text: str) -> None:
    for server in (tiny, embedded):
        encoded = server.post("/encode", {"text": text}).json()
        assert set(encoded) == {"tokens", "length"}
        assert encoded["length"] == len(encoded["tokens"])
        assert server.post("/decode", {"tokens": encoded["tokens"]}).json() == {"text": text}


def test_model_info(tiny: Server) -> None:
    info = tiny.get("/model/info")
    names = ("architecture", "vocabulary_size", "context_train", "embedding_length", "layers")
    assert [info[name] for name in names] == ["llama", 512, 4096, 64, 2]
    assert info["limits"]["sequences"] == 8
    assert info["limits"]["request_tokens"] <= 4096
    assert "/" not in info["name"]


def test_metrics_equal_the_clients_ledger(tiny: Server) -> None:
    """Every accepted request ends in exactly one outcome, every refused one has a reason."""
    before = tiny.metrics()
    text = tiny.generate("counted", 12)["text"]
    for _ in range(2):
        assert tiny.generate("counted", 12, stop=text[3:6])["finish_reason"] == "stop"
    with tiny.open_stream("counted", LONG) as events:
        next(events)
    wait_for(tiny.idle)
    for _ in range(3):
        assert tiny.post("/generate", {"prompt": "0" * 5000}).status_code == 400
    after = tiny.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after if name.startswith("cllm_requests_")}
    grown = {name: value for name, value in grown.items() if value and "_created" not in name}
    assert grown == {
        "cllm_requests_accepted_total": 4,
        "cllm_requests_finished_total{outcome=length}": 1,
        "cllm_requests_finished_total{outcome=stop}": 2,
        "cllm_requests_finished_total{outcome=cancelled}": 1,
        "cllm_requests_refused_total{reason=context_length_exceeded}": 3,
    }
    finished = sum(value for name, value in after.items() if name.startswith("cllm_requests_finished_total"))
    assert after["cllm_requests_accepted_total"] == finished
    for idle in ("running_requests", "queue_requests", "kv_cells_used", "sequence_leases"):
        assert after[f"cllm_{idle}"] == 0
    assert after["cllm_integrity_failures"] == 0
    assert after["cllm_kv_cells_total"] == tiny.kv()["cells"]["total"]
    memory = {
        part: after[f"cllm_memory_bytes{{part={part}}}"] for part in ("model", "kv", "buffers", "ram_tier")
    }
    assert all(memory[part] > 0 for part in ("model", "kv", "buffers"))
    assert memory["ram_tier"] == after["cllm_prefix_ram_bytes"] + after["cllm_swapped_ram_bytes"]
    assert after["cllm_memory_bytes{part=ram_tier_limit}"] == get_cache_ram_mb(EngineConfig()) << 20


def test_metrics_count_tokens_and_times(tiny: Server) -> None:
    before = tiny.metrics()
    usage = tiny.generate("count me", 10)["usage"]
    after = tiny.metrics()

    def grown(name: str) -> float:
        return after[f"cllm_{name}"] - before[f"cllm_{name}"]

    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("generated_tokens_total") == usage["completion_tokens"] == 10
    assert grown("decoded_tokens_total") == usage["decoded_tokens"]
    assert grown("steps_total") == usage["steps"]
    for histogram in ("time_to_first_token", "queue", "request"):
        assert grown(f"{histogram}_seconds_count") == 1
    assert grown("inter_token_seconds_count") == 9


def test_debug_requests_and_debug_kv_while_it_runs(tiny: Server) -> None:
    with tiny.open_stream("look at me", LONG) as events:
        request_id = next(events)["id"]
        (entry,) = tiny.get("/debug/requests")["requests"]
        kv = tiny.kv()
        (lease,) = kv["leases"]
    keys = {"id", "place", "age_s", "prompt_tokens", "generated_tokens", "max_tokens"}
    assert set(entry) == keys
    assert (entry["id"], entry["place"], entry["max_tokens"]) == (request_id, "engine", LONG)
    assert entry["generated_tokens"] > 0 and entry["age_s"] >= 0
    assert set(lease) == {"seq_id", "request_id", "tokens", "position", "state", "age_s"} | {
        "prompt_tokens",
        "cached_tokens",
    }
    assert (lease["request_id"], lease["state"]) == (request_id, "running")
    assert lease["position"] in (lease["tokens"] - 1, lease["tokens"])
    assert kv["cells"]["used"] == lease["position"] > 0
    assert kv["sequences"] == {"total": 8, "leased": 1, "free": 7, "cached": kv["sequences"]["cached"]}
    assert set(kv["cells"]) == {"total", "used", "cached"}
    counters = {"leased_total", "released_total", "cleared_cells_total", "integrity_failures"}
    keys = {"snapshot", "sequences", "cells", "leases", "cached", "preempted", "counters"}
    assert set(kv) == keys and set(kv["counters"]) == counters
    assert tiny.kv()["snapshot"] > kv["snapshot"]
    wait_for(tiny.idle)


def test_what_is_in_use_is_apart_from_what_is_cached_and_can_be_cleared(tiny: Server) -> None:
    tiny.post("/admin/cache/clear", {})
    prompt = "a prompt that is long enough to be kept " * 4
    first = tiny.generate(prompt, 8)["usage"]
    kv = tiny.kv()
    assert kv["cells"]["used"] == 0 and kv["cells"]["cached"] == first["cells"]
    assert (kv["sequences"]["leased"], kv["sequences"]["cached"]) == (0, 1)
    metrics = tiny.metrics()
    assert (metrics["cllm_kv_cells_used"], metrics["cllm_kv_cells_cached"]) == (0, first["cells"])
    again = tiny.generate(prompt, 8)["usage"]
    assert (again["cached_tokens"], again["cached_from"]) == (again["prompt_tokens"] - 1, "device")
    assert tiny.generate(prompt, 8, cache_prompt=False)["usage"]["cached_tokens"] == 0
    cleared = tiny.post("/admin/cache/clear", {}).json()
    assert cleared == {"prefixes": 1, "tokens": again["cells"], "responses": 0}
    assert tiny.kv()["cells"]["cached"] == 0
    assert tiny.generate(prompt, 8, cache_prompt=False)["usage"]["cached_tokens"] == 0
    assert tiny.kv()["cells"]["cached"] == 0, "it leaves nothing behind"

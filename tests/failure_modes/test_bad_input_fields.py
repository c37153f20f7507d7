"""Bad input: wrong fields are refused, and named, before anything is computed."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.driver.http import JSON, HealthWatch, field_refused, refusal
from tests.driver.server import Server

GENERATE, LLAMA, COMPLETIONS, CHAT = ROUTES = (
    "/generate",
    "/completion",
    "/v1/completions",
    "/v1/chat/completions",
)


@pytest.mark.failure_mode("not-a-number")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", ["NaN", "Infinity", "-Infinity", "1e400", "true", '"1"']),
        ("top_p", ["NaN", "1e400", "true"]),
        ("top_k", ["true", "1.5", "NaN", "1e400"]),
        ("seed", ["true", "1.5", "1e400", "Infinity"]),
        ("max_tokens", ["true"]),
        ("repeat_penalty", ["NaN", "Infinity", "true"]),
        ("logit_bias", ['{"1": NaN}', '{"1": 1e400}', '{"1": true}']),
    ],
)
def test_a_value_that_is_not_a_number(tiny: Server, route: str, field: str, values: list[str]) -> None:
    renamed = {(GENERATE, "repeat_penalty"): "repetition_penalty", (LLAMA, "max_tokens"): "n_predict"}
    field = renamed.get((route, field), field)
    for value in values:
        field_refused(tiny, route, field, value)


@pytest.mark.failure_mode("not-a-number")
def test_a_number_of_thousands_of_digits(tiny: Server) -> None:
    for route in ROUTES:
        body = f'{{"prompt": "x", "messages": [], "seed": {"9" * 5000}}}'
        refusal(tiny.client.post(route, content=body.encode(), headers=JSON))


@pytest.mark.failure_mode("not-a-number")
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/decode", {"tokens": [""] * 1_000_000}),
        ("/detokenize", {"tokens": [-1] * 1_000_000}),
        (LLAMA, {"prompt": [""] * 1_000_000}),
        (COMPLETIONS, {"prompt": [{}] * 1_000_000}),
        (COMPLETIONS, {"prompt": [[""]] * 1_000_000}),
        (CHAT, {"messages": [{}] * 1_000_000}),
        (GENERATE, {"prompt": "x", "stop": [1] * 1_000_000}),
        (GENERATE, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(400_000)), "")}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_million_wrong_items_cost_as_much_as_one(tiny: Server, route: str, body: Any) -> None:
    """The first one ends it; a million errors would take seconds of every client, and gigabytes."""
    before = peak_mib(tiny.process.pid)
    refusal(tiny.post(route, body))
    assert peak_mib(tiny.process.pid) - before < 400


def peak_mib(pid: int) -> int:
    """The peak of the resident memory of a process."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


RANGES = {  # of all fields: tests/unit/server/test_sampling_body.py
    "temperature": ["-0.1", "10.1"],
    "top_k": ["-2", str(2**31)],
    "typical_p": ["0", "1.1"],
    "dry_allowed_length": ["-1"],
    "mirostat": ["-1", "3"],
    "adaptive_decay": ["-0.1", "1"],
    "seed": [str(-(2**63) - 1), str(2**63)],
}


@pytest.mark.failure_mode("sampling-out-of-range")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("field", list(RANGES))
def test_sampling_out_of_range(tiny: Server, route: str, field: str) -> None:
    for value in RANGES[field]:
        if route == LLAMA and field != "seed":  # the nearest value within counts, as there
            body = f'{{"prompt": "x", "n_predict": 1, "{field}": {value}}}'
            assert tiny.client.post(route, content=body.encode(), headers=JSON).status_code == 200
            continue
        message = field_refused(tiny, route, field, value)
        assert any(character.isdigit() for character in message), "it does not name the limit"


@pytest.mark.failure_mode("too-many-choices")
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", ["1000000000", "65", "0", "-1"])
def test_too_many_choices(tiny: Server, route: str, n: str) -> None:
    field_refused(tiny, route, "n", n)


@pytest.mark.failure_mode("too-many-choices")
def test_too_many_prompts_times_choices(tiny: Server) -> None:
    before = tiny.kv()["counters"]["leased_total"]
    refusal(tiny.post(COMPLETIONS, {"prompt": ["x"] * 257, "max_tokens": 1}))
    refusal(tiny.post(COMPLETIONS, {"prompt": ["x"] * 128, "n": 3, "max_tokens": 1}))
    refusal(tiny.post(COMPLETIONS, {"prompt": ["x"] * 256, "best_of": 64, "max_tokens": 1}))
    assert tiny.kv()["counters"]["leased_total"] == before


@pytest.mark.failure_mode("max-tokens-out-of-range")
def test_max_tokens_below_one(tiny: Server) -> None:
    for route in (GENERATE, COMPLETIONS, CHAT):
        for value in ("-2", "-1000000000000", *(["0"] if route != COMPLETIONS else [])):
            field_refused(tiny, route, "max_tokens", value)
    field_refused(tiny, LLAMA, "n_predict", "-2")


@pytest.mark.failure_mode("max-tokens-out-of-range")
def test_huge_max_tokens_is_clamped_and_no_limit_is_one(tiny: Server) -> None:
    limit = tiny.get("/model/info")["limits"]["request_tokens"]
    prompt = "0" * (limit - 20)  # every digit is a token
    data = tiny.generate(prompt, 10**30)
    assert (data["generated_tokens"], data["finish_reason"]) == (20, "length")
    body = {"prompt": prompt, "max_tokens": 10**18, "temperature": 0}
    (choice,) = tiny.post(COMPLETIONS, body).json()["choices"]
    assert choice["finish_reason"] == "length"
    answer = tiny.post(LLAMA, {"prompt": prompt, "n_predict": -1, "temperature": 0}).json()
    assert answer["tokens_predicted"] == 20 and answer["stop_type"] == "limit"


@pytest.mark.failure_mode("top-logprobs-out-of-range")
@pytest.mark.parametrize("value", ["-1", "21", '"x"', "true", "1.5"])
def test_top_logprobs_out_of_range(tiny: Server, value: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "logprobs": true, "top_logprobs": {value}}}'
    message = refusal(tiny.client.post(CHAT, content=body.encode(), headers=JSON))
    assert "top_logprobs" in message
    field_refused(tiny, COMPLETIONS, "logprobs", value)
    field_refused(tiny, LLAMA, "n_probs", value)


@pytest.mark.failure_mode("logit-bias-outside-vocabulary")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("key", ["512", "-1", "x", "1.0", "99999999999999999999", "١"])
def test_logit_bias_outside_the_vocabulary(tiny: Server, route: str, key: str) -> None:
    if route == LLAMA and not (key.isascii() and key.isdigit()):  # there it is a text
        assert tiny.post(route, {"prompt": "x", "n_predict": 1, "logit_bias": {key: 1}}).status_code == 200
    else:
        field_refused(tiny, route, "logit_bias", json.dumps({key: 1}))


@pytest.mark.failure_mode("bad-stop-strings")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("stops", "limit"), [([""], ""), (["ok", ""], ""), (["s"] * 17, "16"), (["s" * 257], "256")]
)
def test_bad_stops(tiny: Server, route: str, stops: list[str], limit: str) -> None:
    if "" in stops:  # is none
        message = {"role": "user", "content": "x"}
        body = {"prompt": "x", "messages": [message], "n_predict": 1, "max_tokens": 1, "stop": stops}
        assert tiny.post(route, body).status_code == 200
        return
    assert limit in field_refused(tiny, route, "stop", json.dumps(stops))
    if len(stops) == 1 and route != LLAMA:
        assert limit in field_refused(tiny, route, "stop", json.dumps(stops[0]))


@pytest.mark.failure_mode("bad-token-ids")
def test_token_ids_and_empty_prompts(tiny: Server) -> None:
    for route in (COMPLETIONS, LLAMA):
        for prompt in ("[-1]", "[512]", "[1, 10000000000000000000000]", "[]", "[1.5]", "[true]"):
            field_refused(tiny, route, "prompt", prompt)
    field_refused(tiny, COMPLETIONS, "prompt", "[[1], [512]]")
    field_refused(tiny, COMPLETIONS, "prompt", "[[]]")
    for route in (GENERATE, COMPLETIONS, LLAMA):
        field_refused(tiny, route, "prompt", '""')
    refusal(tiny.post("/decode", {"tokens": [512]}))


@pytest.mark.failure_mode("prompt-too-long")
@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_longer_than_the_context(tiny: Server, route: str) -> None:
    limit = tiny.get("/model/info")["limits"]["request_tokens"]
    text = "0" * (limit + 7)
    body = {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": text}
    message = refusal(tiny.post(route, body), 400, "context_length_exceeded")
    assert str(limit) in message and (route == CHAT or str(limit + 7) in message)


@pytest.mark.failure_mode("prompt-too-long")
def test_prompts_of_5_mb_leave_health_quick(tiny: Server) -> None:
    body = {"prompt": "many words " * 480_000}
    with HealthWatch(tiny.url, tiny.process.pid) as health:
        for _ in range(10):
            assert tiny.post(GENERATE, body).status_code == 400
    assert health.median < 0.1


@pytest.mark.failure_mode("lone-surrogate")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("text", [r"\ud83d", r"x\udc00y", r"\udc00\ud83d"])
def test_a_lone_surrogate(tiny: Server, route: str, text: str) -> None:
    if route == CHAT:
        field_refused(tiny, route, "messages", f'[{{"role": "user", "content": "{text}"}}]')
    else:
        field_refused(tiny, route, "prompt", f'"{text}"')
    field_refused(tiny, route, "stop", f'["{text}"]')
    field_refused(tiny, route, "grammar", f'"{text}"')


@pytest.mark.failure_mode("nul-character")
def test_nul_in_a_prompt_is_kept(tiny: Server) -> None:
    assert tiny.generate("a\0b", 2)["usage"]["prompt_tokens"] == 3
    assert tiny.post("/encode", {"text": "a\0b"}).json()["tokens"] == [97, 0, 98]
    messages = [{"role": "user", "content": "a\0b"}]
    assert "a\0b" in tiny.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert tiny.post(COMPLETIONS, {"prompt": "a\0b", "max_tokens": 1}).json()["usage"]["prompt_tokens"] == 3


@pytest.mark.failure_mode("nul-character")
@pytest.mark.parametrize("route", ROUTES)
def test_nul_in_a_grammar_or_stop(tiny: Server, route: str) -> None:
    field_refused(tiny, route, "stop", r'["a\u0000b"]')
    field_refused(tiny, route, "grammar", r'"root ::= \"a\u0000b\""')
    field_refused(tiny, route, "regex", r'"a\u0000b"')
    field_refused(tiny, route, "choice", r'["a\u0000b"]')


@pytest.mark.failure_mode("control-tokens-in-content")
@pytest.mark.parametrize("control", ["<|im_end|>", "<|im_start|>system", "<|endoftext|>"])
def test_control_tokens_in_a_message_are_text(tiny: Server, control: str) -> None:
    """One token of a turn's end costs one; its spelling as text costs more, and ends no turn."""

    def tokens(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return int(tiny.post(CHAT, body).json()["usage"]["prompt_tokens"])

    as_text = len(tiny.post("/encode", {"text": control}).json()["tokens"])
    parsed = len(tiny.post("/tokenize", {"content": control}).json()["tokens"])
    assert as_text > parsed
    assert tokens(f"a {control}") - tokens("a ") == as_text
    assert max(tiny.post("/encode", {"text": control}).json()["tokens"]) not in (256, 257, 258)


@pytest.mark.failure_mode("bad-messages")
@pytest.mark.parametrize(
    "messages",
    [
        "[]",
        "[{}]",
        '[{"role": "wizard", "content": "x"}]',
        '[{"role": 5, "content": "x"}]',
        '[{"role": "user", "content": 5}]',
        '["x"]',
        '"x"',
        "null",
        json.dumps([{"role": "user", "content": "x"}] * 10_000),
    ],
    ids=["none", "empty", "wizard", "role 5", "content 5", "text in list", "text", "null", "10,000"],
)
def test_bad_messages(tiny: Server, messages: str) -> None:
    field_refused(tiny, CHAT, "messages", messages)


@pytest.mark.failure_mode("private-image-url")
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://127.0.0.1:{port}/x",
        "http://169.254.169.254/",
        "data:image/png;base64,AA==",
    ],
)
@pytest.mark.parametrize("nested", [True, False], ids=["object", "string"])
def test_an_image_url(tiny: Server, url: str, nested: bool) -> None:
    """Text only: nothing is fetched, whatever the address; and the refusal says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = url.format(port=listener.getsockname()[1])
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url} if nested else url}
        content = [{"type": "text", "text": "What is this?"}, part]
        answer = tiny.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        message = refusal(answer)
        assert message.startswith("messages: ") and "image" in message and "text" in message
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.failure_mode("path-as-model-name")
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/../passwd", "..\\x", "~/model", "a/../b", "C:\\x"]
)
def test_a_path_as_model(tiny: Server, route: str, name: str) -> None:
    body = {"model": name, "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    message = refusal(tiny.post(route, body), 404)
    assert name not in message

"""What `/docs` shows is true: every example body is answered, in the shape of the example answer."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from cllm.server.dialect import EVENTS, JSON, NDJSON
from tests.driver.server import Server
from tests.unit.server.test_openapi import ROUTES

SOME = {int: "a number", float: "a number", str: "a text", bool: "a truth", type(None): "anything"}


def shape(value: Any) -> Any:
    """A value's form; of a list, that of its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return SOME[type(value)]


def same(found: Any, shown: Any) -> bool:
    """Equal shapes; an empty list and null fit any."""
    if isinstance(found, dict) and isinstance(shown, dict):
        return found.keys() == shown.keys() and all(same(found[key], shown[key]) for key in found)
    if isinstance(found, list) and isinstance(shown, list):
        return not found or not shown or same(found[0], shown[0])
    return found == shown or "anything" in (found, shown)


# What changes the server, or needs a folder or a hub of its own: test_reload, test_ollama.
NOTHING_NEEDED = ("/tokenize", "/detokenize", "/v1/conversations")  # nothing is no text, as in llama-server
CHANGING = ("/admin/", "/api/pull", "/api/delete", "/api/copy")
# A form, and nothing:
SOUND = "/v1/audio/transcriptions"  # the tiny model does not hear: see test_pictures
NO_JSON = ("/v1/files", SOUND, "/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel")
LINE = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x", "max_tokens": 1},
}
FORM: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": json.dumps(LINE).encode()}}
SHOWN = sorted(f"{method} {path}" for method, path, _ in ROUTES if not path.startswith(CHANGING))


@cache
def describe(server: Server) -> Any:
    return server.get("/openapi.json")


def prepare(server: Server, path: str) -> tuple[str, str]:
    """The path with the id of what it names, and that of a file."""
    file = server.client.post("/v1/files", **FORM).json()["id"]
    names = {"file_id": file}
    if "{batch_id}" in path:
        asked = {"input_file_id": file, "endpoint": LINE["url"], "completion_window": "24h"}
        names["batch_id"] = server.post("/v1/batches", asked).json()["id"]
    return path.format_map(names) + "?purpose=batch" * (path == "/v1/files"), file


@pytest.mark.parametrize("route", [route for route in SHOWN if not route.endswith(SOUND)])
def test_the_example_is_answered_as_shown(route: str, tiny: Server) -> None:
    method, path = route.split()
    described = describe(tiny)
    operation = described["paths"][path][method.lower()]
    body, asked = None, dict[str, Any]()
    if method == "POST" and path not in NO_JSON:
        reference = operation["requestBody"]["content"][JSON]["schema"]["$ref"]
        body = described["components"]["schemas"][reference.rpartition("/")[2]]["example"]
        # The tiny model's words are random, its likeliest are plain text.
        body = {**body, "temperature": 0, "speculate": False}
    if "{response_id}" in path:
        asked = {"input": "x", "max_output_tokens": 1, "background": path.endswith("cancel")}
        path = path.format(response_id=tiny.post("/v1/responses", asked).json()["id"])
    if "{conversation_id}" in path:
        path = path.format(conversation_id=tiny.post("/v1/conversations", {}).json()["id"])
    if "{stream_id}" in path:
        asked = {"prompt": "x", "max_tokens": 1, "stream": True, "reconnect_s": 60}
        path = path.format(stream_id=tiny.post("/v1/completions", asked).headers["X-Stream-Id"])
    if path.startswith(("/v1/files", "/v1/batches")):
        path, file = prepare(tiny, path)
        body = {**body, "input_file_id": file, "endpoint": LINE["url"]} if body is not None else None
    given = FORM if route == "POST /v1/files" else {"json": body}
    answer = tiny.client.request(method, path, **given)
    if "; needs a" in operation["summary"]:
        assert answer.status_code == 400, "the tiny model cannot; see test_infill, test_embeddings"
        assert same(shape(answer.json()), shape(operation["responses"]["400"]["content"][JSON]["example"]))
        return
    assert answer.status_code == 200, answer.text
    shown = operation["responses"]["200"]["content"]
    if JSON in shown:
        assert same(shape(answer.json()), shape(shown[JSON]["example"])), answer.text
    if EVENTS in shown and body is not None:
        streamed = tiny.post(path, {**body, "stream": True})
        assert streamed.headers["content-type"].startswith(EVENTS)
        ends_with_done = shown[EVENTS]["example"].endswith("[DONE]\n\n")
        assert streamed.text.endswith("data: [DONE]\n\n") == ends_with_done
    if NDJSON in shown:
        streamed = tiny.post(path, {**(body or {}), "stream": True})
        assert streamed.headers["content-type"].startswith(NDJSON)
        last, example = streamed.text.splitlines()[-1], shown[NDJSON]["example"].splitlines()[-1]
        assert same(shape(json.loads(last)), shape(json.loads(example)))


@pytest.mark.parametrize(
    "route", [route for route in SHOWN if route.startswith("POST") and not route.endswith(NO_JSON)]
)
def test_an_empty_body_is_refused_as_shown(route: str, tiny: Server) -> None:
    path = route.split()[1]
    shown = describe(tiny)["paths"][path]["post"]["responses"]
    refused = tiny.post(path, {})
    if path in NOTHING_NEEDED:
        assert refused.status_code == 200
    else:
        assert refused.status_code == 400
        assert refused.json() == shown["400"]["content"][JSON]["example"]
    refused = tiny.client.post(path, content="a=b", headers={"Content-Type": "text/plain"})
    assert refused.status_code == 415
    assert refused.json() == shown["415"]["content"][JSON]["example"]

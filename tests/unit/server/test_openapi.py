"""The description of the API is complete: every field, every body, every answer; and its page is our own."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import jsonschema
import pytest

from cllm.config import EngineConfig, ServerConfig
from cllm.frontend.engine_client import EngineClient
from cllm.server.app import create_app
from cllm.server.body import Body
from cllm.server.dialects import DIALECTS
from cllm.server.examples import TEXTS
from cllm.types import SamplingParams
from tests.driver.fake_runner import FakeRunner
from tests.driver.thread_engine import ThreadExecutor

KEY = "a-key-of-the-owner"
ADMIN = ("/admin", "/debug", "/metrics", "/slots", "/api/pull", "/api/delete", "/api/copy")


def get(path: str, api_key: str = "") -> httpx.Response:
    """Ask an app that has no model: the description needs none."""
    engine = EngineClient(ThreadExecutor(lambda _: FakeRunner(), EngineConfig()))
    app = create_app(engine, ServerConfig(api_key=api_key))
    headers = {"x-api-key": api_key} if api_key else {}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


DESCRIPTION: dict[str, Any] = get("/openapi.json").json()
SCHEMAS: dict[str, Any] = DESCRIPTION["components"]["schemas"]
ROUTES = [
    (method.upper(), path, route)
    for path, methods in DESCRIPTION["paths"].items()
    for method, route in methods.items()
]
each_route = pytest.mark.parametrize(
    ("method", "path", "route"), ROUTES, ids=[f"{method} {path}" for method, path, _ in ROUTES]
)


def referred(schema: Any) -> set[str]:
    """The names of all schemas that one refers to, whatever stands in between."""
    found: set[str] = set()
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found.add(name)
                todo.append(SCHEMAS[name])
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return found


SENT = referred([route.get("requestBody") for _, _, route in ROUTES])
each_schema = pytest.mark.parametrize("name", sorted(SENT))


def body_of(route: dict[str, Any]) -> dict[str, Any] | None:
    content = route.get("requestBody", {"content": {}})["content"].get("application/json")
    return None if content is None else dict(SCHEMAS[content["schema"]["$ref"].rpartition("/")[2]])


def test_names_are_for_people() -> None:
    assert not [name for name in SCHEMAS if "__" in name], "two bodies have the same name"


@each_schema
def test_every_field_is_typed_described_and_has_an_example(name: str) -> None:
    for field, schema in SCHEMAS[name]["properties"].items():
        assert schema.get("description"), f"{field}: no description"
        assert {"type", "anyOf", "$ref", "const", "enum"} & schema.keys(), f"{field}: no type"
        told = schema.get("examples") or schema.get("enum") or schema.get("const")
        assert told or schema.get("default") not in (None, [], {}, ""), f"{field}: no example"
        for example in schema.get("examples", ()):
            jsonschema.validate(example, {**schema, "components": DESCRIPTION["components"]})


@each_schema
def test_every_number_has_a_lower_limit(name: str) -> None:
    for field, schema in SCHEMAS[name]["properties"].items():
        for kind in (schema, *schema.get("anyOf", ())):
            if kind.get("type") in ("integer", "number"):
                assert {"minimum", "exclusiveMinimum"} & kind.keys(), field


@each_route
def test_every_route_has_a_summary_and_an_example_of_each_answer(
    method: str, path: str, route: dict[str, Any]
) -> None:
    assert len(route["summary"]) > 8 and not route["summary"].endswith(".")
    assert "422" not in route["responses"], "what is wrong with a body is told with 400"
    for status, answer in route["responses"].items():
        assert answer["description"]
        assert answer["content"] or (path, status) == ("/api/copy", "200"), f"no example of {status}"
        for content in answer["content"].values():
            assert content["example"]
    if method == "POST":
        assert {"200", "400", "401", "403", "408", "413", "415", "431", "500", "503"} <= route[
            "responses"
        ].keys()


@each_route
def test_every_body_has_an_example_that_is_valid(method: str, path: str, route: dict[str, Any]) -> None:
    if (body := body_of(route)) is not None:
        jsonschema.validate(body["example"], {**body, "components": DESCRIPTION["components"]})


@each_route
def test_the_example_of_an_answer_fits_its_schema(method: str, path: str, route: dict[str, Any]) -> None:
    told = route["responses"]["200"]["content"].get("application/json")
    if told is not None:
        jsonschema.validate(told["example"], {**told["schema"], "components": DESCRIPTION["components"]})


def test_the_texts_are_of_fields_and_routes_that_there_are() -> None:
    todo, known = [Body, SamplingParams], {}
    while todo:
        todo += (kind := todo.pop()).__subclasses__()
        known[kind.__name__] = set(vars(kind).get("__annotations__", ()))
    known[""] = {field for fields in known.values() for field in fields}
    assert TEXTS.examples.keys() <= known.keys()
    for name, fields in TEXTS.fields.items():
        assert fields.keys() <= known[name], name
    assert TEXTS.errors.keys() - {""} <= {
        f"{each.method} {each.path}" for one in DIALECTS for each in one.routes
    }


def test_every_schema_is_used() -> None:
    assert SCHEMAS.keys() == referred([route for _, _, route in ROUTES])


@each_route
def test_errors_are_shown_in_the_shape_of_their_route(method: str, path: str, route: dict[str, Any]) -> None:
    for status, answer in route["responses"].items():
        if int(status) >= 400:
            example = answer["content"]["application/json"]["example"]
            if path.startswith("/v1/messages"):
                assert example["type"] == "error" and example["error"].keys() == {"type", "message"}
            elif path.startswith("/v1/"):
                assert example["error"].keys() == {"message", "type", "param", "code"}
            elif "llama-server" in route["tags"] or path == "/embedding":
                assert example["error"].keys() == {"message", "type", "code"}
            elif path.startswith("/api/"):
                assert example.keys() == {"error"}
            else:
                assert example.keys() == {"success", "error", "message"}


def test_a_route_whose_body_names_a_model_may_not_find_it() -> None:
    for method, path, route in ROUTES:
        if "model" in (body_of(route) or {}).get("properties", {}):
            assert "404" in route["responses"], f"{method} {path}"


def test_several_prompts_of_llama_servers_route_are_answered_with_a_list() -> None:
    routes = {path: route for _, path, route in ROUTES}
    for path in ("/completion", "/infill"):
        schema = routes[path]["responses"]["200"]["content"]["application/json"]["schema"]
        *one, several = schema["anyOf"]
        assert several == {"type": "array", "items": {"anyOf": one}}
        assert one[1]["type"] == "object", "with response_fields"


@pytest.mark.parametrize("closed", [False, True])
def test_which_key_a_route_needs_is_told(closed: bool) -> None:
    described = get("/openapi.json", KEY if closed else "").json()
    assert set(described["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    for path, methods in described["paths"].items():
        for route in methods.values():
            roles = ["admin"] if path.startswith(ADMIN) else []
            needed: list[dict[str, list[str]]] = [{"bearer": roles}, {"x-api-key": roles}]
            expected = [] if path in ("/health", "/ready") else needed + [{}] * (not closed)
            assert route["security"] == expected, path
            assert ("admin's API key" in route["description"]) == bool(roles), path


def test_tags_are_described_and_used() -> None:
    used = {tag for _, _, route in ROUTES for tag in route["tags"]}
    assert used == {tag["name"] for tag in DESCRIPTION["tags"]}
    assert all(tag["description"] for tag in DESCRIPTION["tags"])


def test_the_page_needs_nobody_else() -> None:
    page = get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(https?:)?//[a-z]", page.text), "an address of somebody else"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy
    assert get("/redoc").status_code == 404

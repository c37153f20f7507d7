"""The OpenAPI description at `/openapi.json`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cllm import __version__
from cllm.errors import InvalidRequest
from cllm.server.body import Body
from cllm.server.dialect import EVENTS, JSON, NDJSON, PLAIN, Dialect, HttpError, Route
from cllm.server.examples import TEXTS, find_example, make_example
from cllm.server.middleware import ADMIN, OPEN

REFERENCE = "#/components/schemas/{name}"


_NO_ADMIN = "; or the key is not an admin's"
_NO_FOLDER = "; or the server was started without the folder this needs (`--model-dir`)"
_FOR_OPERATORS = "Needs an admin's API key where the server has keys; else a server on loopback."


def make_description(dialects: Sequence[Dialect], *, closed: bool) -> dict[str, Any]:
    """The OpenAPI description of all routes that are shown. A `closed` server needs keys."""
    routes = [route for dialect in dialects for route in dialect.routes if route.shown]
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    kinds = dict.fromkeys([*bodies, *(kind for route in routes if (kind := _get_kind(route)) is not None)])
    found, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    references = dict(zip(kinds, found, strict=True))
    for body in bodies:
        if example := find_example(body):
            _resolve(schemas, references[body])["example"] = example
    _describe_fields(schemas, Body)
    for field in (each for schema in schemas.values() for each in schema.get("properties", {}).values()):
        if field.keys() == {"enum"}:  # the tag of a struct in a union
            field["description"] = "Which of the forms this is"
    paths: dict[str, Any] = {}
    for route in routes:
        described = _describe(route, references, schemas, closed=closed)
        paths.setdefault(re.sub(r":\w+}", "}", route.path), {})[route.method.lower()] = described
    tags = {dialect.name: dialect.about for dialect in dialects}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cllm",
            "description": "GGUF models for many users at once, on llama.cpp.",
            "version": __version__,
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": TEXTS.security},
        "tags": [{"name": name, "description": about} for name, about in tags.items()],
    }


def _describe_fields(schemas: Mapping[str, Any], kind: Any) -> None:
    """Add their descriptions and examples to the fields of all bodies."""
    for each in kind.__subclasses__():
        properties = schemas.get(each.__name__, {}).get("properties", {})
        for field in msgspec.structs.fields(each) if properties else ():
            owner = next(base for base in each.__mro__ if field.name in vars(base).get("__annotations__", ()))
            if texts := (TEXTS.fields[""] | TEXTS.fields.get(owner.__name__, {})).get(field.name):
                said = {"description": texts[0]} | ({"examples": texts[1:]} if texts[1:] else {})
                properties[field.encode_name] = said | properties[field.encode_name] | said
        _describe_fields(schemas, each)


def _get_kind(route: Route) -> Any:
    """The type of a route's answers; None where they are plain text, or a stream alone."""
    example = _get_example(route)
    if example is None or isinstance(example, str):
        return None
    return list[type(example[0])] if isinstance(example, list) else type(example)  # type: ignore[misc]


def _get_example(route: Route) -> Any:
    return make_example(route.answer) if isinstance(route.answer, type) else route.answer


def _resolve(schemas: dict[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a reference names."""
    found: dict[str, Any] = schemas[str(reference["$ref"]).rpartition("/")[2]]
    return found


def _describe(
    route: Route, references: Mapping[Any, Any], schemas: dict[str, Any], *, closed: bool
) -> dict[str, Any]:
    first, _, more = inspect.cleandoc(route.handler.__doc__ or "").partition("\n")
    operators = route.path.startswith(ADMIN)
    schemes = [{name: ["admin"] if operators else []} for name in TEXTS.security]
    security = schemes if closed else [*schemes, {}]  # either scheme, with the role it takes; {}: or none
    described: dict[str, Any] = {
        "tags": [route.dialect.name],
        "summary": first.removesuffix("."),
        "description": "\n\n".join(filter(None, (more.strip(), _FOR_OPERATORS if operators else ""))),
        "operationId": re.sub(r"\W+", "_", f"{route.handler.__name__}_{route.path}_{route.method.lower()}"),
        "security": [] if route.path in OPEN else security,
    }
    if names := re.findall(r"{(\w+)", route.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    required, named = None, route.path.startswith("/v1/models/")
    if route.body is not None:
        reference = references[route.body]
        schema = _resolve(schemas, reference)
        required = next(iter(schema.get("required", ())), None)
        named = named or "model" in schema.get("properties", ())
        described["requestBody"] = {"content": {JSON: {"schema": reference}}, "required": True}
    if form := TEXTS.forms.get(f"{route.method} {route.path}"):
        described["requestBody"] = {"content": {"multipart/form-data": {"schema": form}}, "required": True}
    described["responses"] = _responses(
        route, _content(route, references.get(_get_kind(route))), required, named=named
    )
    return described


def _content(route: Route, schema: Any) -> dict[str, Any]:
    """The answers of a route, by content type."""
    content: dict[str, Any] = {}
    example = _get_example(route)
    if isinstance(example, str):
        content[PLAIN] = {"schema": {"type": "string"}, "example": example}
    elif example is not None:
        if route.several:
            one = {"anyOf": [schema, {"type": "object", "description": "What `response_fields` names"}]}
            schema = {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}
        content[JSON] = {"schema": schema, "example": msgspec.to_builtins(example)}
    if route.events:
        content[EVENTS] = {"example": route.events.decode()}
    if route.lines:
        content[NDJSON] = {"example": route.lines.decode()}
    return content


def _responses(route: Route, content: dict[str, Any], required: str | None, *, named: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    own = TEXTS.errors.get(f"{route.method} {route.path}", {})
    statuses = {403, 431, *own, *((404,) if named else ())}
    if route.path not in OPEN:
        statuses |= {401, 500, 503}
    if route.method == "POST":
        statuses |= {400, 408, 413, 415}
    if route.computes:
        statuses |= {429, 504}
        found["200"]["headers"] = TEXTS.headers["position"]
    for status in sorted(statuses):
        code, message, when = own.get(status) or TEXTS.errors[""][status]
        field = required if status == 400 else None
        if status == 400 and field is None:  # no field is required
            message = "the body is not a JSON object"
        message = message.format(field=field)
        error = InvalidRequest(message, field) if status == 400 else HttpError(status, code, message)
        if status == 403:
            admin = route.path.startswith("/admin/")
            when += _NO_ADMIN * route.path.startswith(ADMIN) + _NO_FOLDER * admin
        found[str(status)] = {
            "description": when,
            "content": {JSON: {"schema": {"type": "object"}, "example": route.dialect.make_error(error)}},
        }
        if status in (429, 503, 504):
            found[str(status)]["headers"] = TEXTS.headers["retry"]
    return found

"""`cllm ps`, `cllm load` and `cllm unload`: the models of a running server."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from cllm.cli.client import ServerClient, Url
from cllm.cli.columns import print_columns
from cllm.cli.options import fail
from cllm.errors import CllmError, Forbidden, NotFound
from cllm.models.files import format_size

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model that the server has.")]


def ps_command(
    url: Url = "", as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
) -> None:
    """List the models of a running server: which are loaded, and what they take."""
    try:
        with ServerClient(url) as client:
            models = list_served(client)
    except CllmError as error:
        raise fail(error) from None
    if as_json:
        typer.echo(json.dumps(models, indent=2))
        return
    rows = [
        (
            model["name"],
            model.get("state", ""),
            format_size(model.get("size_bytes") or 0),
            format_size(memory) if (memory := sum((model.get("memory_bytes") or {}).values())) else "",
            str(model.get("context") or ""),
            str(model.get("requests", "")),
            _describe_end(model),
        )
        for model in models
    ]
    print_columns(("name", "state", "size", "takes", "context", "requests", "until"), rows)


def list_served(client: ServerClient) -> list[dict[str, Any]]:
    """The models as `/admin/models` tells them; for a key that is no operator's, as `/v1/models` does."""
    try:
        models: list[dict[str, Any]] = client.get("/admin/models")["models"]
        return models
    except (Forbidden, NotFound):
        return [
            {
                "name": entry["id"],
                "state": "ready" if entry.get("loaded", True) else "unloaded",
                "size_bytes": (entry.get("meta") or {}).get("size", 0),
                "context": entry.get("context_length", 0),
            }
            for entry in client.get("/v1/models")["data"]
        ]


def _describe_end(model: dict[str, Any]) -> str:
    """When a model is unloaded, or why it is not loaded."""
    if model.get("error"):
        return str(model["error"])
    if model.get("state") == "unloaded":
        return ""
    if model.get("keep"):
        return "kept"
    expires = model.get("expires_at")
    return f"{max(0.0, expires - time.time()):.0f} s without a request" if expires else ""


def load_command(model: Name, url: Url = "") -> None:
    """Load a model of a running server, and wait until it serves."""
    _change("load", model, url)


def unload_command(model: Name, url: Url = "") -> None:
    """Unload a model of a running server; the next request loads it again."""
    _change("unload", model, url)


def _change(verb: str, model: str, url: str) -> None:
    try:
        with ServerClient(url) as client:
            answer = client.post(f"/admin/models/{verb}", {"model": model.removesuffix(":latest")})
    except CllmError as error:
        raise fail(error) from None
    memory = sum((answer.get("memory_bytes") or {}).values())
    shown = f", {format_size(memory)} of memory" if memory and verb == "load" else ""
    typer.echo(f"{answer['name']} is {answer['state']}{shown}")

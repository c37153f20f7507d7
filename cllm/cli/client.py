"""Client of a running server, and the commands that list, load and unload its models."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import urlsplit

import httpx
import typer
from typer import Argument, Option

from cllm.cli.terminal import AsJson, echo, print_columns
from cllm.config import ServerConfig
from cllm.errors import CllmError, Forbidden, ModelNotFound, NotFound, ServerUnreachable, from_code
from cllm.models.files import format_memory, format_size

KEY_VARIABLE = "CLLM_API_KEY"
CONNECT_S = 3.0
READ_S = 600.0  # a server that computes a long prompt is silent meanwhile
RECONNECT_S = 60  # a stream goes on without its reader
RETRIES, RETRY_S = 5, 1.0  # to take up a stream
Url = Annotated[
    str, Option("--url", envvar="CLLM_URL", metavar="URL", show_default=False, help="Address of the server.")
]
Name = Annotated[str, Argument(metavar="MODEL", help="Name of a model that the server has.")]


def get_key() -> str:
    """The API key of the user: the first of the variable, which may list those of a server."""
    return os.environ.get(KEY_VARIABLE, "").split(",")[0].strip()


def _is_here(url: str) -> bool:
    """Return True for an address of this machine only."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class ServerModel(NamedTuple):
    """A model as `/v1/models` lists it."""

    name: str
    context: int
    aliases: tuple[str, ...] = ()
    loaded: bool = True
    reconnects: bool = False  # the server keeps streams


class ServerClient:
    """A connection to a server. Its errors are those that the server gave, in one line each."""

    def __init__(self, url: str = "") -> None:
        """Connect to `url`, by default to the address of a server without settings, with CLLM_API_KEY."""
        default = f"{ServerConfig().host}:{ServerConfig().port}"
        self.url = (url or default).rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        self.headers = {"Authorization": f"Bearer {key}"} if (key := get_key()) else {}
        self._client = httpx.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            trust_env=not _is_here(self.url),  # no proxy on the way to this machine
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def is_running(self) -> bool:
        """Return True if a server answers there, be its engine ready or not."""
        try:
            answer = self._client.get("/health", timeout=CONNECT_S)
            return isinstance(answer.json(), dict) and "status" in answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return False

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST a body; returns the answer's JSON."""
        with self._reporting():
            answer = self._client.request("GET" if body is None else "POST", path, json=body)
            check_answer(answer)
            return answer.json()

    def models(self) -> list[ServerModel]:
        """The models of the server; those that are loaded come first."""
        found = [
            ServerModel(
                entry["id"],
                entry.get("context_length") or entry.get("max_model_len") or 0,
                tuple(entry.get("aliases") or ()),
                entry.get("loaded", True) is not False,
                entry.get("owned_by") == "cllm",
            )
            for entry in self.request("/v1/models").get("data") or []
        ]
        return sorted(found, key=lambda model: not model.loaded)

    def find_model(self, name: str) -> ServerModel:
        """Return the model of this name, or any for "". Raise ModelNotFound, with the list."""
        models, wanted = self.models(), name.lower().removesuffix(":latest")
        for model in models:
            if not name or wanted in (known.lower() for known in (model.name, *model.aliases)):
                return model
        names = ", ".join(model.name for model in models) or "none"
        raise ModelNotFound(f"the server at {self.url} has no model {name!r}; it serves: {names}")

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a stream. Leaving the loop cancels the request.

        Where the server keeps the stream, a lost connection is taken up again after the last event.
        """
        last, lost = "", 0
        request: dict[str, Any] = {"method": "POST", "url": path, "json": body}
        try:
            while True:
                try:
                    with self._reporting():
                        for name, value in self._read_fields(request):
                            if name == "id":
                                last = value
                            elif value != "[DONE]":
                                event, lost = json.loads(value), 0
                                if event.get("error"):
                                    raise _make_error(event)
                                yield event
                    last = ""
                    return
                except ServerUnreachable:
                    if not last or (lost := lost + 1) > RETRIES:
                        raise
                    time.sleep(RETRY_S)
                    url = f"/v1/streams/{last.rpartition('.')[0]}"
                    request = {"method": "GET", "url": url, "headers": {"Last-Event-ID": last}}
        finally:
            if last:
                with suppress(httpx.HTTPError):
                    self._client.delete(f"/v1/streams/{last.rpartition('.')[0]}", timeout=CONNECT_S)

    def _read_fields(self, request: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """The fields `id` and `data` of a response's events."""
        with self._client.stream(**request) as answer:
            check_answer(answer)
            for line in answer.iter_lines():
                name, _, value = line.partition(":")
                if name in ("id", "data"):
                    yield name, value.strip()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turns failures of the connection into errors with one line."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise ServerUnreachable(f"no server answers at {self.url}; `cllm serve` starts one") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"the connection to {self.url} failed: {reason}") from None
        except ValueError:
            raise ServerUnreachable(f"what answers at {self.url} is no cllm server") from None


def check_answer(answer: httpx.Response) -> None:
    """Raises the error that the server answered with."""
    if answer.is_error:
        answer.read()  # that of a stream, too
        try:
            raise _make_error(answer.json())
        except ValueError:
            raise ServerUnreachable(f"the server answered with status {answer.status_code}") from None


def _make_error(body: Any) -> CllmError:
    """The error of a body, in the shape of any API."""
    found = body if isinstance(body, dict) else {}
    error = found.get("error")
    if isinstance(error, dict):
        return from_code(str(error.get("code")), str(error.get("message") or error))
    return from_code(str(error), str(found.get("message") or error or body))


# Commands ----------------------------------------------------------------------------------------


def ps_command(url: Url = "", as_json: AsJson = False) -> None:
    """List the models of a running server: which are loaded, and what they take."""
    with ServerClient(url) as client:
        models = list_served(client)
    if as_json:
        typer.echo(json.dumps(models, indent=2))
        return
    rows = []
    for model in models:
        memory = sum((model.get("memory_bytes") or {}).values())
        sizes = format_size(model.get("size_bytes") or 0), format_memory(memory) if memory else ""
        counts = str(model.get("context") or ""), str(model.get("requests", ""))
        rows.append((model["name"], model.get("state", ""), *sizes, *counts, _describe_end(model)))
    print_columns(("name", "state", "size", "takes", "context", "requests", "until"), rows)


def list_served(client: ServerClient) -> list[dict[str, Any]]:
    """The models as `/admin/models` tells them; for a key that is no operator's, as `/v1/models` does."""
    try:
        return list(client.request("/admin/models")["models"])
    except (Forbidden, NotFound):
        return [
            {
                "name": entry["id"],
                "state": "ready" if entry.get("loaded", True) else "unloaded",
                "size_bytes": (entry.get("meta") or {}).get("size", 0),
                "context": entry.get("context_length", 0),
            }
            for entry in client.request("/v1/models")["data"]
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
    with ServerClient(url) as client:
        answer = client.request(f"/admin/models/{verb}", {"model": model.removesuffix(":latest")})
    memory = sum((answer.get("memory_bytes") or {}).values())
    shown = f", {format_memory(memory)} of memory" if memory and verb == "load" else ""
    echo(f"{answer['name']} is {answer['state']}{shown}")

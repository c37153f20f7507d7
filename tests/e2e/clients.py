"""What the tests of other people's clients share: silence towards the outside, questions, tools."""

from __future__ import annotations

import socket
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

# Clients that would report their use, fetch price lists or look for models elsewhere.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "*",
}


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-30, le=50)


WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "Weather",
        "description": "Tell the weather in a city.",
        "parameters": Weather.model_json_schema(),
    },
}


def only_loopback(patch: pytest.MonkeyPatch) -> None:
    """From now on a connection to anywhere but this machine fails the test."""
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def checked_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            assert address[0] in ("127.0.0.1", "::1"), f"a client calls {address}"
        connect(self, address)

    def checked_resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        assert host in ("127.0.0.1", "::1", "localhost", None), f"a client looks for {host}"
        return resolve(host, *arguments, **options)

    patch.setattr(socket.socket, "connect", checked_connect)
    patch.setattr(socket, "getaddrinfo", checked_resolve)
    for name, value in QUIET.items():
        patch.setenv(name, value)

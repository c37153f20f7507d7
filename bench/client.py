"""A plain client of cllm's own routes, for everything that is not under the stopwatch of `load`."""

from __future__ import annotations

import http.client
import json
from dataclasses import astuple, dataclass
from typing import Any

from bench.wire import Address

PATIENCE_S = 600.0
TRANSFERS = "cllm_kv_transfer_seconds_total"


class BadAnswer(Exception):
    """The server answered with something its contract does not allow."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the engine's steps spent their time, from the counters in `/metrics`."""

    steps: float
    total_s: float
    compute_s: float
    sample_s: float
    transfer_s: float = 0.0  # saving and restoring KV states

    @classmethod
    def read(cls, metrics: str) -> StepTime:
        """From the text of `/metrics`, summed over labels. Raises BadAnswer if there are no step counters."""
        totals: dict[str, float] = {}
        for line in metrics.splitlines():
            if line.startswith(("cllm_step", TRANSFERS)):
                sample, _, value = line.partition("#")[0].strip().rpartition(" ")
                name = sample.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        try:
            return cls(
                steps=totals["cllm_steps_total"],
                total_s=totals["cllm_step_seconds_total"],
                compute_s=totals["cllm_step_compute_seconds_total"],
                sample_s=totals["cllm_step_sample_seconds_total"],
                transfer_s=totals.get(TRANSFERS, 0.0),
            )
        except KeyError as error:
            raise BadAnswer(f"/metrics has no {error}") from error

    def since(self, earlier: StepTime) -> StepTime:
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return StepTime(*(now - then for now, then in pairs))

    @property
    def python_share(self) -> float:
        """The part of a step outside the native decode and KV transfers, sampling included."""
        return 1 - (self.compute_s + self.transfer_s) / self.total_s if self.total_s else 0.0

    @property
    def transfer_share(self) -> float:
        """The part of a step that saved and restored KV states."""
        return self.transfer_s / self.total_s if self.total_s else 0.0

    @property
    def sample_share(self) -> float:
        """The part of a step that sampled tokens."""
        return self.sample_s / self.total_s if self.total_s else 0.0


class PlainClient:
    """Requests to a server, on a connection each. May be used from several threads."""

    def __init__(self, address: Address, key: str = "") -> None:
        self._address = address
        self._key = {"authorization": f"Bearer {key}"} if key else {}

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by its name with its labels."""
        lines = self.fetch("GET", "/metrics").decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.fetch(method, path, body))

    def fetch(self, method: str, path: str, body: Any = None) -> bytes:
        """Raises BadAnswer for anything but 200: no request may fail here."""
        with self.open(method, path, body) as response:
            answer = response.read()
        if response.status != 200:
            raise BadAnswer(f"{path} was answered {response.status}: {answer[:300]!r}")
        return answer

    def open(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """A response whose connection ends with it. Raises BadAnswer where there is none."""
        connection = http.client.HTTPConnection(*self._address, timeout=PATIENCE_S)
        data = None if body is None else json.dumps(body)
        kind = {"content-type": "application/json"} if data else {}
        try:
            connection.request(method, path, data, {"connection": "close", **self._key, **kind})
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise BadAnswer(f"{method} {path}: {error!r}") from error


def generate(address: Address, prompt: str, max_tokens: int) -> dict[str, int]:
    """The work that one greedy answer of `POST /generate` took. Raises BadAnswer unless it is complete."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data: dict[str, Any] = PlainClient(address).call("POST", "/generate", body)["data"]
    if data["generated_tokens"] != max_tokens:
        raise BadAnswer(f"{data['generated_tokens']} tokens for {prompt!r}, max_tokens {max_tokens}")
    usage: dict[str, int] = data["usage"]
    return usage

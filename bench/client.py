"""A plain client of cllm's own routes, for everything that is not under the stopwatch of `load`."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any

import httpx

from bench.wire import Address

TRANSFERS = "cllm_kv_transfer_seconds_total"


class BadAnswer(Exception):
    """The server answered with something its contract does not allow."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A good answer of `POST /generate`; `elapsed_s` is the client's own time."""

    id: str
    text: str
    generated_tokens: int
    finish_reason: str
    usage: dict[str, int]
    elapsed_s: float


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


class CllmClient:
    """Keeps its connections. May be used from several threads. Close it."""

    def __init__(self, address: Address, timeout_s: float = 120.0) -> None:
        self._http = httpx.Client(base_url=address.url, trust_env=False, timeout=timeout_s)

    def __enter__(self) -> CllmClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def generate(self, prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> Answer:
        """One greedy generation. Raises BadAnswer unless it is complete and well formed."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": ignore_eos}
        start = time.perf_counter()
        answer = self._json("POST", "/generate", body)
        elapsed_s = time.perf_counter() - start
        data: dict[str, Any] = answer.get("data") or {}
        if answer.get("success") is not True:
            raise BadAnswer(f"no success for {prompt!r}: {answer}")
        reason = data.get("finish_reason")
        if reason not in ("stop", "length"):
            raise BadAnswer(f"finish_reason {reason!r} for {prompt!r}")
        minimum = 0 if reason == "stop" else 1  # a model may end at once: SmolLM2 knows no joke
        if (
            not minimum <= data.get("generated_tokens", -1) <= max_tokens
            or len(data.get("text", "")) < minimum
        ):
            raise BadAnswer(f"no text or a wrong count for {prompt!r}, max_tokens {max_tokens}: {data}")
        return Answer(
            id=data["id"],
            text=data["text"],
            generated_tokens=data["generated_tokens"],
            finish_reason=data["finish_reason"],
            usage=data.get("usage") or {},
            elapsed_s=elapsed_s,
        )

    def kv(self) -> dict[str, Any]:
        """`GET /debug/kv`."""
        return self._json("GET", "/debug/kv")

    def step_time(self) -> StepTime:
        """The step counters. Raises BadAnswer if they are not there."""
        return StepTime.read(self._request("GET", "/metrics").text)

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = self._request(method, path, body).json()
        return answer

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise BadAnswer(f"{method} {path}: {error!r}") from error
        if response.status_code != 200:
            raise BadAnswer(f"{method} {path}: status {response.status_code}: {response.text[:200]}")
        return response

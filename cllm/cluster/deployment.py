"""Deployment: a model's replicas as an application of Ray Serve. Imports Ray when used."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from cllm.cluster.directory import NO_RAY, describe_error, open_here, use_token
from cllm.cluster.link import FromReplica, Link, ReplicaAddress
from cllm.cluster.placer import ReplicaReport
from cllm.cluster.replica import Replica, ReplicaSettings
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ServerUnreachable, SetupError

# What Ray's processes are started with: see docs/scale.md.
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise, of engines, too: steps took up to a millisecond longer
}
HEALTH_S = 2.0
LOAD_S = 3.0  # to hear of a replica how it is
MAX_KV_USED = 0.6  # of all cells; beyond it, one more replica
KV_LEFT_FOR_FEWER = 0.3  # one less only where the others would have no more in use than this
SLOTS_LEFT_FOR_FEWER = 0.5  # likewise, of their slots


def connect(address: str) -> None:
    """Join the cluster as a driver; this machine must be one of it. Raises SetupError."""
    use_token()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError(NO_RAY) from None
    try:
        ray.init(address=address, namespace="cllm", log_to_driver=False, logging_level="error")
    except Exception as error:
        raise ServerUnreachable(
            f"no cluster at {address} ({describe_error(error)}): run this on one of its machines, after "
            "`cllm cluster head` or `cllm cluster join`"
        ) from None


def count_cpus() -> int:
    """Count the CPUs of the smallest machine."""
    import ray

    return int(min((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]), default=1))


def _import_serve() -> Any:
    """Import Serve, which sets up its log then: only warnings are for a terminal."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return serve


def deploy(
    settings: ReplicaSettings,
    prepare: Callable[[ReplicaSettings], EngineConfig],
    *,
    replicas: int,
    max_replicas: int,
    gpus: float,
) -> None:
    """Deploy a model's replicas, or change them one by one while the rest serves. Raises SetupError.

    Each takes CPUs for its threads. With more than `replicas` at most, they are scaled between both.
    """
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    serve = _import_serve()
    scaled: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas > replicas:
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas,
                max_replicas=max_replicas,
                policy=AutoscalingPolicy(policy_function="cllm.cluster.deployment:decide"),
                upscale_delay_s=0.0,
                downscale_delay_s=60.0,
                metrics_interval_s=1.0,
                look_back_period_s=3.0,
            )
        }
    encoded = msgspec.msgpack.encode(settings)
    deployment = serve.deployment(Replica).options(
        name="Replica",
        version=sha256(encoded).hexdigest()[:16],  # without it, each deployment replaces all replicas
        _internal=True,  # which allows a version
        ray_actor_options={"num_cpus": float(settings.engine.threads), "num_gpus": gpus},
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=2 * HEALTH_S,
        graceful_shutdown_timeout_s=settings.drain_s + 5.0,
        graceful_shutdown_wait_loop_s=0.1,
        **scaled,
    )
    serve.start(proxy_location="Disabled")
    app = deployment.bind(encoded, prepare, open_here)
    try:
        serve.run(app, name=settings.name, route_prefix=None)
    except Exception as error:
        raise SetupError(
            f"{settings.name} could not be deployed: {describe_failure(settings.name)}"
        ) from error


def count_replicas(
    now: int, kv_used: Collection[float], requests: float, waiting: float, slots: float
) -> int:
    """Count the replicas needed. `kv_used` is a share for each that reports, `slots` are those of each."""
    reporting = len(kv_used)
    if not reporting or slots <= 0:
        return now
    full = sum(kv_used) >= MAX_KV_USED * reporting
    if more := max(int(full), math.ceil(waiting / slots)):
        return max(now, reporting + more)
    fewer = reporting - 1
    if fewer > 0 and (
        sum(kv_used) <= KV_LEFT_FOR_FEWER * fewer and requests <= SLOTS_LEFT_FOR_FEWER * slots * fewer
    ):
        return min(now, fewer)
    return now


def decide(context: Any) -> tuple[int, dict[str, Any]]:
    """Decide on the number of replicas, by the KV memory in use and what waits for a slot.

    Serve calls this in its controller, by name, with the figures of `Replica.record_autoscaling_stats`, and
    applies the delays: none to add a replica, a minute of lower need before one is removed. Returns the
    number and the state that Serve keeps for the policy.
    """
    figures: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}

    def total(name: str) -> float:
        return sum(figures.get(name, {}).values())

    kv_used, slots = (tuple(figures.get(name, {}).values()) for name in ("kv_used", "slots"))
    needed = count_replicas(
        context.target_num_replicas, kv_used, total("requests"), total("waiting"), max(slots, default=0.0)
    )
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, needed)), context.policy_state


def describe_failure(name: str) -> str:
    """Return the error of Serve about a model's deployment."""
    app = _import_serve().status().applications.get(name)
    messages = [] if app is None else [app.message, *(each.message for each in app.deployments.values())]
    lines: list[str] = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it is not known why"])[-1][:300]


def remove(name: str) -> None:
    """End a model's replicas; they drain."""
    _import_serve().delete(name)


def list_deployments() -> dict[str, tuple[str, dict[str, int], str]]:
    """List by model the status, the count of replicas by state, and the message of Serve."""
    found = {}
    for name, app in _import_serve().status().applications.items():
        states: dict[str, int] = {}
        for each in app.deployments.values():
            states.update({str(state): count for state, count in each.replica_states.items() if count})
        found[name] = str(app.status.value), states, app.message
    return found


def list_nodes() -> list[dict[str, Any]]:
    """List the machines with address, `alive` and resources."""
    import ray

    return [
        {"address": node["NodeManagerAddress"], "alive": node["Alive"], **node["Resources"]}
        for node in ray.nodes()
    ]


async def ask_loads(addresses: Sequence[ReplicaAddress]) -> dict[str, ReplicaReport]:
    """Ask replicas for their load; those that do not answer are left out."""
    loop = asyncio.get_running_loop()

    async def ask(address: ReplicaAddress) -> ReplicaReport | None:
        found: asyncio.Future[ReplicaReport] = loop.create_future()

        def received(link: Link, message: object) -> None:
            if isinstance(message, ReplicaReport) and not found.done():
                found.set_result(message)

        link = Link(FromReplica, address.key, name="-status", received=received)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LOAD_S):
                await loop.create_connection(lambda: link, address.host, address.port)
                return await found
        link.abort()
        return None

    loads = await asyncio.gather(*map(ask, addresses))
    return {address.replica: load for address, load in zip(addresses, loads, strict=True) if load is not None}

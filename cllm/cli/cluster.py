"""`cllm cluster`: several machines as one: start a head, join it, deploy models, look, and end it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from cllm.cli.options import GroupedHelp, with_options
from cllm.cli.prepare import PrepareTask, finish
from cllm.cluster import deployment, directory
from cllm.cluster.directory import DEFAULT_PORT, RayDirectory, digest_model, name_deployment, split_address
from cllm.cluster.replica import ReplicaSettings
from cllm.config import Config, EngineConfig, PreparedModel
from cllm.errors import ConfigError, SetupError
from cllm.models.resolve import resolve
from cllm.workers.supervisor import WORKER_MODULE

cluster_app = typer.Typer(help="Several machines, on Ray Serve.", no_args_is_help=True, add_completion=False)
OBJECT_STORE_BYTES = 80 << 20  # Ray's least; nothing is kept there
Address = Annotated[
    str, Option("--cluster", help="The head: HOST[:PORT].", envvar="CLLM_CLUSTER", metavar="ADDRESS")
]
Cpus = Annotated[int, Option("--cpus", help="CPUs for replicas here. 0: all.", min=0)]
Gpus = Annotated[int, Option("--gpus", help="GPUs for replicas here. -1: all.", min=-1)]
Block = Annotated[bool, Option("--block", help="Stay in the foreground, for a service manager.")]
LOCAL = "127.0.0.1"


def make_token(path: Path) -> bool:
    """Make the token of the cluster. Return False if there is one already."""
    if path.is_file():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "x", opener=partial(os.open, mode=0o600)) as file:
        file.write(secrets.token_hex(32))
    return True


def token_path() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", directory.TOKEN_FILE)).expanduser()


def connect_to(cluster: str) -> str:
    """Connect to the head of a cluster; returns its HOST:PORT."""
    address = directory.check_head(cluster)  # Ray would wait for it
    deployment.connect(address)
    return address


def run_ray(arguments: Sequence[str], **variables: str) -> None:
    """Run Ray's command, beside this Python, with our settings. Raises SetupError with what it said last."""
    program = shutil.which("ray", path=str(Path(sys.executable).parent)) or shutil.which("ray")
    if program is None:
        raise ConfigError(directory.NO_RAY)
    environment = {**deployment.SETTINGS, "RAY_AUTH_TOKEN_PATH": str(token_path()), **os.environ, **variables}
    output, errors = (None, None) if "--block" in arguments else (subprocess.PIPE, subprocess.STDOUT)
    command, nothing = [program, *arguments], subprocess.DEVNULL
    done = subprocess.run(command, env=environment, stdin=nothing, stdout=output, stderr=errors, text=True)
    if done.returncode:
        lines = [line for line in (done.stdout or "").splitlines() if line.strip()]
        raise SetupError(f"ray {arguments[0]} failed: {lines[-1] if lines else done.returncode}")


def make_start(cpus: int, gpus: int, block: bool) -> list[str]:
    """The arguments of `ray start` that a head and other machines share."""
    arguments = ["start", "--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    arguments += [f"--num-cpus={cpus}"] if cpus else []
    arguments += [f"--num-gpus={gpus}"] if gpus >= 0 else []
    return arguments + (["--block"] if block else [])


@cluster_app.command("head")
def head_command(
    port: Annotated[int, Option("--port", help="Port of the head.", min=1, max=65535)] = DEFAULT_PORT,
    address: Annotated[str, Option("--node-ip", help="Its address for other machines.", metavar="IP")] = "",
    storage: Annotated[
        Path, Option("--storage", help="Folder of the cluster's state, on a disk of this machine.")
    ] = Path("~/.cache/cllm/cluster"),
    cpus: Cpus = 0,
    gpus: Gpus = -1,
    block: Block = False,
) -> None:
    """Start the head of a cluster on this machine; it is a machine of it, too."""
    folder = storage.expanduser()
    token = token_path()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = "RAY_AUTH_TOKEN" not in os.environ and make_token(token)
    except OSError as error:
        raise SetupError(str(error)) from None
    typer.echo(
        f"the token of the cluster is {'new, ' if made else ''}in {token} (mode 0600): copy it to the "
        "same place on each other machine, also of gateways, as with scp"
    )
    typer.echo(f"on other machines: cllm cluster join {address or 'THIS-HOST'}:{port}")
    arguments = [*make_start(cpus, gpus, block), "--head", f"--port={port}", "--include-dashboard=false"]
    arguments += [f"--node-ip-address={address}"] if address else []
    run_ray(arguments, RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(folder))
    if not block:
        typer.echo(f"the head runs; deploy a model: cllm cluster deploy MODEL --cluster {LOCAL}:{port}")


@cluster_app.command("join")
def join_command(
    head: Annotated[str, Argument(help="The head: HOST or HOST:PORT.")],
    cpus: Cpus = 0,
    gpus: Gpus = -1,
    block: Block = False,
) -> None:
    """Make this machine one of a cluster."""
    host, port = split_address(head)
    token = token_path()
    if "RAY_AUTH_TOKEN" not in os.environ and not token.is_file():
        raise ConfigError(f"there is no cluster token in {token}: copy it from the machine of the head")
    run_ray([*make_start(cpus, gpus, block), f"--address={host}:{port}"])
    typer.echo(f"this machine is part of the cluster at {host}:{port}")


@cluster_app.command("deploy", cls=GroupedHelp)
@with_options(EngineConfig)
def deploy_command(
    config: Config,
    cluster: Address = LOCAL,
    replicas: Annotated[
        int, Option("--replicas", "--min", help="Replicas, at least.", min=1, metavar="N")
    ] = 1,
    most: Annotated[int, Option("--max", help="Scale up to N replicas. 0: never.", min=0, metavar="N")] = 0,
    gpus: Annotated[float, Option("--gpus", help="GPUs of each replica.", min=0, metavar="N")] = 0.0,
    drain_s: Annotated[
        float, Option("--drain-s", help="Seconds for its requests when a replica ends.", min=0, metavar="N")
    ] = 30.0,
) -> None:
    """Have replicas of a model computed by a cluster, or change them while the others serve."""
    address, engine = connect_to(cluster), config.engine
    if not engine.threads:
        engine = msgspec.structs.replace(engine, threads=2 if gpus else deployment.count_cpus())
    settings = make_settings(engine, drain_s)
    deployment.deploy(settings, prepare_replica, replicas=replicas, max_replicas=most, gpus=gpus)
    typer.echo(f"{settings.name} is deployed; serve it: cllm serve {config.engine.model} --cluster {address}")


def make_settings(engine: EngineConfig, drain_s: float) -> ReplicaSettings:
    """Make the settings of each replica. The scripted model of the tests has no file."""
    if module := os.environ.get("CLLM_CLUSTER_WORKER", ""):
        return ReplicaSettings(name="scripted", engine=engine, module=module, drain_s=drain_s)
    path = resolve(engine.model, offline=engine.offline)
    if Path(engine.model).expanduser().is_file():  # other machines have no folder of that name to begin at
        engine = msgspec.structs.replace(engine, model=str(path.resolve()))
    name, digest = name_deployment(engine, path), digest_model(path)
    return ReplicaSettings(name=name, engine=engine, digest=digest, drain_s=drain_s)


def prepare_replica(settings: ReplicaSettings) -> EngineConfig:
    """On the machine of a replica: settings that are ready to be loaded. Raises SetupError."""
    if settings.module != WORKER_MODULE:
        return settings.engine
    task = PrepareTask(asked=settings.engine, log_level=settings.log_level, beside=True)
    ready = finish(task.start(), PreparedModel).config
    # The embedded model may be served as a copy: what was deployed is the shipped file.
    path = Path(ready.model) if settings.engine.model else resolve("")
    if digest_model(path) != settings.digest:
        raise ConfigError(f"the file of {settings.name} on this machine is another one than was deployed")
    return ready


@cluster_app.command("status")
def status_command(cluster: Address = LOCAL) -> None:
    """Show the machines of a cluster, its models, and the KV and queue of each replica."""
    console = Console(highlight=False)
    directory = RayDirectory(connect_to(cluster))
    nodes = Table("machine", "state", "CPUs", "GPUs", box=None)
    for node in deployment.list_nodes():
        state = "alive" if node["alive"] else "gone"
        nodes.add_row(node["address"], state, f"{node.get('CPU', 0):.0f}", f"{node.get('GPU', 0):.0f}")
    console.print(nodes)
    for name, (state, counts, message) in deployment.list_deployments().items():
        listed = ", ".join(f"{count} {kind.lower()}" for kind, count in counts.items())
        console.print(f"\n{name}: {state.lower()} ({listed or 'no replica'}) {message}".rstrip())
        addresses = directory.list(name)
        loads = asyncio.run(deployment.ask_loads(addresses))
        table = Table("replica", "machine", "requests", "slots", "KV cells in use", "gateways", box=None)
        for each in addresses:
            if (load := loads.get(each.replica)) is None:
                table.add_row(each.replica, each.host, "does not answer")
                continue
            cells = f"{load.cells_used} of {load.cells}"
            requests, slots = len(load.requests), load.speed.slots
            table.add_row(each.replica, each.host, f"{requests}", f"{slots}", cells, f"{len(load.gateways)}")
        console.print(table)


@cluster_app.command("down")
def down_command(
    model: Annotated[str, Argument(help="Only this model; without it, all that runs on this machine.")] = "",
    cluster: Address = LOCAL,
) -> None:
    """End a model's replicas, which drain; or end the cluster's processes on this machine."""
    if model:
        connect_to(cluster)
        if model not in (known := deployment.list_deployments()):
            raise ConfigError(f"there is no model {model} in the cluster: {', '.join(known)}")
        deployment.remove(model)
    else:
        run_ray(["stop", "--grace-period", "10"])
    typer.echo(f"{model} has ended" if model else "nothing of the cluster is left on this machine")

"""Directory: the replicas of each model by name, in the key-value store of Ray's head. Imports Ray when used.

A model has the same name and digest on all machines of a cluster.

A gateway reads it with a client of the head alone. So its machine needs no Ray node, and Ray's way to end
every process of a cluster whose head is gone does not reach the gateway.
"""

from __future__ import annotations

import contextlib
import os
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cllm.cluster.link import ReplicaAddress
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ServerUnreachable

NAMESPACE = b"cllm"
CALL_S = 2.0
DEFAULT_PORT = 6379
TOKEN_FILE = "~/.config/cllm/cluster-token"
NO_RAY = "Ray is not installed: pip install 'ray[serve]>=2.60,<2.61'"


def name_deployment(engine: EngineConfig, path: Path) -> str:
    """Name a model in a cluster: by its first alias, or its file."""
    return next(iter(engine.names), path.stem).replace("/", "-")


def digest_model(path: Path) -> str:
    """Hash the header and the tensor list of each part, and their sizes, not the weights.

    Raises ModelFileError.
    """
    from cllm.backend.llama.gguf import GgufHeader  # which a gateway's cluster worker does without

    digest = sha256()
    for part in GgufHeader(path).parts:
        digest.update(f"{part.path.stat().st_size} ".encode())
        with part.path.open("rb") as file:
            digest.update(file.read(part.header_bytes))
    return digest.hexdigest()[:32]


def describe_error(error: Exception) -> str:
    """Return the first line of an error of Ray's, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def use_token() -> None:
    """Let Ray take the cluster's token where none is set: from the file of `cllm cluster head`."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(TOKEN_FILE).expanduser())
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    if os.environ["RAY_AUTH_MODE"] == "token" and path and not Path(path).is_file():
        raise ConfigError(f"there is no cluster token in {path}: copy it from the machine of the head")


def split_address(address: str) -> tuple[str, int]:
    """Split the address of a head into host and port. Raises ConfigError."""
    host, _, port = address.partition(":")
    if not host or (port and not port.isdigit()):
        raise ConfigError(f"--cluster takes HOST or HOST:PORT of a head, not {address[:100]!r}")
    return host, int(port or DEFAULT_PORT)


def check_head(address: str) -> str:
    """Return the address of a head as numbers, if something listens there. Raises SetupError."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), CALL_S) as connection:
            found = connection.getpeername()
    except OSError as error:
        raise ServerUnreachable(
            f"no head answers at {host}:{port} ({error.strerror or error}): "
            "start one with `cllm cluster head`"
        ) from None
    return f"{found[0]}:{found[1]}"


def open_here() -> tuple[RayDirectory, str]:
    """Open the directory of the cluster that this process is part of; also the address of its machine."""
    import ray

    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    return RayDirectory(context.gcs_address), here["NodeManagerAddress"]


class Directory(Protocol):
    """The replicas of a cluster: each enters itself, gateways find them there."""

    def put(self, model: str, address: ReplicaAddress) -> None: ...

    def remove(self, model: str, replica: str) -> None: ...

    def list(self, model: str) -> list[ReplicaAddress]: ...


class RayDirectory:
    """Reads and writes entries. Threads may share it."""

    def __init__(self, address: str) -> None:
        """`address` is the head's, as host:port. Connects at the first call."""
        self._host, self._port = split_address(address)
        self._client: Any = None

    def _call(self, name: str, *arguments: object) -> Any:
        """Call the store. Raises ServerUnreachable, also where the token is wrong.

        The head is tried first: Ray's own client would wait for it, and end the process.
        """
        client, self._client = self._client, None
        address = check_head(f"{self._host}:{self._port}")
        if client is None:
            try:
                from ray._raylet import GcsClient
            except ImportError:
                raise ConfigError(NO_RAY) from None
            client = GcsClient(address=address)
        try:
            answer = getattr(client, name)(*arguments, NAMESPACE, CALL_S)
        except Exception as error:  # of Ray: many kinds
            reason = describe_error(error)
            raise ServerUnreachable(f"the head at {self._host}:{self._port} refuses: {reason}") from None
        self._client = client
        return answer

    def put(self, model: str, address: ReplicaAddress) -> None:
        key = f"{model}/{address.replica}".encode()
        self._call("internal_kv_put", key, msgspec.msgpack.encode(address), True)

    def remove(self, model: str, replica: str) -> None:
        self._call("internal_kv_del", f"{model}/{replica}".encode(), False)

    def list(self, model: str) -> list[ReplicaAddress]:
        """List the replicas of a model, with those that are gone and not removed yet."""
        keys = self._call("internal_kv_keys", f"{model}/".encode())
        found = []
        for key in keys:
            entry = self._call("internal_kv_get", key)
            with contextlib.suppress(msgspec.MsgspecError):  # of another version
                if entry is not None:
                    found.append(msgspec.msgpack.decode(entry, type=ReplicaAddress))
        return found

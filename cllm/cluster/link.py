"""Link: the connection of a gateway to a replica. Messages over TCP, opened by both sides with a shared key.

The messages are those between a server and its engine worker: a replica is an engine at a distance. Ray could
carry them: a prototype's streams through Serve added 200 µs of a core to each token, and 12 ms to the first
of 8 streams. Frames of whole steps add 66 µs and 8 ms, and the end of a process shows at once as the end of
its connection.

The key comes through Ray, whose calls need the cluster's token. It lets only gateways in. What is sent is not
encrypted: a cluster belongs into a trusted network (SECURITY.md).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from typing import cast

import msgspec

from cllm import messages
from cllm.cluster.placer import ReplicaReport
from cllm.workers.channel import FrameBuffer, pack_frame

HANDSHAKE_S = 3.0
MAX_HANDSHAKE_BYTES = 1024
MAX_UNREAD_BYTES = 64 << 20  # a gateway that leaves more unread is taken for gone
_NONCE = 32


class ReplicaAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a replica, with the key to it, and its model."""

    replica: str
    host: str
    port: int
    key: bytes
    version: str  # of cllm
    digest: str  # of the model's file


class Draining(msgspec.Struct, frozen=True, tag=True):
    """The replica will end: it finishes what it has, and takes nothing new."""


ToReplica = messages.Submit | messages.Cancel | messages.Inspect | messages.ClearCache
_OfEngine = messages.StepReport | messages.Inspection | messages.CacheDone | messages.Ready | messages.Died
FromReplica = _OfEngine | messages.Heartbeat | ReplicaReport | Draining

_encoder = msgspec.msgpack.Encoder()


class Link(asyncio.Protocol):
    """One end. `opened` is called after the handshake, `received` for each message, `lost` at the end."""

    def __init__(
        self,
        kind: object,
        key: bytes,
        *,
        received: Callable[[Link, object], None],
        opened: Callable[[Link, str], None] = lambda link, name: None,
        lost: Callable[[Link], None] = lambda link: None,
        name: str = "",
    ) -> None:
        """`kind` is the type of what is received. With a `name` it is a gateway's end, which goes first."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._key, self._name = key, name.encode()
        self._opened, self._received, self._lost = opened, received, lost
        self._buffer = FrameBuffer()
        self._nonce = secrets.token_bytes(_NONCE)
        self._asked: bytes | None = None  # a gateway: the nonce of the replica
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle  # of the handshake
        self.open = False
        self.heard = 0.0  # when something came (loop time)

    # As a protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self._transport, self._loop = cast(asyncio.Transport, transport), loop
        self._limit = loop.call_later(HANDSHAKE_S, self.close)
        self.heard = loop.time()
        if not self._name:  # a replica: it asks first
            self._transport.write(pack_frame(self._nonce))

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        self._buffer += data
        try:
            while (frame := self._buffer.take()) is not None:
                if self.open:
                    self._received(self, self._decoder.decode(frame))
                else:
                    self._shake_hands(frame)
        except (msgspec.MsgspecError, ValueError):
            self.abort()
        if not self.open and len(self._buffer) > MAX_HANDSHAKE_BYTES:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        self._transport, self.open = None, False
        self._lost(self)

    # The handshake: nonces cross, and each side shows that it has the key ----------------------------------

    def _shake_hands(self, frame: bytes) -> None:
        """Raises ValueError for a wrong answer."""
        assert self._transport is not None
        name = ""
        if self._name and self._asked is None:  # a gateway, and what it is asked
            self._asked = frame
            proof = self._prove(b"gateway", frame, self._nonce)
            self._transport.write(pack_frame(self._nonce + proof + self._name))
            return
        if self._asked is not None:
            if not hmac.compare_digest(frame, self._prove(b"replica", self._asked, self._nonce)):
                raise ValueError("the replica does not have the key")
        else:
            nonce, proof, name = frame[:_NONCE], frame[_NONCE : 2 * _NONCE], frame[2 * _NONCE :].decode()
            if not hmac.compare_digest(proof, self._prove(b"gateway", self._nonce, nonce)):
                raise ValueError("the gateway does not have the key")
            self._transport.write(pack_frame(self._prove(b"replica", self._nonce, nonce)))
        self.open = True
        self._limit.cancel()
        self._opened(self, name)

    def _prove(self, side: bytes, replica: bytes, gateway: bytes) -> bytes:
        return hmac.digest(self._key, side + replica + gateway, "sha256")

    # Messages ---------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct) -> None:
        """Send without waiting. One that has ended drops it."""
        if self._transport is None:
            return
        self._transport.write(pack_frame(_encoder.encode(message)))
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it now, whatever the other side has not read."""
        if self._transport is not None:
            self._transport.abort()

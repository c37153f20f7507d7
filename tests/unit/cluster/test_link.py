"""The link between gateway and replica: only with the key, and messages as they were sent."""

from __future__ import annotations

import asyncio

import pytest

from cllm.cluster import link as link_module
from cllm.cluster.link import Draining, FromReplica, Link, ToReplica
from cllm.messages import Cancel

KEY = b"k" * 32


class End:
    """One end, and what it saw."""

    def __init__(self, kind: object, key: bytes, name: str = "") -> None:
        self.opened: list[str] = []
        self.received: list[object] = []
        self.lost = asyncio.Event()
        self.link = Link(
            kind,
            key,
            name=name,
            opened=lambda _, other: self.opened.append(other),
            received=lambda _, message: self.received.append(message),
            lost=lambda _: self.lost.set(),
        )


async def connect(key: bytes) -> tuple[End, End]:
    loop = asyncio.get_running_loop()
    replica, gateway = End(ToReplica, KEY), End(FromReplica, key, "gate")
    server = await loop.create_server(lambda: replica.link, "127.0.0.1", 0)
    await loop.create_connection(lambda: gateway.link, *server.sockets[0].getsockname())
    server.close()
    return replica, gateway


async def settle(what: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(10):
        await (what.wait() if what is not None else asyncio.sleep(0.1))


async def test_messages_cross_after_the_handshake() -> None:
    replica, gateway = await connect(KEY)
    await settle()
    assert replica.opened == ["gate"] and gateway.opened == [""]
    gateway.link.send(Cancel("r"))
    replica.link.send(Draining())
    await settle()
    assert replica.received == [Cancel("r")] and gateway.received == [Draining()]
    gateway.link.abort()
    await settle(replica.lost)


async def test_without_the_key_nothing_opens() -> None:
    replica, gateway = await connect(b"other")
    await settle(replica.lost)
    await settle(gateway.lost)
    assert replica.opened == gateway.opened == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 100, b"\x04\x00\x00\x00oops", b""])
async def test_what_is_no_gateway_is_ended(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.3)
    replica = End(ToReplica, KEY)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: replica.link, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(data)
    await settle(replica.lost)
    assert replica.opened == []
    writer.close()
    server.close()


async def test_a_message_that_cannot_be_decoded_ends_the_link() -> None:
    replica, gateway = await connect(KEY)
    await settle()
    gateway.link.send(Draining())  # a replica is never sent that
    await settle(replica.lost)

"""Large bodies are read one after the other, and a slow client holds up no other."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.flow_control import FlowControl

from cllm.server.connection import ReadTurns


class Client:
    """A connection whose `pieces` have all arrived, and what is read of them in each turn of the loop."""

    def __init__(self, name: str, pieces: int, log: list[str], *, gone: bool = False) -> None:
        self.name, self.pieces, self.log, self.gone = name, pieces, log, gone
        self.read = 0
        self.flow = FlowControl(cast(asyncio.Transport, self))

    def arrive(self, turns: ReadTurns) -> None:
        self.turns = turns
        self.resume_reading()

    def resume_reading(self) -> None:
        """As the loop does: reads what is there until it is paused."""
        assert not self.gone, "it is closed"
        if self.read == self.pieces:
            return
        self.log.append(self.name)
        self.read += 1
        loop, transport = asyncio.get_running_loop(), cast(asyncio.Transport, self)
        self.turns.wait(loop, transport, self.flow, first=self.read == 1)

    def pause_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.gone


def read(*clients: Client) -> None:
    async def scenario() -> None:
        turns = ReadTurns()
        for client in clients:
            client.arrive(turns)
        for _ in range(50):
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_bodies_that_have_arrived_are_read_one_after_the_other() -> None:
    log: list[str] = []
    read(Client("a", 3, log), Client("b", 3, log), Client("c", 2, log))
    assert log == [*"abc", *"aa", *"bb", *"c"]


def test_a_body_that_stops_arriving_holds_up_no_other() -> None:
    log: list[str] = []
    read(Client("slow", 1, log), Client("b", 3, log))
    assert log == ["slow", "b", "b", "b"]


def test_a_client_that_has_left_is_passed_over() -> None:
    log: list[str] = []
    gone = Client("gone", 9, log)

    async def scenario() -> None:
        turns = ReadTurns()
        gone.arrive(turns)
        Client("b", 2, log).arrive(turns)
        gone.gone = True
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert log == ["gone", "b", "b"]

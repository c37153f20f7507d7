"""LoRA adapters by name: those loaded at run time share a limit, and the least recently used goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from cllm.adapters import Adapter, join_key
from cllm.errors import AdapterBusy
from cllm.frontend.engine_adapters import EngineAdapters
from cllm.messages import Command, LoadAdapter, UnloadAdapter
from cllm.types import Prompt

SIZE = 100


class Engine:
    """Loads whatever it is asked to; `prompts` are of its requests."""

    def __init__(self, max_bytes: int = 3 * SIZE) -> None:
        self.prompts: list[Prompt] = []
        self.loaded: set[str] = set()
        self.adapters = EngineAdapters(self.call, lambda: self.prompts)
        self.adapters.max_bytes = max_bytes

    def call(self, make: Callable[[int], Command]) -> Future[Any]:
        command, done = make(1), Future[Any]()
        assert isinstance(command, LoadAdapter | UnloadAdapter)
        digest = command.adapter.file
        (self.loaded.add if isinstance(command, LoadAdapter) else self.loaded.remove)(digest)
        done.set_result(replace(command.adapter, digest=digest, size=SIZE))
        return done

    def add(self, *names: str) -> None:
        for name in names:
            asyncio.run(self.adapters.add(Adapter(name=name, file=name)))

    def use(self, name: str) -> None:
        key = self.adapters.choose({name: 1.0})
        self.prompts.append(Prompt((1,), adapter=key))


def test_the_least_recently_used_adapter_is_unloaded_first() -> None:
    engine = Engine()
    engine.add("a", "b", "c")
    engine.adapters.choose({"a": 1.0})
    engine.add("d", "e")
    assert engine.loaded == {"a", "d", "e"} and engine.adapters.added_bytes == 3 * SIZE
    assert "b" not in engine.adapters and "c" not in engine.adapters


def test_adapters_in_use_and_of_the_settings_are_never_evicted() -> None:
    engine = Engine(max_bytes=2 * SIZE)
    asyncio.run(engine.adapters.load_all(["kept=k"]))
    engine.add("a", "b")
    engine.use("a")
    engine.adapters.scales["b"] = 0.5
    with pytest.raises(
        AdapterBusy, match=r"adapter c: it takes 100 bytes, and --adapter-mb 0 leaves no room"
    ):
        engine.add("c")
    assert engine.loaded == {"k", "a", "b"} and "c" not in engine.adapters
    engine.adapters.scales.clear()
    engine.add("c")
    assert engine.loaded == {"k", "a", "c"}


def test_one_file_under_two_names_counts_once() -> None:
    engine = Engine(max_bytes=SIZE)
    for name in ("a", "b"):
        asyncio.run(engine.adapters.add(Adapter(name=name, file="same")))
    assert engine.adapters.added_bytes == SIZE and engine.loaded == {"same"}
    assert engine.adapters.choose({"a": 1.0}) == join_key([("same", 1.0)])


def test_a_new_engine_has_the_limit_and_the_order_of_the_last() -> None:
    old, new = Engine(), Engine()
    old.add("a", "b", "c")
    old.adapters.choose({"a": 1.0})
    new.adapters.take_over(old.adapters)
    new.adapters.restore()
    new.add("d")
    assert new.loaded == {"a", "c", "d"}

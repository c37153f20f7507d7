"""The LoRA adapters of an engine by name: loaded, unloaded, and chosen for requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec.structs import replace

from cllm.adapters import Adapter, find_invocation, join_key, parse_adapter, split_key
from cllm.errors import AdapterBusy, AdapterRefused, InvalidRequest, ModelNotFound
from cllm.messages import Command, LoadAdapter, UnloadAdapter
from cllm.types import Prompt, Request

log = logging.getLogger(__name__)
Call = Callable[[Callable[[int], Command]], "Future[Any]"]


class EngineAdapters:
    """Names are of the clients, digests of the engine. A new engine gets the adapters of the last one.

    Those that are loaded at run time take `max_bytes` at most: the least recently used goes, if no request
    needs it. The id of an adapter, as llama-server counts, is its place in `loaded`.
    """

    def __init__(self, call: Call, prompts: Callable[[], Iterable[Prompt]]) -> None:
        """`call` sends a command to the engine; `prompts` are those of its requests."""
        self._call, self._prompts = call, prompts
        self._by_name: dict[str, Adapter] = {}  # without a digest while it is loaded
        self.scales: dict[str, float] = {}  # by name, for requests that name no adapter
        self._added: dict[str, None] = {}  # names loaded at run time, the least recently used first
        self.max_bytes = 1 << 62  # of these

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return tuple(adapter for adapter in self._by_name.values() if adapter.digest)

    @property
    def added_bytes(self) -> int:
        """Bytes of those that were loaded at run time."""
        added = (self._by_name[name] for name in self._added)
        return sum({adapter.digest: adapter.size for adapter in added}.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name and bool(self._by_name[name].digest)

    def get(self, name: str) -> Adapter:
        """The loaded adapter of a name. Raises ModelNotFound."""
        if name not in self:
            listed = ", ".join(adapter.name for adapter in self.loaded) or "none"
            raise ModelNotFound(f"no adapter {name[:64]!r} is loaded here; those that are: {listed}")
        return self._by_name[name]

    async def add(self, adapter: Adapter) -> Adapter:
        """Load an adapter at run time, and unload others for it. Raises AdapterRefused, AdapterBusy."""
        added = await self.load(adapter)
        self._added[added.name] = None
        while self.added_bytes > self.max_bytes:
            idle = (name for name in self._added if not self._count_users(name) and not self.scales.get(name))
            name = next(idle, added.name)
            await self.unload(name)
            if name == added.name:
                limit = f"it takes {added.size} bytes, and --adapter-mb {self.max_bytes >> 20} leaves no room"
                raise AdapterBusy(f"adapter {name}: {limit} beside those in use; try again, or raise it")
            log.info("adapter %s is unloaded for %s: it was the least recently used", name, added.name)
        return added

    async def load(self, adapter: Adapter) -> Adapter:
        """Load an adapter under its name. Raises AdapterRefused; AdapterBusy where the name is taken."""
        if (name := adapter.name) in self._by_name:
            raise AdapterBusy(f"there is an adapter {name}: unload it first, or choose another name")
        self._by_name[name] = replace(adapter, digest="")
        try:
            loaded: Adapter = await asyncio.wrap_future(self._call(partial(LoadAdapter, adapter=adapter)))
        except BaseException:
            del self._by_name[name]
            raise
        self._by_name[name] = loaded
        return loaded

    async def load_all(self, settings: Iterable[str], *, apply: bool = False) -> None:
        """Load what the configuration names; with `apply` for requests that name none, too."""
        for text in settings:
            adapter = await self.load(parse_adapter(text))
            if apply:
                self.scales[adapter.name] = adapter.scale

    async def unload(self, name: str) -> Adapter:
        """Free an adapter. Raises AdapterBusy while requests need it, ModelNotFound."""
        adapter = self.get(name)
        if used := self._count_users(name):
            raise AdapterBusy(f"adapter {name} has {used} requests; try again when they have ended")
        self._forget(name)
        if all(other.digest != adapter.digest for other in self._by_name.values()):
            await asyncio.wrap_future(self._call(lambda each: UnloadAdapter(each, adapter)))
        return adapter

    def take_over(self, other: EngineAdapters) -> None:
        """Have what another engine has; `restore` loads it."""
        self._by_name = {adapter.name: adapter for adapter in other.loaded}
        self.scales, self._added, self.max_bytes = dict(other.scales), dict(other._added), other.max_bytes

    def restore(self) -> None:
        """Load all of them into a new engine, before any request; one whose file has changed is gone."""
        for adapter in self.loaded:
            loading = self._call(partial(LoadAdapter, adapter=adapter))
            loading.add_done_callback(partial(self._lose, adapter.name))

    def _lose(self, name: str, done: Future[Any]) -> None:
        if not done.cancelled() and isinstance(error := done.exception(), AdapterRefused):
            log.error("it is not loaded any more: %s", error)
            self._forget(name)

    def _forget(self, name: str) -> None:
        for known in (self._by_name, self._added, self.scales):
            known.pop(name, None)

    def _count_users(self, name: str) -> int:
        digest = self._by_name[name].digest
        return sum(digest in split_key(prompt.adapter) for prompt in self._prompts())

    # Requests ----------------------------------------------------------------------------------------

    def choose(self, scales: Mapping[str, float] | None = None) -> str:
        """Key of the set with these scales by name, or of that which is set for all. Raises ModelNotFound."""
        chosen = self.scales if scales is None else scales
        for name in self._added.keys() & chosen.keys():
            self._added[name] = self._added.pop(name)  # the most recently used
        return join_key({self.get(name).digest: scale for name, scale in chosen.items()}.items())

    def choose_by_id(self, scales: Mapping[int, float]) -> dict[str, float]:
        """Scales by name, of those by id. Raises InvalidRequest."""
        loaded = self.loaded
        if unknown := [number for number in scales if not 0 <= number < len(loaded)]:
            message = f"lora: there is no adapter {unknown[0]}: GET /lora-adapters lists them"
            raise InvalidRequest(message, "lora")
        return {loaded[number].name: scale for number, scale in scales.items()}

    def apply(self, request: Request) -> Request:
        """Compute its prompt with the adapters that it names: with an aLoRA from the invocation on.

        Without an invocation the base computes all of it. Raises AdapterRefused, InvalidRequest.
        """
        if not (digests := split_key(request.adapter).keys()):
            return request
        known = {adapter.digest: adapter for adapter in self.loaded}
        if not digests <= known.keys():
            raise AdapterRefused("the adapter of this request is not loaded any more")
        begin: int | None = 0
        if any(known[digest].invocation for digest in digests):
            if len(digests) > 1:
                raise InvalidRequest("lora: an aLoRA is used alone, without other adapters", "lora")
            begin = find_invocation(request.prompt.items, known[next(iter(digests))].invocation)
        if begin is None:
            return request
        return replace(request, prompt=replace(request.prompt, adapter=request.adapter, adapter_from=begin))

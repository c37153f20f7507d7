"""The threads that compute for contexts: persistent pools, as many threads as there are cores free."""

from __future__ import annotations

import ctypes
from typing import Any

from cllm.backend.llama.library import Library, ThreadpoolParams
from cllm.backend.llama.ownership import Graveyard, Owned
from cllm.backend.llama.threads import ThreadGovernor, default_threads
from cllm.config import EngineConfig


class Threadpool(Owned):
    """Persistent ggml workers. Without one, ggml starts and joins threads at every decode."""

    def __init__(self, library: Library, threads: int, poll: int, graveyard: Graveyard) -> None:
        params = ThreadpoolParams()
        library.threadpool_params(ctypes.byref(params), threads)
        params.poll = poll
        super().__init__(library.threadpool_new(ctypes.byref(params)), library.threadpool_free, graveyard)


class Workers:
    """Work for one context at a time. Close them after every context they work for."""

    def __init__(self, library: Library, config: EngineConfig, graveyard: Graveyard) -> None:
        self._library = library
        self._poll = config.poll
        self._graveyard = graveyard
        cores = default_threads()
        self.threads = config.threads or min(config.max_threads or cores, cores)
        # A number that was asked for is kept; our own default makes room for neighbours.
        self.governor = None if config.threads else ThreadGovernor(self.threads, cores)
        self._pools: dict[int, Threadpool] = {}
        self._attached: dict[Any, int] = {}  # by context: how many threads work for it

    def work_for(self, context: Any) -> None:
        """Called before each decode. Pools are swapped: one with idle workers would have them spin."""
        if self.governor is not None:
            self.threads = self.governor.look()
        if self._attached.get(context) == self.threads:
            return
        pool = self._pools.get(self.threads)
        if pool is None:
            pool = Threadpool(self._library, self.threads, self._poll, self._graveyard)
            self._pools[self.threads] = pool
        self._library.attach_threadpool(context, pool.pointer, pool.pointer)
        self._library.api.llama_set_n_threads(context, self.threads, self.threads)
        self._attached[context] = self.threads

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

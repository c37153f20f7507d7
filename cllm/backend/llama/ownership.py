"""Law 9: native resources have owners, and only the owner thread frees."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Self

Burial = tuple[Callable[[Any], Any], Any]


class Graveyard:
    """Pointers whose Python owner was garbage-collected; the owner thread frees them between steps."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Burial] = SimpleQueue()

    def put(self, free: Callable[[Any], Any], pointer: Any) -> None:
        """Safe from any thread, and from a finaliser."""
        self._queue.put((free, pointer))

    def bury(self) -> None:
        """Free what has come in. Owner thread only."""
        while not self._queue.empty():  # nobody else takes out of it
            free, pointer = self._queue.get()
            free(pointer)


class Owned:
    """One native pointer. `close` frees it; forgotten, it goes to the graveyard, never freed in place."""

    def __init__(self, pointer: Any, free: Callable[[Any], Any], graveyard: Graveyard) -> None:
        assert pointer, "a native constructor returned NULL"
        self._pointer = pointer
        self._free = free
        self._finalizer = weakref.finalize(self, graveyard.put, free, pointer)
        self._finalizer.atexit = False  # the process is going: the system takes everything back

    @property
    def pointer(self) -> Any:
        assert self._pointer is not None, "use of a native resource that was freed"
        return self._pointer

    def close(self) -> None:
        """Free it now. Owner thread only; idempotent."""
        if self._finalizer.detach() is not None:
            pointer, self._pointer = self._pointer, None
            self._free(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Grammars compiled beside the loop, so that a heavy one holds up nobody but its own request."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from cllm.text.constraint import Constraint, ConstraintCompiler
from cllm.types import ConstraintSpec, Vocabulary


class ConstraintShop:
    """One thread that compiles. It touches the vocabulary (read-only) and nothing else that is native."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="cllm-grammars")

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        return ConstraintCompiler(self._vocabulary)  # takes half a second: only where it is needed

    def submit(self, spec: ConstraintSpec) -> Future[Constraint]:
        """A fresh constraint, some time soon; fails with InvalidRequest."""
        return self._thread.submit(lambda: self._compiler.compile(spec))

"""Grammars, compiled beside the loop so that a heavy one holds up nobody but its own request; and masks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from cllm.errors import InvalidRequest
from cllm.text.constraint import Constraint, ConstraintCompiler, MaskMaker
from cllm.types import ConstraintSpec, TokenMask, Vocabulary


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

    @cached_property
    def _masks(self) -> MaskMaker:
        return MaskMaker(self._vocabulary.size)

    def masks(self, constraints: Sequence[Constraint]) -> list[TokenMask | InvalidRequest]:
        """For each, what may come next, or why nothing can. On the owner thread, once a step."""
        return self._masks.masks(constraints) if constraints else []

    def submit(self, spec: ConstraintSpec) -> Future[Constraint]:
        """A fresh constraint, some time soon; fails with InvalidRequest."""
        return self._thread.submit(lambda: self._compiler.compile(spec))

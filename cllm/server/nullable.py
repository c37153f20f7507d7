"""Bodies of APIs in which a null says the same as leaving the field out."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import model_validator

from cllm.server.schema import Body


class NullableBody(Body):
    """Nulls at the top are dropped before anything is checked, but for those that mean something."""

    meant_nulls: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None or key in cls.meant_nulls}

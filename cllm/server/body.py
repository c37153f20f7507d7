"""Request bodies: structs that a JSON object is read into, as leniently as clients need.

Null stands for a field that was left out, and 64.0 for 64: some languages have no integers. Other names of a
field (`ALIASES`) are read as the field itself, and fields that a body does not know are ignored. A large
body is decoded and converted on a thread, one at a time, tenants in turn.

What a field means, and examples of it, are in `openapi.json`.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Annotated, Any, ClassVar, NamedTuple, ParamSpec, Self, TypeVar

import msgspec
from msgspec import Meta, inspect
from starlette.requests import ClientDisconnect, Request

from cllm.errors import ClientGone, InvalidRequest
from cllm.limits import MAX_CONTAINERS, MAX_DEPTH, MAX_TEXT, MAX_VALUES, check
from cllm.text.json_shape import measure

NOT_AN_OBJECT = "the body is not a JSON object"
NO_NUL = "^[^\0]*$"
FUNCTION_NAME = "^[A-Za-z0-9_.-]{1,256}$"
_PATTERNS = {  # what a text that does not match is refused with
    NO_NUL: "must not contain NUL",
    FUNCTION_NAME: "must have 1 to 256 letters, digits, '_', '-' or '.'",
}
LARGE_BODY = 64 << 10  # bytes; a smaller body takes less time than the way to a thread and back costs others
Kind = TypeVar("Kind", bound="Body")
Given = ParamSpec("Given")
Result = TypeVar("Result")
Read = Callable[[Any], Any]


SourceText = Annotated[str, Meta(pattern=NO_NUL)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT, pattern=NO_NUL)]
Name = Annotated[str, Meta(max_length=256)]
MetadataText = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], MetadataText], Meta(max_length=16)]
ModelName = Name | None
Timeout = Annotated[float, Meta(ge=0.001, le=86400)] | None  # seconds, from arrival to the last token
TokenId = Annotated[int, Meta(ge=0)]
TokenLimit = Annotated[int, Meta(ge=-1)]
"""A number of tokens to generate. -1 stands for as many as fit."""


class Body:
    """Mixin of request bodies: `class ChatBody(msgspec.Struct, Body, kw_only=True)`.

    `__post_init__` checks fields that depend on each other. It raises ValueError.
    """

    __slots__ = ()
    ALIASES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Field → the names it is read by, the first that a body has."""
    NULLS: ClassVar[frozenset[str]] = frozenset()
    """Fields where null has a meaning of its own."""
    OPTIONAL: ClassVar[bool] = False
    """A request may have no body at all."""

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Adapt the JSON object before its fields are read. Raises ValueError."""
        return value

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read a body from a JSON value. Raises InvalidRequest, which names the field."""
        try:
            return msgspec.convert(normalize(cls, value), cls)
        except (msgspec.ValidationError, ValueError) as error:
            refusal = describe(error)
            aliases = dict(_get_reader(cls).aliases)  # type: ignore[arg-type]
            for spelling in aliases.get(refusal.field or "", ()):
                if isinstance(value, dict) and value.get(spelling) is not None:
                    named = refusal.message.replace(str(refusal.field), spelling, 1)
                    raise InvalidRequest(named, spelling) from None
            raise refusal from None


class _Reader(NamedTuple):
    """The aliases, integers and nested bodies among the fields of a struct."""

    aliases: tuple[tuple[str, tuple[str, ...]], ...]
    integers: frozenset[str]
    nested: dict[str, Read]


def normalize(kind: type[Body], value: Any) -> Any:
    """The value as `msgspec.convert` takes it. Raises ValueError, which names the place."""
    if not isinstance(value, dict):
        return value
    value = kind.prepare(value)
    reader = _get_reader(kind)  # type: ignore[arg-type]
    for name, spellings in reader.aliases:
        if (found := next((each for each in spellings if value.get(each) is not None), name)) != name:
            value = {**value, name: value[found]}
    read = {}
    for key, item in value.items():
        if item is None and key not in kind.NULLS:
            continue
        if (convert := reader.nested.get(key)) is not None:
            try:
                item = convert(item)
            except ValueError as error:
                raise ValueError(_join(f".{key}", error)) from None
        elif type(item) is float and key in reader.integers and item.is_integer():
            item = int(item)
        read[key] = item
    return read


def _join(place: str, error: ValueError) -> str:
    """The message of an error inside a value, in msgspec's form."""
    reason, _, inner = str(error).partition(" - at `$")
    return f"{reason} - at `${place}{inner or '`'}"


@cache
def _get_reader(kind: type[Body]) -> _Reader:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    aliases = {
        name: names
        for each in reversed(kind.__mro__)
        for name, names in vars(each).get("ALIASES", {}).items()
    }
    nested, integers = {}, set()
    for field in info.fields:
        if (read := _make_read(field.type)) is not None:
            nested[field.encode_name] = read
        elif any(isinstance(each, inspect.IntType) for each in _list_types(field.type)):
            integers.add(field.encode_name)
    return _Reader(tuple(aliases.items()), frozenset(integers), nested)


def _list_types(kind: inspect.Type) -> list[inspect.Type]:
    """The types of a union, without what is said about them; of any other type, itself."""
    if isinstance(kind, inspect.Metadata):
        return _list_types(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [each for one in kind.types for each in _list_types(one)]
    return [kind]


def _make_read(kind: inspect.Type) -> Read | None:
    """Make the function that normalises values of a type. None for a type without bodies inside."""
    structs: dict[Any, type[Body]] = {}
    tag_field: str | None = None
    items: Read | None = None
    for each in _list_types(kind):
        if isinstance(each, inspect.StructType) and issubclass(each.cls, Body):
            structs[each.tag], tag_field = each.cls, each.tag_field
        elif isinstance(each, inspect.ListType | inspect.VarTupleType):
            items = _make_read(each.item_type)
    if not structs and items is None:
        return None
    return partial(_read_value, structs, tag_field, items)


def _read_value(
    structs: Mapping[Any, type[Body]], tag_field: str | None, items: Read | None, value: Any
) -> Any:
    if isinstance(value, dict):
        kind = structs.get(value.get(tag_field) if tag_field is not None else None)
        return value if kind is None else normalize(kind, value)
    if items is None or not isinstance(value, list):
        return value
    read = []
    for index, item in enumerate(value):
        try:
            read.append(items(item))
        except ValueError as error:
            raise ValueError(_join(f"[{index}]", error)) from None
    return read


def check_shape(data: bytes) -> None:
    """Raise InvalidRequest for a body of too many values or levels, before it is decoded."""
    shape = measure(data)
    if shape.depth > MAX_DEPTH:
        raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")
    if shape.values <= MAX_VALUES and shape.containers <= MAX_CONTAINERS:
        return
    field = None
    try:  # the field that has most of them; the decoder skips values without making them
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        field = max(fields, key=lambda name: len(fields[name]), default=None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    check(shape.values, MAX_VALUES, "values", field)
    check(shape.containers, MAX_CONTAINERS, "objects and lists", field)


def describe(error: Exception) -> InvalidRequest:
    """The refusal of a body, in our words."""
    text = re.sub("at `key` in `", "at `", str(error))
    reason, _, place = text.partition(" - at `$")
    place = place.removesuffix("`").removeprefix(".")
    if (found := re.fullmatch(r"Expected `str` matching regex '(.*)'", reason)) is not None:
        reason = _PATTERNS.get(found[1].encode().decode("unicode_escape"), reason)
    if (missing := re.fullmatch("Object missing required field `(.*)`", reason)) is not None:
        if not place:
            return InvalidRequest(f"{missing[1]}: this field is required", missing[1])
        reason = f"{missing[1]!r} is missing"
    reason = reason[:1].lower() + reason[1:]
    if place:
        return InvalidRequest(f"{place}: {reason}", re.split(r"[.\[]", place)[0])
    if reason.startswith("expected `object`"):
        return InvalidRequest(NOT_AN_OBJECT)
    named = reason.partition(":")[0]
    return InvalidRequest(reason, named if named.isidentifier() else None)


class TenantTurns:
    """A lock whose waiters take turns by tenant, and are in line within one."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the tenants' turns
        self._taken = False

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            self._lines.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was given already
                    self._release()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self._taken = False
        while self._lines and not self._taken:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            if not (turn := line.popleft()).done():
                turn.set_result(None)
                self._taken = True
            if line:
                self._lines[tenant] = line


async def run_in_turn(
    http: Request, task: Callable[Given, Result], *arguments: Given.args, **options: Given.kwargs
) -> Result:
    """Run what handles a body: here, or on a thread in turn where the body is large."""
    return await run_sized(http, len(await http.body()), partial(task, *arguments, **options))


async def run_sized(http: Request, size: int, task: Callable[[], Result]) -> Result:
    """Run what handles `size` bytes: here, or on a thread in turn where they are many.

    Native calls hold the interpreter's lock, but after `check_shape` each is short: other requests go on.
    """
    if size < LARGE_BODY:
        return task()
    async with http.app.state.large_bodies.hold(http.scope["state"]["tenant"].name):
        return await asyncio.to_thread(task)


async def read_body(http: Request, kind: type[Kind]) -> Kind:
    """The body of a request, with the server's defaults for fields that it lacks. Raises InvalidRequest.

    A large one is counted, decoded and checked on a thread.
    """
    try:
        data = await http.body()
    except ClientDisconnect:
        raise ClientGone("the client disconnected") from None
    if not data:
        if kind.OPTIONAL:
            return kind.parse({})
        raise InvalidRequest(NOT_AN_OBJECT)
    return await run_in_turn(http, decode, data, kind, http.app.state.add_defaults)


def decode(data: bytes, kind: type[Kind], add_defaults: Read | None = None) -> Kind:
    """A body from its bytes. Raises InvalidRequest."""
    check_shape(data)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"the body is not valid JSON: {reason[:1].lower()}{reason[1:]}") from None
    return kind.parse(value if add_defaults is None else add_defaults(value))

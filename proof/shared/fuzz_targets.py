"""Fuzz targets: what reads hostile bytes, each with the properties that must hold for any of them.

A target takes bytes and raises where a property does not hold. It knows nothing of the fuzzer, so that a test
can replay what was found.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
import msgspec
import numpy as np

from cllm.backend.llama.gguf import GgufHeader
from cllm.errors import ConfigError, HubError, InvalidRequest, ModelFileError
from cllm.models import hub
from cllm.models.files import HubFile, HubReference, choose_files, describe_files, group_files, parse_hub
from cllm.models.survey import read_info
from cllm.testing import FakeVocabulary
from cllm.text.detokenizer import IncrementalDetokenizer
from cllm.text.output_parser import ContentText, OutputParser, ReasoningText, ToolCallStart
from cllm.text.structured_output import GrammarCompiler, MaskBuilder
from cllm.types import ConstraintKind, ConstraintSpec
from tests.driver.masks import get_mask
from tests.unit.text.formats import FORMATS, TOOLS

MAX_PIECES = 24
MAX_ANSWER = 120  # tokens of an answer under a grammar


class Draw:
    """Choices from the fuzzer's bytes. At their end every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """A number from 0, of one byte or two."""
        size = 1 if below <= 256 else 2
        taken, self._at = self._data[self._at : self._at + size], self._at + size
        return int.from_bytes(taken, "little") % below

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.number(len(options))]

    def take(self, count: int) -> bytes:
        taken, self._at = self._data[self._at : self._at + count], self._at + count
        return taken

    @property
    def rest(self) -> bytes:
        return self.take(len(self._data))

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)


def cut(draw: Draw, whole: Any) -> list[Any]:
    """Text or bytes in pieces, some of them empty."""
    places = sorted(draw.number(len(whole) + 1) for _ in range(draw.number(MAX_PIECES)))
    return [whole[begin:end] for begin, end in zip([0, *places], [*places, len(whole)], strict=True)]


# The GGUF header --------------------------------------------------------------------------------------------

_FILE = Path(tempfile.gettempdir(), f"fuzz-{os.getpid()}.gguf")
_ASKED = ("embedding_length", "feed_forward_length", "expert_used_count", "expert_feed_forward_length")


def read_gguf(data: bytes) -> None:
    """A file is refused with ModelFileError, or all its tensors lie within it and it can be described."""
    try:
        _FILE.write_bytes(data)
        header = GgufHeader(_FILE)
    except ModelFileError as error:
        assert str(error) and "\n" not in str(error)
        return
    finally:
        _FILE.unlink(missing_ok=True)
    assert 0 < header.header_bytes <= header.file_bytes == len(data)
    for tensor in header.tensors:
        assert tensor.size is not None and tensor.size >= 0
        assert header.header_bytes + tensor.offset + tensor.size <= len(data)
    numbers = [header.number(name) for name in _ASKED]
    assert all(isinstance(number, int) for number in (*numbers, header.vocabulary, header.context_train))
    info = read_info(header, "fuzzed", "")
    assert info.layers >= 0 and info.parameters >= 0


def seed_gguf() -> Iterator[bytes]:
    from tests.tiny_models import make_dense, make_recurrent

    with tempfile.TemporaryDirectory() as folder:
        for make in (make_dense, make_recurrent):
            whole = make(Path(folder, "seed.gguf"), vocabulary=260).read_bytes()
            yield whole[:8192]
        # Without tensors, so that the header is whole and short.
        yield b"GGUF" + b"\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + _pair("general.architecture", "llama")
        pairs = _pair("general.architecture", "llama") + _pair("general.size_label", "1B")
        yield b"GGUF" + b"\3\0\0\0" + bytes(8) + b"\2" + bytes(7) + pairs


def _pair(key: str, value: str) -> bytes:
    written = [len(part).to_bytes(8, "little") + part for part in (key.encode(), value.encode())]
    return written[0] + b"\x08\0\0\0" + written[1]


# The detokenizer and stop strings ---------------------------------------------------------------------------

_LETTERS = ("a", "b", "ab", "é", "€", "😀", "\n", "</", "s>", "\x00", "\ufffd", "e\u0301")


def detokenize(data: bytes) -> None:
    """However the bytes are split, the text is the same: all of it, up to the stop that completes first."""
    draw = Draw(data)
    stops = ["".join(draw.pick(_LETTERS) for _ in range(1 + draw.number(4))) for _ in range(draw.number(4))]
    pieces = cut(draw, rest) if (rest := _take_text(draw)) else []
    wanted = _find_stop(codecs.getincrementaldecoder("utf-8")("replace").decode(rest), stops)
    for split in ([rest], [bytes([byte]) for byte in rest], pieces):
        found = _push(split, stops)
        assert found == wanted, f"{found} for {wanted}, stops {stops}, pieces {split}"


def _take_text(draw: Draw) -> bytes:
    """Letters of stop strings, and bytes as they are."""
    parts: list[bytes] = []
    while not draw.over and len(parts) < 64:
        kind = draw.number(4)
        parts.append(draw.take(1 + draw.number(4)) if kind == 0 else draw.pick(_LETTERS).encode())
    return b"".join(parts)


def _push(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[str, str | None]:
    detokenizer = IncrementalDetokenizer(stops)
    text = ""
    for piece in pieces:
        text += detokenizer.push(piece)
        assert not any(stop in text for stop in stops)
    return text + detokenizer.finish(), detokenizer.stopped_by


def _find_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The same, said plainly: the first place where a stop string ends; the longest of those that do."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text.endswith(stop, 0, end)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


# Tool calls -------------------------------------------------------------------------------------------------

_CHAT_FORMATS = tuple(FORMATS.values())
_VALUES = ('{"a": 1}', '"city"', ": ", ", ", "[", "]", "{", "}", '"', "'", "\\", "\n", " ", "1", "true", "é")
_NAMES = (*(tool.name for tool in TOOLS), "name", "arguments", "functions.", "look(", "city=", "look:0")


def parse_calls(data: bytes) -> None:
    """However the text is split, reasoning, content and calls are the same; calls are numbered in order."""
    draw = Draw(data)
    chat_format, flags = draw.pick(_CHAT_FORMATS), draw.number(64)
    words = (*chat_format.marker_texts, *_VALUES, *_NAMES)
    parts: list[str] = []
    while not draw.over and len(parts) < 48:
        raw = draw.number(8) == 0
        parts.append(draw.take(1 + draw.number(6)).decode("utf-8", "replace") if raw else draw.pick(words))
    text = "".join(parts)
    split = cut(Draw(data[::-1]), text)
    whole = _read_answer([text], chat_format, flags)
    for pieces in (list(text), split):
        found = _read_answer(pieces, chat_format, flags)
        assert found == whole, f"{found} for {whole}, pieces {pieces}, flags {flags}, {chat_format}"


def _read_answer(
    pieces: Sequence[str], chat_format: Any, flags: int
) -> tuple[str, str, Sequence[tuple[str, str]]]:
    parser = OutputParser(
        chat_format,
        TOOLS if flags & 8 else (),
        thinking=bool(flags & 1),
        parallel=bool(flags & 2),
        reasoning=bool(flags & 4),
        forced=flags & 24 == 24,
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(cut=bool(flags & 32))
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ReasoningText):
            reasoning += event.text
        elif isinstance(event, ContentText):
            content += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert not calls or flags & 8
    assert len(calls) <= 1 or flags & 2
    return reasoning, content, calls


# JSON schema and other grammars -----------------------------------------------------------------------------

_COMPILER, _MASKS = GrammarCompiler(FakeVocabulary()), MaskBuilder(FakeVocabulary.size)
_OTHERS = (ConstraintKind.REGEX, ConstraintKind.GRAMMAR, ConstraintKind.CHOICE)
_KINDS = (*(ConstraintKind.JSON_SCHEMA,) * 5, *_OTHERS)
_SCALARS = (None, True, False, 0, 1, -1, 2, 3.5, 1e30, "", "a", "é", "\x00", 10**20)
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array", "other")
_LIMITS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "multipleOf"),
    *("exclusiveMinimum", "exclusiveMaximum", "minProperties", "maxProperties"),
)
_INNER = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_PATTERNS = ("^a+$", "(a+)+b", "[0-9]{2}", "a|b", "(", "\\d", ".*", "a{0,1000}", "(?=a)", "\\p{L}", "[^\\n]")
_PLACES = ("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/x", "http://127.0.0.1/x", "file:///etc/passwd")
_NAMED = ("a", "b", "", "é", "$ref", "a/b~")
_GRAMMARS = (
    *("root", "::=", ":", '"a"', "[a-z]", "(", ")", "*", "+", "?", "|", "a", "\n", " ", "start", "/a/"),
    *("{2,3}", "{9999}", "[^", "]", "%json {}", "\\x00", "%ignore", "<|x|>", "%llguidance {}"),
)


def make_grammar(data: bytes) -> None:
    """A constraint is refused with InvalidRequest, or answers under it fit: those of a schema validate."""
    draw = Draw(data)
    kind = draw.pick(_KINDS)
    source = _draw_source(draw, kind)
    spec = ConstraintSpec(kind, source)
    try:
        constraint = _COMPILER.compile(spec)
    except InvalidRequest as error:
        assert str(error) and "\n" not in str(error)
        return
    _COMPILER.check(spec)  # what compiles is valid
    answer = bytearray()
    try:
        for _ in range(MAX_ANSWER):
            allowed = np.flatnonzero(get_mask(_MASKS, constraint))
            token = int(allowed[draw.number(len(allowed))])
            if token < 256:
                answer.append(token)
            constraint.accept(token)
            if constraint.complete:
                break
    except InvalidRequest:
        return  # the grammar was exhausted, or took too many states: an error of this answer
    if constraint.complete and kind is ConstraintKind.JSON_SCHEMA:
        _check_answer(bytes(answer), json.loads(source))
    elif constraint.complete and kind is ConstraintKind.CHOICE:
        assert answer.decode() in json.loads(source)


def _check_answer(answer: bytes, schema: Any) -> None:
    # A float has no more digits than these: JSON's 1e30 is not the integer that Python reads.
    value = json.loads(answer, parse_int=lambda digits: int(digits) if len(digits) < 16 else float(digits))
    written = json.dumps(schema)
    if "pattern" in written or "$ref" in written:
        return  # dialects of regular expressions differ, and jsonschema would fetch
    try:
        jsonschema.validate(value, schema)
    except (jsonschema.SchemaError, jsonschema.exceptions.UnknownType):
        return  # a schema that is none: llguidance ignores what it does not know
    except jsonschema.ValidationError as error:
        raise AssertionError(f"{answer!r} for {written}: {error.message}") from None


def _draw_source(draw: Draw, kind: ConstraintKind) -> str:
    if draw.number(8) == 0:
        return draw.rest.decode("utf-8", "replace")
    if kind is ConstraintKind.JSON_SCHEMA:
        return json.dumps(_draw_schema(draw, 4), ensure_ascii=False)
    if kind is ConstraintKind.CHOICE:
        return json.dumps(["".join(_draw_words(draw, _PATTERNS, 2)) for _ in range(1 + draw.number(4))])
    return "".join(_draw_words(draw, _PATTERNS if kind is ConstraintKind.REGEX else _GRAMMARS, 24))


def _draw_words(draw: Draw, words: Sequence[str], count: int) -> list[str]:
    return [draw.pick(words) for _ in range(1 + draw.number(count)) if not draw.over]


def _draw_schema(draw: Draw, depth: int) -> Any:
    if draw.over or depth == 0:
        return draw.pick(({}, True, False, {"type": "string"}, {"type": "integer"}))
    schema: dict[str, Any] = {}
    for _ in range(1 + draw.number(4)):
        match draw.number(10):
            case 0 | 1:
                schema["type"] = (
                    draw.pick(_TYPES) if draw.number(4) else [draw.pick(_TYPES), draw.pick(_TYPES)]
                )
            case 2:
                schema[draw.pick(_LIMITS)] = draw.pick(_SCALARS)
            case 3:
                schema[draw.pick(_INNER)] = _draw_schema(draw, depth - 1)
            case 4:
                options = [_draw_schema(draw, depth - 1) for _ in range(draw.number(4))]
                schema[draw.pick(_SEVERAL)] = options
            case 5 | 6:
                named = {draw.pick(_NAMED): _draw_schema(draw, depth - 1) for _ in range(draw.number(3))}
                schema[draw.pick(_BY_NAME)] = named
            case 7:
                schema["enum" if draw.number(2) else "required"] = [
                    draw.pick((*_SCALARS, *_NAMED)) for _ in range(draw.number(4))
                ]
            case 8:
                key, values = draw.pick((("pattern", _PATTERNS), ("$ref", _PLACES), ("const", _SCALARS)))
                schema[key] = draw.pick(values)
            case _:
                schema["format"] = draw.pick(("date", "uuid", "email", "ipv4", "date-time", "none", 3))
    return schema


# Listings of hubs -------------------------------------------------------------------------------------------

_STATUS = (200,) * 9 + (401, 403, 404, 416, 301)
_COMMIT = {"sha": "c0ffee" + "0" * 34}
_KEYS = (
    *("type", "path", "size", "lfs", "oid", "sha", "Data", "Files", "Path", "Size", "Sha256", "Type"),
    *("Message", "data", "models", "id", "downloads", "likes"),
)
_ENTRIES = (
    *("file", "a.gguf", "a-Q4_K_M.gguf", "../x.gguf", "/x", "b\\c", "\ud800.gguf", "\x00", "..", ".", "tree"),
    *("a/b-00001-of-00002.gguf", "a" * 64, "sha256:" + "b" * 64, "c" * 40, ""),
)
_NEXT = ("http://127.0.0.1/next", "//[", "file:///etc/passwd")
_LINKS = ("", "<", *(f'<{url}>; rel="next"' for url in _NEXT))


def read_listing(data: bytes) -> None:
    """Whatever a hub answers, HubError comes or a listing whose files stay in their folder."""
    draw = Draw(data)
    kind = draw.pick(("hf", "ms"))
    reference = HubReference(kind, "user/repo")
    answers = _draw_answers(draw, kind)
    with hub.make_hub(reference) as opened:
        opened._client.close()
        opened._client = httpx.Client(
            transport=httpx.MockTransport(lambda request: next(answers)), follow_redirects=True
        )
        try:
            if draw.number(4) == 0:
                for hit in opened.search("words", 3):
                    assert isinstance(hit.repo, str) and isinstance(hit.downloads, int)
                return
            listing = opened.list_files("")
        except HubError as error:
            assert str(error)
            return
        for file in listing.files:
            _check_file(file, opened.file_url(listing.commit, file.path))
    models = group_files({file.path: file.size for file in listing.files})
    try:
        chosen = choose_files(models, draw.pick(("", "Q4_K_M", "a.gguf")), "it")
        assert set(chosen.names) <= {file.path for file in listing.files}
    except ModelFileError:
        assert isinstance(describe_files(models), str)
    read_reference(draw.rest.decode("utf-8", "replace"))


def _check_file(file: HubFile, url: str) -> None:
    place = Path("/folder", file.path)
    assert place.resolve().is_relative_to("/folder") and place != Path("/folder")
    assert url.startswith("https://") and isinstance(file.size, int) and 0 <= file.size <= hub.MAX_FILE
    assert file.etag == "" or all(letter in "0123456789abcdef" for letter in file.etag)


def read_reference(text: str) -> None:
    """A reference is refused with ConfigError, is none, or names a repository by two plain words."""
    try:
        found = parse_hub(text)
    except ConfigError:
        return
    if found is not None:
        owner, _, name = found.repo.partition("/")
        assert owner and name and not {"..", "."} & {owner, name} and found.hub in ("hf", "ms")


def _draw_answers(draw: Draw, kind: str) -> Iterator[httpx.Response]:
    if kind == "hf" and draw.number(4):
        yield httpx.Response(200, content=iter([msgspec.json.encode(_COMMIT)]))  # not read beforehand
    for _ in range(4):
        status, link = draw.pick(_STATUS), draw.pick(_LINKS)
        headers = {"Link": link} if link else {}
        if status == 301:
            headers["Location"] = draw.pick(("http://127.0.0.1/", "file:///x", "//[", ""))
        odd = draw.number(8) == 0
        content = draw.take(64) if odd else json.dumps(_draw_json(draw, 5, kind)).encode()
        yield httpx.Response(status, content=iter([content]), headers=headers)
    while True:
        yield httpx.Response(200, content=iter([b"[" * 2000 if draw.number(8) == 1 else b"[]"]))


def _draw_json(draw: Draw, depth: int, kind: str) -> Any:
    """A listing, somewhere of another shape."""
    if depth == 5 and kind == "ms" and draw.number(4):
        return {"Data": {"Files": _draw_json(draw, 4, kind)}}
    match draw.number(4) if depth and not draw.over else 3:
        case 0:
            return [_draw_json(draw, depth - 1, kind) for _ in range(draw.number(4))]
        case 1:
            return {draw.pick(_KEYS): _draw_json(draw, depth - 1, kind) for _ in range(draw.number(6))}
        case 2:
            path = draw.pick(_ENTRIES)
            extra = {draw.pick(_KEYS): _draw_json(draw, depth - 1, kind)} if draw.number(2) else {}
            return [{"type": "file", "path": path, "Path": path, **extra}]
        case _:
            return draw.pick((*_ENTRIES, None, True, -1, 1e300, 10**40, 5))


class Target(NamedTuple):
    """What is fuzzed: the property, inputs to begin with, and the modules whose coverage counts."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    title: str


def _seed_bytes() -> Iterator[bytes]:
    for number in range(16):
        yield bytes((number * 37 + place * 101 + place * place * 7) % 256 for place in range(24 + 8 * number))


TARGETS: Mapping[str, Target] = {
    "gguf": Target(read_gguf, seed_gguf, "GGUF header"),
    "detokenizer": Target(detokenize, _seed_bytes, "detokenizer and stop strings"),
    "calls": Target(parse_calls, _seed_bytes, "tool-call parsers"),
    "grammar": Target(make_grammar, _seed_bytes, "schema → grammar"),
    "hub": Target(read_listing, _seed_bytes, "hub listings"),
}
logging.getLogger("httpx").setLevel(logging.WARNING)

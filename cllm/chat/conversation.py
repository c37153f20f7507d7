"""Conversation: messages, tools and template options, from whichever API they come."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import msgspec

from cllm.errors import InvalidRequest
from cllm.limits import MAX_PICTURES, check
from cllm.names import is_address
from cllm.text.chat_format import Tool
from cllm.text.json_shape import ShapeSum
from cllm.text.message_rewrites import REASONING_FIELDS
from cllm.text.prompt import Chat
from cllm.types import Prompt

MESSAGE_JOINT = "\n"  # between texts that become one message
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")
MEDIA_PARTS = ("image_url", "input_image", "image", "input_audio")


class Marker(str):
    """The text that stands for a picture in a message, until the prompt is built."""


class Pictures(dict[str, str]):
    """Pictures of a conversation by their markers: files in base64, or addresses."""

    def add(self, kind: str, source: Any, field: str) -> Marker:
        """Add a picture as an API has it: a data URL, also in an object, or base64, or an address.

        Raises InvalidRequest for no picture at all.
        """
        if isinstance(source, dict):
            source = source.get("url") or source.get("data")
        if isinstance(source, str):
            head, comma, data = ("", "", "") if is_address(source) else source.partition(",")
            if comma and not head.lower().endswith(";base64"):
                raise InvalidRequest(
                    f"{field}: the data URL of the {kind} must end its head with ;base64", field
                )
            source = data if comma else source
        if not isinstance(source, str) or not source:
            raise InvalidRequest(f"{field}: a part of type {kind!r} has no picture or sound in it", field)
        check(len(self) + 1, MAX_PICTURES, "pictures", field, "send fewer")
        marker = Marker(f"[picture-{secrets.token_hex(8)}]")
        self[marker] = source
        return marker


class Conversation(Chat, frozen=True, kw_only=True):
    """Messages for the model to reply to. They have `role`, `content` and, in OpenAI's shape, `tool_calls`
    (arguments as JSON text) and `tool_call_id`."""

    reasoning: bool = True  # False: reasoning stays in the text
    continued: bool = True  # False: an assistant's message at the end is not what the reply continues
    prediction: str = ""  # what most of the reply will repeat
    pictures: dict[str, str] = msgspec.field(default_factory=dict)  # see `Pictures`

    def __post_init__(self) -> None:
        """Raises InvalidRequest where templates would decode too much."""
        size = ShapeSum("messages", "shorten the arguments of earlier calls")
        for call in (call for message in self.messages for call in message.get("tool_calls") or ()):
            if isinstance(text := call.get("function", {}).get("arguments"), str):
                size.add(text.encode("utf-8", "surrogatepass"))

    def for_template(self, media: Mapping[str, Prompt] = {}) -> Chat:
        """The conversation as the tokenizer takes it. A reply continues an assistant's message at its end."""
        last = self.messages[-1]
        goes_on = self.continued and last["role"] == "assistant" and not last.get("tool_calls")
        continued = last if goes_on else {}
        switches = [self.options.get(name) for name in ("enable_thinking", "thinking")]
        fields = {name: getattr(self, name) for name in Chat.__struct_fields__}
        fields |= {"prefill": str(continued.get("content") or ""), "thoughts": get_thoughts(continued)}
        fields["messages"] = self.messages[:-1] if continued else self.messages
        fields["think"] = self.think and False not in switches
        fields["reasoning_budget"] = self.reasoning_budget if self.think else None
        return Chat(**fields | {"media": dict(media)})


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that may be called, and whether one must be."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()  # only these; empty: any
    parallel: bool = True

    @classmethod
    def of(cls, mode: Literal["none", "auto", "required", "any"], *, parallel: bool) -> ToolChoice:
        """The choice of a mode; `any` is `required` in the words of others."""
        return cls(mode="required" if mode == "any" else mode, parallel=parallel)

    @classmethod
    def only(cls, name: str) -> ToolChoice:
        """The choice of one tool, which must be called."""
        return cls(mode="required", names=(name,), parallel=False)

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError if names of tools repeat, or if a tool that must be called is missing."""
        known = set(names)
        if len(known) < len(names):
            raise ValueError("tools: two tools have the same name")
        for name in self.names:
            if name not in known:
                raise ValueError(f"tool_choice: {name!r} is not among the tools")
        if self.mode == "required" and not names:
            raise ValueError("tool_choice: required needs tools")

    def apply(self, tools: Sequence[Tool]) -> dict[str, Any]:
        """The fields of `Conversation` that follow from the choice."""
        allowed = [] if self.mode == "none" else tools
        named = set(self.names)
        chosen = tuple(tool for tool in allowed if not named or tool.name in named)
        return {"tools": chosen, "forced": self.mode == "required", "parallel": self.parallel}


class MessageBuilder:
    """Messages of a `Conversation`, built piece by piece.

    Tool calls and reasoning belong to the assistant's message beside them. Consecutive system texts become
    one message, because templates take only one. With `combine`, so do consecutive texts of any role.
    """

    def __init__(self, field: str, *, combine: bool = False, sees: bool = False) -> None:
        """`field` names the messages in errors. A model that `sees` takes pictures."""
        self.pictures = Pictures()
        self._sees = sees
        self._messages: list[dict[str, Any]] = []  # their texts in parts, joined once
        self.answered = False  # what is added now has been answered
        self._field = field
        self._combine = combine

    def add_text(self, role: str, text: str) -> None:
        last = self._messages[-1] if self._messages else {}
        reasoned = last.get("reasoning_content") and not last["content"] and "tool_calls" not in last
        if last.get("role") != role or not (self._combine or role == "system" or reasoned):
            self._messages.append({"role": role, "content": [text] if text else []})
        else:
            last["content"].append(text)

    def show_media(self, role: str, kind: str, source: Any = None) -> str:
        """The text in the place of a part that is no text: a marker or a note.

        Raises InvalidRequest for a part that the model does not take, in what the user asks now.
        """
        if self._sees and kind in MEDIA_PARTS:
            return self.pictures.add(kind, source, self._field)
        accepts = "text and pictures" if self._sees else "text"
        if role == "user" and not self.answered:
            place = f"{self._field}: content of type {kind[:64]!r} is not supported"
            advice = f"this model accepts {accepts} only; send the question without it"
            raise InvalidRequest(f"{place}: {advice}", self._field)
        return f"[{kind[:64]}: left out, this model accepts {accepts} only]"

    def add_reasoning(self, text: str) -> None:
        """The assistant's reasoning, before the text or the calls that it led to."""
        self._assistant().setdefault("reasoning_content", []).extend(filter(None, (text,)))

    def add_tool_call(self, call_id: str | None, name: str, arguments: str) -> None:
        """A call by the assistant; `arguments` is JSON text."""
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_tool_result(self, call_id: str | None, text: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": [text]})

    def add_all(self, given: Sequence[Any]) -> None:
        """Add messages or items of an API, which have a `role` and `add_to`. Raises InvalidRequest."""
        answered = count_answered([one.role or "" for one in given])
        for index, one in enumerate(given):
            self.answered = index < answered
            one.add_to(self)

    def build(self) -> tuple[dict[str, Any], ...]:
        """The messages; raises InvalidRequest where there are none."""
        if not self._messages:
            raise InvalidRequest(f"{self._field}: no content", self._field)
        joints = {"content": join_texts, "reasoning_content": "".join}
        return tuple(
            {
                name: joints[name](filter(None, value)) if name in joints else value
                for name, value in message.items()
            }
            for message in self._messages
        )

    def _assistant(self) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": []})
        return self._messages[-1]


def read_files(value: Any) -> Any:
    """A part of a message with the bytes of the files and PIL images in it. Raises InvalidRequest."""
    if isinstance(value, Path):
        try:
            return value.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"messages: {value} cannot be read: {error.strerror}", "messages") from None
    if hasattr(value, "getexif"):
        value.convert("RGB").save(file := BytesIO(), "PNG", exif=value.getexif())
        return file.getvalue()
    if isinstance(value, dict):
        return {name: read_files(each) for name, each in value.items()}
    return [read_files(each) for each in value] if isinstance(value, list) else value


def join_texts(texts: Iterable[str]) -> str:
    """Join texts that become one message, each on a line of its own; a picture stays in its line."""
    lines: list[str] = []
    last = ""
    for text in texts:
        if lines and (isinstance(text, Marker) or isinstance(last, Marker)):
            lines[-1] += text
        else:
            lines.append(text)
        last = text
    return MESSAGE_JOINT.join(lines)


def count_answered(roles: Sequence[str]) -> int:
    """Count the messages that have been answered. The assistant's message at the end is no answer yet."""
    ended = [index for index, role in enumerate(roles[:-1]) if role == "assistant"]
    return ended[-1] + 1 if ended else 0


def normalize_messages(
    messages: Iterable[dict[str, Any]], builder: MessageBuilder | None = None
) -> tuple[dict[str, Any], ...]:
    """Messages of OpenAI's shape as a `Conversation` has them. Raises InvalidRequest.

    The `builder` gets the pictures.
    """
    given, builder = list(messages), builder or MessageBuilder("messages")
    answered = count_answered([message["role"] for message in given])
    normalized = []
    for index, message in enumerate(given):
        builder.answered = index < answered
        normalized.append(_normalize(message, builder))
    return tuple(normalized)


def _normalize(message: dict[str, Any], builder: MessageBuilder) -> dict[str, Any]:
    """Plain text content, reasoning under one name, no `developer` and no `function` role."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    content = message.get("content") or message.get("refusal") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    thoughts = get_thoughts(message)
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") or "text"
        if kind in THOUGHT_PARTS:
            thoughts = thoughts or get_thoughts(part)
        elif kind in TEXT_PARTS:
            texts.append(part.get("text") or part.get("refusal") or "")
        else:
            texts.append(builder.show_media(role, kind, part.get("image_url") or part.get("input_audio")))
    kept = message.keys() - REASONING_FIELDS
    normalized = {key: value for key, value in message.items() if value is not None and key in kept}
    normalized |= {"role": role, "content": join_texts(texts)}
    if called := normalized.pop("function_call", None):
        normalized["tool_calls"] = [{"function": called}]
    if thoughts and role == "assistant":
        normalized["reasoning_content"] = thoughts
    return normalized


def get_thoughts(message: dict[str, Any]) -> str:
    """The reasoning of an assistant's message or part, under whichever name it comes."""
    given = (message.get(name) for name in (*REASONING_FIELDS, "text"))
    found = next((thoughts for thoughts in given if thoughts and isinstance(thoughts, str | list)), "")
    if isinstance(found, list):  # Mistral's parts
        return "".join(part["text"] for part in found if isinstance(part, dict) and "text" in part)
    return found


def make_template_options(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Variables of the chat template; a reasoning effort sets two, unless they are given."""
    options = dict(given or {})
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
        options.setdefault("enable_thinking", effort != "none")
    return options


def write_arguments(arguments: Any) -> str:
    """The arguments of a call as JSON text, however they come; none are an empty object."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)

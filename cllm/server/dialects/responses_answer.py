"""The answers of OpenAI's Responses API: output items, usage, the response."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cllm.server.dialects.openai.chat import ChatTokenLogprob


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of an output message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """An output item: text."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """An output item: reasoning."""

    id: str
    status: str
    content: list[OutputReasoning]
    summary: list[Any] = []


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """An output item: a tool call; `arguments` is JSON text."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """An output item: a call of a custom tool, with its one text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | OutputReasoningItem | OutputFunctionCall | OutputCustomCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    cached_from: str = ""  # the tier of the KV cache: device, ram or disk


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    message: str
    code: str = "server_error"


class IncompleteDetails(msgspec.Struct):
    reason: str = "max_output_tokens"


class ResponseObject(msgspec.Struct, kw_only=True):
    """The response: the output, and the parameters of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    temperature: float
    top_p: float
    user: str | None = None
    model: str
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    top_logprobs: int
    truncation: str = "disabled"
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: dict[str, str] | UnsetType = UNSET
    service_tier: str = "default"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None

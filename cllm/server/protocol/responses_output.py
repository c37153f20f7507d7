"""Response of `/v1/responses`, and the events of its stream."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cllm.server.blocks import StreamEvent
from cllm.server.protocol.chat import ChatTokenLogprob
from cllm.server.protocol.responses import ResponsesBody


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


OutputItem = OutputMessage | OutputReasoningItem | OutputFunctionCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


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

    EXAMPLE: ClassVar[ResponseObject]

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
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
    service_tier: str = "default"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None


def echo(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The fields of the response that repeat the request."""
    wanted, text_format = body.tool_choice, body.text.format if body.text is not None else None
    return {
        **body.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p", "user"}),
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": wanted if isinstance(wanted, str) else wanted.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "text": {
            "format": {"type": "text"}
            if text_format is None
            else text_format.model_dump(by_alias=True, exclude_none=True)
        },
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "metadata": body.metadata or {},
        "top_logprobs": body.top_logprobs or 0,
    }


ResponseObject.EXAMPLE = ResponseObject(
    id="resp_8f0c2d7e",
    created_at=1767225600,
    completed_at=1767225601,
    status="completed",
    **echo(
        ResponsesBody.model_validate({"input": "?", "instructions": "Be brief.", "max_output_tokens": 64}),
        "SmolLM2-135M-Instruct",
    ),
    output=[OutputMessage("msg_2b7e", "completed", [OutputText("AI is …")])],
    usage=ResponseUsage(4, InputTokensDetails(0), 3, OutputTokensDetails(0), 7),
)


class InputTokens(msgspec.Struct):
    """The response of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseEvent(StreamEvent):
    """One event of a stream."""

    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | OutputReasoning | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET

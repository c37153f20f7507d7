"""The body of OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cllm.chat.conversation import (
    TEXT_PARTS,
    Conversation,
    ToolChoice,
    make_template_options,
    normalize_messages,
    write_arguments,
)
from cllm.server.body import Body, Name, TokenLimit, about
from cllm.server.dialects.openai.fields import (
    CONVERSATION,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOOLS,
    MESSAGES,
    PARAMETERS,
    QUESTION,
    REASONING,
    TOOL_CHOICE,
    Arguments,
    CalledName,
    CallId,
    Effort,
    FunctionName,
    JsonValue,
    OpenAIBody,
    ReasoningBudget,
    TemplateOptions,
    ToolDescription,
    ToolMode,
    TopLogprobs,
    check_kind,
    take_tools,
)
from cllm.text.chat_format import Tool

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
PART = {"type": "text", "text": QUESTION}
PREDICTION = "def add(a, b):"


class ContentPart(msgspec.Struct, Body, kw_only=True):
    """A part of a message. In the history, what is no text is replaced by a note."""

    type: Annotated[
        str,
        about(
            "`text`, `refusal`, `thinking` …; others are refused in the last question", "text", max_length=64
        ),
    ]
    text: Annotated[str | None, about("The text of this part", QUESTION)] = None
    refusal: Annotated[str | None, about("The text of a refusal", "Rather not.")] = None
    thinking: Annotated[JsonValue, about("Reasoning", REASONING)] = None

    def check(self) -> None:
        if self.type in TEXT_PARTS and self.text is None and self.refusal is None:
            raise ValueError("'text' is missing")


class CalledFunction(msgspec.Struct, Body, kw_only=True):
    name: CalledName
    arguments: Arguments = "{}"

    def check(self) -> None:
        self.arguments = write_arguments(self.arguments)


class ToolCallBody(msgspec.Struct, Body, kw_only=True):
    """A tool call of an earlier assistant message."""

    id: CallId = None
    type: Annotated[Name | None, about("Always `function`")] = "function"
    function: Annotated[CalledFunction, about("The tool and its arguments", {"name": "now"})]


ReasoningText = Annotated[
    JsonValue, about("Reasoning of the assistant, for templates that repeat it", REASONING)
]


class MessageBody(msgspec.Struct, Body, kw_only=True):
    """One message."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"], about("The author")
    ]
    content: Annotated[
        str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None,
        about("Text, or parts of text; control tokens in it stay plain text", QUESTION, [PART]),
    ] = None
    name: Annotated[Name | None, about("Of the author, for templates that use it", "Ann")] = None
    tool_calls: Annotated[
        Annotated[list[ToolCallBody], Meta(max_length=MAX_TOOLS)] | None,
        about("Tool calls of an assistant message", [{"id": "call_1", **TOOL}]),
    ] = None
    tool_call_id: Annotated[str | None, about("The call that this answers", "call_1")] = None
    function_call: Annotated[
        CalledFunction | None, about("A call in OpenAI's older form", {"name": "now"})
    ] = None
    refusal: Annotated[str | None, about("In the place of the content", "Rather not.")] = None
    reasoning_content: ReasoningText = None
    reasoning: ReasoningText = None
    thinking: ReasoningText = None

    def check(self) -> None:
        for name in ("reasoning_content", "reasoning", "thinking"):
            if not isinstance(getattr(self, name), str):
                setattr(self, name, None)


def drop_nulls(value: Any) -> Any:
    """A JSON value without the fields that are null, down to those of the objects in lists."""
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    return value


class FunctionBody(msgspec.Struct, Body, kw_only=True):
    """A function the model may call."""

    name: FunctionName
    description: ToolDescription = None
    parameters: Annotated[
        dict[str, Any] | None, about("JSON schema of its arguments; left out: it takes none", PARAMETERS)
    ] = None
    strict: Annotated[bool | None, about("Ignored: forced calls always match", True)] = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {})


class ToolBody(msgspec.Struct, Body, kw_only=True):
    type: Annotated[Literal["function"], about("Always `function`")]
    function: Annotated[FunctionBody, about("The function", {"name": "now"})]


class ChosenFunction(msgspec.Struct, Body, kw_only=True):
    name: FunctionName


class ChosenTool(msgspec.Struct, Body, kw_only=True, tag_field="type", tag="function"):
    """The tool that must be called."""

    function: Annotated[ChosenFunction, about("Its name", {"name": "get_weather"})]


class AllowedFunctions(msgspec.Struct, Body, kw_only=True):
    mode: Annotated[Literal["auto", "required"], about("Whether one must be called")]
    tools: Annotated[
        list[ChosenTool],
        about("Some of the tools", [TOOL], min_length=1, max_length=MAX_TOOLS),
    ]


class AllowedChatTools(msgspec.Struct, Body, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The tools that may be called."""

    allowed_tools: Annotated[
        AllowedFunctions,
        about("Which tools, and whether one must be called", {"mode": "auto", "tools": [TOOL]}),
    ]


class ThinkingMode(msgspec.Struct, Body, kw_only=True):
    """Reasoning, as the APIs of some models switch it."""

    type: Annotated[Name, about("`enabled` or `disabled`; others leave it to the template", "disabled")]
    budget_tokens: ReasoningBudget = None


class ReasoningOptions(msgspec.Struct, Body, kw_only=True):
    """Reasoning, as OpenRouter's clients ask for it."""

    effort: Effort = None
    enabled: Annotated[bool | None, about("Reasoning, on or off", False)] = None
    max_tokens: ReasoningBudget = None


class PredictedPart(msgspec.Struct, Body, kw_only=True):
    type: Annotated[Literal["text"], about("Always `text`")] = "text"
    text: Annotated[str, about("The text", PREDICTION)]


class Prediction(msgspec.Struct, Body, kw_only=True):
    """The expected answer, mostly: such as a file that is edited."""

    type: Annotated[Literal["content"], about("Always `content`")] = "content"
    content: Annotated[
        str | Annotated[list[PredictedPart], Meta(max_length=MAX_PROMPTS)],
        about("Text, or parts of text", PREDICTION),
    ]


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    ALIASES = {"max_tokens": ("max_completion_tokens", "max_tokens", "n_predict")}
    EXAMPLE = {"messages": MESSAGES, "max_tokens": 64}

    messages: Annotated[list[MessageBody], CONVERSATION]
    tools: Annotated[
        Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None,
        about("Functions the model may call", [TOOL]),
    ] = None
    tool_choice: Annotated[ToolMode | ChosenTool | AllowedChatTools, about(TOOL_CHOICE)] = "auto"
    parallel_tool_calls: Annotated[bool, about("Allow several calls in one answer")] = True
    functions: Annotated[
        Annotated[list[FunctionBody], Meta(max_length=MAX_TOOLS)] | None,
        about("`tools` in OpenAI's older form; the answer then has a `function_call`", [{"name": "now"}]),
    ] = None
    function_call: Annotated[
        Literal["none", "auto"] | ChosenFunction | None,
        about("`tool_choice` for `functions`", "auto", {"name": "now"}),
    ] = None
    chat_template_kwargs: TemplateOptions = None
    reasoning_format: Annotated[
        Literal["auto", "deepseek", "deepseek-legacy", "none"],
        about("`none`: reasoning stays in the text; others: it goes to `reasoning_content`"),
    ] = "auto"
    continue_final_message: Annotated[
        bool | Literal["content", "reasoning_content"] | None,
        about("`false`: an assistant message at the end is history, not continued", True),
    ] = None
    # How much the model reasons, in the words of several APIs; the first that is given decides.
    reasoning_effort: Effort = None
    enable_thinking: Annotated[bool | None, about("Reasoning, on or off", False)] = None
    thinking: Annotated[bool | ThinkingMode | None, about("Reasoning, on or off", False)] = None
    reasoning: Annotated[ReasoningOptions | None, about("How much to reason", {"effort": "low"})] = None
    thinking_budget: ReasoningBudget = None
    reasoning_budget: ReasoningBudget = None
    prediction: Annotated[
        Prediction | None,
        about("Text that most of the answer will repeat, to generate it faster", {"content": PREDICTION}),
    ] = None
    max_tokens: Annotated[
        TokenLimit | None,
        about("Maximum tokens (also `max_completion_tokens`, `n_predict`); null or -1: as many as fit", 64),
    ] = None
    logprobs: Annotated[bool, about("Return log-probabilities of the sampled tokens")] = False
    top_logprobs: Annotated[
        TopLogprobs | None, about("And of this many most likely tokens; needs `logprobs`", 2)
    ] = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_kind(value.get("tool_choice"), "function", "allowed_tools")
        return take_tools(super().prepare(value), "function", default="function")

    def check(self) -> None:
        super().check()
        self.set_limit("max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed: leave out one of the two")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the last message is not the assistant's")
        self._choice.check([function.name for function in self._functions])

    @property
    def top(self) -> int | None:
        """Number of most likely tokens that are returned. None returns no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def older_form(self) -> bool:
        """The tools are `functions`, and the answer's calls a `function_call`."""
        return bool(self.functions) and not self.tools

    @property
    def _functions(self) -> list[FunctionBody]:
        return [tool.function for tool in self.tools or ()] or self.functions or []

    @property
    def _choice(self) -> ToolChoice:
        if self.older_form:
            wanted = self.function_call or "auto"
            if isinstance(wanted, ChosenFunction):
                return ToolChoice.only(wanted.name)
            return ToolChoice(mode=wanted, parallel=False)
        parallel = self.parallel_tool_calls
        match self.tool_choice:
            case ChosenTool(function=function):
                return ToolChoice.only(function.name)
            case AllowedChatTools(allowed_tools=allowed):
                names = tuple(tool.function.name for tool in allowed.tools)
                return ToolChoice(mode=allowed.mode, names=names, parallel=parallel)
            case mode:
                return ToolChoice.of(mode, parallel=parallel)

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or (self.reasoning and self.reasoning.effort)

    @property
    def budget(self) -> int | None:
        """Maximum number of tokens of reasoning. None sets no limit."""
        mode = self.thinking if isinstance(self.thinking, ThinkingMode) else None
        nested = (mode and mode.budget_tokens, self.reasoning and self.reasoning.max_tokens)
        given = (self.thinking_budget, self.reasoning_budget, *nested)
        found = next((budget for budget in given if budget is not None), None)
        return None if found == -1 else found

    @property
    def thinks(self) -> bool | None:
        """Enable reasoning. None leaves it to the chat template."""
        mode = self.thinking.type if isinstance(self.thinking, ThinkingMode) else self.thinking
        given = (
            self.enable_thinking,
            {"enabled": True, "disabled": False}.get(mode) if isinstance(mode, str) else mode,
            self.reasoning and self.reasoning.enabled,
            False if self.budget == 0 else None,
            None if self.effort is None else self.effort != "none",
        )
        return next((wanted for wanted in given if wanted is not None), None)

    def conversation(self) -> Conversation:
        """The conversation in the terms of `cllm.chat`."""
        options = dict(self.chat_template_kwargs or {})
        if self.thinks is not None:
            options.setdefault("enable_thinking", self.thinks)
        content = self.prediction.content if self.prediction is not None else ""
        return Conversation(
            messages=normalize_messages(drop_nulls(msgspec.to_builtins(self.messages))),
            reasoning=self.reasoning_format != "none",
            continued=self.continue_final_message is not False,
            options=make_template_options(options, self.effort),
            think=self.thinks is not False,
            reasoning_budget=self.budget,
            prediction=content if isinstance(content, str) else "".join(part.text for part in content),
            **self._choice.apply([function.tool() for function in self._functions]),
        )

"""The recorded requests: name → path and body. `stream` is set for all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from cllm.testing import say

TEXT = "Hello, naïve world: 5 € 😀!"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"const": 40}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "stars": {"type": "boolean"}},
    "required": ["sky", "stars"],
    "additionalProperties": False,
}


class Case(NamedTuple):
    path: str
    body: dict[str, Any]


def chat(content: str, **fields: Any) -> Case:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 200, **fields}
    return Case("/v1/chat/completions", body)


def completion(prompt: Any, **fields: Any) -> Case:
    return Case("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 80, **fields})


def response(content: str, **fields: Any) -> Case:
    return Case("/v1/responses", {"model": "m", "input": content, "max_output_tokens": 200, **fields})


def message(content: str, **fields: Any) -> Case:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 200, **fields}
    return Case("/v1/messages", body)


FUNCTION: dict[str, Any] = ADD["function"]
RESPONSE_TOOL = {"type": "function", **FUNCTION}
MESSAGE_TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
THINK_END = "<think>\nWhat is two and two?\n</think>\n\nFour."
USAGE = {"stream_options": {"include_usage": True}}
CASES: dict[str, Case] = {
    "completions": completion(say(TEXT)),
    "completions-length": completion("abc", max_tokens=6, seed=1, ignore_eos=True),
    "completions-two-prompts-echoed": completion([say("one"), say("two")], echo=True),
    "completions-logprobs": completion("abc", max_tokens=4, seed=1, ignore_eos=True, logprobs=2),
    "completions-usage": completion(say("Yes."), **USAGE),
    "completions-stop": completion(say("one two three"), stop=["o th", "zzz"]),
    "completions-error": completion(say("It was a dark and", fails=True)),
    "chat": chat(say(TEXT)),
    "chat-length": chat("abc", max_tokens=6, seed=1, ignore_eos=True),
    "chat-two-choices": chat("abc", n=2, max_tokens=8, seed=3, ignore_eos=True, **USAGE),
    "chat-logprobs": chat("abc", max_tokens=4, seed=1, ignore_eos=True, logprobs=True, top_logprobs=1),
    "chat-usage": chat(say("Yes."), **USAGE),
    "chat-stop": chat(say("one two three"), stop="two"),
    "chat-schema": chat(
        "How is the sky?",
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}},
    ),
    "chat-error": chat(say("It was a dark and", fails=True)),
    "chat-reasoning": chat(say(THINK_END)),
    "chat-tool": chat(say(f"Let me see.\n{CALL}"), tools=[ADD], **USAGE),
    "chat-two-tools": chat(say(f"{CALL}\n{CALL}"), tools=[ADD]),
    "chat-no-tool": chat(say("No <tool is needed, 1 < 2."), tools=[ADD]),
    "chat-forced-tool": chat(
        "abc", seed=1, tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}}
    ),
    "responses": response(say(TEXT)),
    "responses-length": response("abc", max_output_tokens=16, seed=1, ignore_eos=True),
    "responses-reasoning": response(say(THINK_END)),
    "responses-tool": response(say(f"Let me see.\n{CALL}"), tools=[RESPONSE_TOOL]),
    "responses-error": response(say("It was a dark and", fails=True)),
    "messages": message(say(TEXT)),
    "messages-length": message("abc", max_tokens=6, seed=1, ignore_eos=True),
    "messages-stop": message(say("one two three"), stop_sequences=["two"]),
    "messages-thinking": message(say(THINK_END), thinking={"type": "enabled", "budget_tokens": 1024}),
    "messages-tool": message(say(f"Let me see.\n{CALL}"), tools=[MESSAGE_TOOL]),
    "messages-forced-tool": message(
        "abc", seed=1, tools=[MESSAGE_TOOL], tool_choice={"type": "tool", "name": "add"}
    ),
    "messages-error": message(say("It was a dark and", fails=True)),
    "generate": Case("/generate_stream", {"prompt": say(TEXT), "max_tokens": 80}),
    "generate-error": Case("/generate_stream", {"prompt": say("It was", fails=True)}),
    "llama-completion": Case("/completion", {"prompt": say("Yes: é"), "n_predict": 30}),
    "llama-completion-error": Case("/completion", {"prompt": say("It was", fails=True)}),
    "llama-completion-probs": Case("/completion", {"prompt": "abc", "n_predict": 3, "seed": 1, "n_probs": 1}),
}

"""How a recorded request is written; and those that generate, by API and name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cllm.testing import say

TEXT = "Naïve: 5 € 😀"
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
FUNCTION: dict[str, Any] = ADD["function"]
RESPONSE_TOOL = {"type": "function", **FUNCTION}
MESSAGE_TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
THINK_END = "<think>2?</think>\n\n4"
USAGE = {"stream_options": {"include_usage": True}}
SIX: dict[str, Any] = {"max_tokens": 6, "seed": 1, "ignore_eos": True}
DARK = say("It was", fails=True)
LONG = "x" * 3000  # tokens, over the limit of 2048
NO_MODEL = "../nowhere"
USER, ADMIN, ORIGIN = "user's key", "admin's key", "https://a.example"
KEYS = "".join(
    f'[{role}]\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\nrole = "{role}"\n'
    for role, key in (("user", USER), ("admin", ADMIN))
)


class Case(NamedTuple):
    """A request, and what of its answer is compared."""

    path: str
    body: Any = None  # bytes are sent as they are
    method: str = "POST"
    headers: Mapping[str, str] = {}
    loose: bool = False  # all numbers may differ
    hold: str = ""  # the stream stays open when a line of it matches this; only its head is compared
    shows: Callable[[str], Any] | None = None  # takes what is compared from the body


Cases = dict[str, Case]
Bodies = dict[str, dict[str, Any]]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def get(path: str, **more: Any) -> Case:
    return Case(path, method="GET", **more)


def ways(path: str, base: Mapping[str, Any], bodies: Mapping[str, Mapping[str, Any]]) -> Cases:
    """Each body asked for as a whole and as a stream."""
    return {
        f"{path} {name}{', stream' if stream else ''}": Case(path, {**base, **body, "stream": stream})
        for name, body in bodies.items()
        for stream in (False, True)
    }


def each(**fields: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """One change for each value of each field."""
    return tuple({name: value} for name, values in fields.items() for value in values)


def asked(path: str, base: Mapping[str, Any], *changes: Mapping[str, Any]) -> Cases:
    """A body with each of these changes; a field that is changed to `...` is left out."""

    def change(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**base, **fields}.items() if value is not ...}

    def write(name: str, value: Any) -> str:
        text = "" if value is ... else json.dumps(value)
        return (
            f"{name}={text[:60]}{f'… ({len(text)})' if len(text) > 60 else ''}" if text else f"without {name}"
        )

    made = {
        " ".join((path, *(write(*field) for field in fields.items()))): Case(path, change(fields))
        for fields in changes
    }
    assert len(made) == len(changes), f"two changes of {path} have one name"
    return made


def refused(path: str, base: Mapping[str, Any], *changes: Mapping[str, Any]) -> Cases:
    """What is wrong with any body, then a field that is unknown, a model that is, and the `changes`."""
    text = json.dumps(base).encode()
    return {
        f"{path} not JSON": Case(path, b'{"a": nope}'),
        f"{path} cut": Case(path, text[:-1]),
        f"{path} a list": Case(path, [base]),
        f"{path} a string": Case(path, "text"),
        f"{path} null": Case(path, b"null"),
        f"{path} empty": Case(path, b""),
        f"{path} nothing": Case(path),
        f"{path} an empty object": Case(path, {}),
        f"{path} as text": Case(path, text, headers={"content-type": "text/plain"}),
        f"{path} as a form": Case(
            path, b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}
        ),
        f"{path} without type": Case(path, text, headers={"content-type": ""}),
        f"{path} with charset": Case(path, text, headers={"content-type": "application/json; charset=utf-8"}),
        f"{path} compressed": Case(path, text, headers={"content-encoding": "gzip"}),
        f"{path} nested": Case(path, {**base, "metadata": json.loads("[" * 70 + "]" * 70)}),
        f"{path} PUT": Case(path, base, "PUT"),
        **asked(path, base, {}, {"nonsense": {"a": [1]}}, {"model": NO_MODEL}, {"model": 5}, *changes),
    }


CHAT: Bodies = {
    "text": {"messages": user(say(TEXT))},
    "length": {"messages": user("abc"), **SIX},
    "two choices": {"messages": user("abc"), "n": 2, "max_tokens": 8, "seed": 3, "ignore_eos": True, **USAGE},
    "logprobs": {"messages": user("abc"), **SIX, "logprobs": True, "top_logprobs": 1},
    "usage": {"messages": user(say("Yes.")), **USAGE},
    "stop": {"messages": user(say("one two")), "stop": "two"},
    "schema": {
        "messages": user("How is the sky?"),
        "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}},
    },
    "json object": {
        "messages": user(say('{"a": 1}')),
        "response_format": {"type": "json_object"},
        "max_tokens": 12,
    },
    "error": {"messages": user(DARK)},
    "reasoning": {"messages": user(say(THINK_END))},
    "reasoning in the text": {"messages": user(say(THINK_END)), "reasoning_format": "none"},
    "tool": {"messages": user(say(f"Hm.\n{CALL}")), "tools": [ADD], **USAGE},
    "two tools": {"messages": user(say(f"{CALL}\n{CALL}")), "tools": [ADD]},
    "no tool": {"messages": user(say("No <tool, 1 < 2.")), "tools": [ADD]},
    "forced tool": {
        "messages": user("abc"),
        "seed": 1,
        "tools": [ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "required tool": {"messages": user("abc"), "seed": 1, "tools": [ADD], "tool_choice": "required"},
    "function": {"messages": user(say(CALL)), "functions": [FUNCTION]},
    "forced function": {
        "messages": user("abc"),
        "seed": 1,
        "functions": [FUNCTION],
        "function_call": {"name": "add"},
    },
    "tool result": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *user(say(CALL, "It is 42.")),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        ],
        "tools": [ADD],
    },
    "prediction": {"messages": user(say(TEXT)), "prediction": {"type": "content", "content": TEXT}},
    "biased": {"messages": user("abc"), **SIX, "logit_bias": {"97": -100, "98": 5}},
    "no model": {"messages": user(say("Yes.")), "model": None},
    "progress": {"messages": user(say("Yes.")), "return_progress": True},
}
COMPLETIONS: Bodies = {
    "text": {"prompt": say(TEXT)},
    "length": {"prompt": "abc", **SIX},
    "two prompts echoed": {"prompt": [say("one"), say("one")], "echo": True},
    "logprobs": {"prompt": "abc", **SIX, "logprobs": 2},
    "logprobs echoed": {"prompt": "abc", **SIX, "logprobs": 1, "echo": True},
    "usage": {"prompt": say("Yes."), **USAGE},
    "stop": {"prompt": say("one two"), "stop": ["e t", "zzz"]},
    "error": {"prompt": DARK},
    "tokens": {"prompt": [97, 98, 99], **SIX},
    "two choices": {"prompt": [[97], [98]], **SIX, "n": 2},
    "schema": {"prompt": "abc", "seed": 1, "response_format": {"type": "json_object", "schema": SCHEMA}},
}
RESPONSES: Bodies = {
    "text": {"input": say(TEXT)},
    "length": {"input": "abc", "max_output_tokens": 16, "seed": 1, "ignore_eos": True},
    "reasoning": {"input": say(THINK_END), "reasoning": {"effort": "low"}},
    "tool": {"input": say(f"Hm.\n{CALL}"), "tools": [RESPONSE_TOOL]},
    "custom tool": {
        "input": say('<tool_call>\n{"name": "sh", "arguments": {"input": "ls"}}\n</tool_call>'),
        "tools": [{"type": "custom", "name": "sh"}, {"type": "web_search"}],
    },
    "forced tool": {
        "input": "abc",
        "seed": 1,
        "tools": [RESPONSE_TOOL],
        "tool_choice": {"type": "function", "name": "add"},
    },
    "schema": {
        "input": "abc",
        "seed": 1,
        "text": {"format": {"type": "json_schema", "name": "sky", "schema": SCHEMA, "strict": True}},
    },
    "logprobs": {
        "input": "abc",
        "max_output_tokens": 4,
        "seed": 1,
        "ignore_eos": True,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
    },
    "echoed": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": say("Yes.")}]}],
        "instructions": "Be brief.",
        "metadata": {"order": "17"},
        "user": "ann",
        "temperature": 0.5,
        "store": False,
        "truncation": "auto",
    },
    "items": {
        "input": [
            {"type": "message", "role": "user", "content": say(CALL, "It is 42.")},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Add."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
        ]
    },
    "error": {"input": DARK},
}
MESSAGES: Bodies = {
    "text": {"messages": user(say(TEXT))},
    "length": {"messages": user("abc"), **SIX},
    "stop": {"messages": user(say("one two")), "stop_sequences": ["two"]},
    "thinking": {"messages": user(say(THINK_END)), "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "tool": {"messages": user(say(f"Hm.\n{CALL}")), "tools": [MESSAGE_TOOL]},
    "forced tool": {
        "messages": user("abc"),
        "seed": 1,
        "tools": [MESSAGE_TOOL],
        "tool_choice": {"type": "tool", "name": "add"},
    },
    "tool result": {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            *user([{"type": "text", "text": say(CALL, "It is 42.")}]),
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}],
            },
            *user([{"type": "tool_result", "tool_use_id": "t1", "content": "42"}]),
        ],
        "tools": [MESSAGE_TOOL],
    },
    "schema": {
        "messages": user("abc"),
        "seed": 1,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "error": {"messages": user(DARK)},
}
GENERATE: Bodies = {
    "text": {"prompt": say(TEXT)},
    "length": {"prompt": "abc", **SIX},
    "stop": {"prompt": say("one two"), "stop": ["two"]},
    "regex": {"prompt": "abc", "seed": 1, "regex": "[0-9]{4}"},
    "choice": {"prompt": "abc", "seed": 1, "choice": ["red", "blue"]},
    "grammar": {"prompt": "abc", "seed": 1, "grammar": 'root ::= "yes" | "no"'},
    "all sampling fields": {
        "prompt": say("Yes."),
        "max_tokens": 64.0,
        "top_k": -1,
        "top_p": None,
        "logit_bias": [[97, False], [98, 2]],
        "stop_token_ids": [1],
        "samplers": "kt",
        "priority": 10**6,
        "timeout": 30,
        "cache_prompt": False,
        "speculate": False,
        "min_tokens": 1,
    },
    "error": {"prompt": DARK},
}
COMPLETION: Bodies = {
    "text": {"prompt": say("Yes: é"), "n_predict": 30},
    "probabilities": {"prompt": "abc", "n_predict": 3, "seed": 1, "n_probs": 1},
    "probabilities after": {
        "prompt": "abc",
        "n_predict": 3,
        "seed": 1,
        "n_probs": 1,
        "post_sampling_probs": True,
    },
    "tokens": {"prompt": [97, "bc<|x|>"], "n_predict": 3, "seed": 1, "return_tokens": True},
    "two prompts": {"prompt": ["abc", "abd"], "n_predict": 3, "seed": 1},
    "two choices": {"prompt": {"prompt_string": "abc"}, "n_predict": 3, "seed": 1, "n_cmpl": 2},
    "fields": {"prompt": say("Yes."), "response_fields": ["content", "generation_settings/n_predict"]},
    "clamped": {"prompt": say("Yes."), "temperature": 1e9, "top_p": -3, "stop": ["", "s"], "n_predict": -1},
    "biased by text": {"prompt": "abc", "n_predict": 3, "seed": 1, "logit_bias": [["ab", False], [99, 1]]},
    "error": {"prompt": DARK},
}
API_CHAT: Bodies = {
    "text": {"messages": user(say(TEXT))},
    "thinking": {"messages": user(say(THINK_END)), "think": True},
    "tool": {"messages": user(say(f"Hm.\n{CALL}")), "tools": [ADD]},
    "length": {"messages": user("abc"), "options": {"num_predict": 6, "seed": 1, "ignore_eos": True}},
    "format": {"messages": user("abc"), "format": SCHEMA, "options": {"seed": 1}},
    "logprobs": {
        "messages": user("abc"),
        "options": {"num_predict": 3, "seed": 1},
        "logprobs": True,
        "top_logprobs": 1,
    },
    "load": {},
    "tool result": {
        "messages": [
            *user(say(CALL, "It is 42.")),
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
            {"role": "tool", "tool_name": "add", "content": "42"},
        ]
    },
    "error": {"messages": user(DARK)},
}
API_GENERATE: Bodies = {
    "text": {"prompt": say(TEXT), "system": "Be brief."},
    "raw": {"prompt": say("Yes."), "raw": True, "options": {"stop": "s"}},
    "json": {"prompt": say('{"a": 1}'), "format": "json", "options": {"num_predict": 12}},
    "suffix": {"prompt": "a", "suffix": "c"},
    "load": {},
    "unload": {"keep_alive": 0},
    "error": {"prompt": DARK},
}

NAMED = {"model": "m"}
LIMITED = {"model": "m", "max_tokens": 200}
GENERATING: dict[str, Cases] = {
    "cllm": {
        **ways("/generate", {"max_tokens": 80}, GENERATE),
        **{
            f"/generate_stream {name}": Case("/generate_stream", GENERATE[name])
            for name in ("text", "length", "error")
        },
    },
    "completions": ways("/v1/completions", {"model": "m", "max_tokens": 80}, COMPLETIONS),
    "chat": {
        **ways("/v1/chat/completions", LIMITED, CHAT),
        **ways("/chat/completions", LIMITED, {"text": CHAT["usage"]}),
    },
    "responses": {
        **ways("/v1/responses", {"model": "m", "max_output_tokens": 200}, RESPONSES),
        **ways("/responses", NAMED, {"text": {"input": say("Yes.")}}),
    },
    "messages": ways("/v1/messages", LIMITED, MESSAGES),
    "llama": {
        **ways("/completion", {}, COMPLETION),
        **ways("/completions", {}, {"text": COMPLETION["text"]}),
        **ways("/infill", {"input_prefix": "a", "input_suffix": "c"}, {"gap": {}}),
    },
    "ollama": {**ways("/api/chat", NAMED, API_CHAT), **ways("/api/generate", NAMED, API_GENERATE)},
}

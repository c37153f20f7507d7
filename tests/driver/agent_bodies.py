"""Bodies shaped like those that coding agents send: their first request, and the turns after it."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]


def text(value: str, **more: Any) -> Body:
    return {"type": "text", "text": value, **more}


# Anthropic's: several system blocks with a billing line, long descriptions, system messages anywhere.

CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: Body = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_1"},
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.197.f3a; cc_entrypoint=cli; cch=1c2d3;"),
        text("You are an agent for a command line.", **CACHED),
        text("Sirius: the rules.", **CACHED),
    ],
    "tools": [
        {"name": "Bash", "description": "Rigel runs. " * 1565, "input_schema": {"type": "object"}},
        {"name": "mcp__files__read", "description": "Reads", "input_schema": {"type": "object"}, **CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "messages": [
        {
            "role": "user",
            "content": [text("<system-reminder>Vega</system-reminder>"), text("Deneb?", **CACHED)],
        },
        {"role": "system", "content": "Antares: a reminder."},
    ],
}
CLAUDE_TURNS: list[list[Body]] = [
    [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Mira", "signature": "EqQBCgIYAhIM"},
                text("A look."),
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "pwd"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Pollux"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [
                        text("Castor"),
                        {"type": "image", "source": {"type": "base64", "data": "AA=="}},
                    ],
                },
                text("<system-reminder>Altair</system-reminder>"),
            ],
        },
    ],
    [
        {"role": "assistant", "content": [text("Done.")]},
        {"role": "system", "content": "Bellatrix: another reminder."},
        {"role": "user", "content": "Thanks."},
    ],
]


# OpenAI's: hosted tools and namespaces, two users in a row, calls of tools that are no functions.

CODEX: Body = {
    "model": "gpt-5-codex",
    "instructions": "Sirius: the rules.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Antares."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>Vega"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Deneb?"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec",
            "strict": False,
            "parameters": {"type": "object", "properties": {}},
        },
        {"type": "namespace", "name": "mcp", "description": "", "tools": [{"type": "function", "name": "x"}]},
        {"type": "custom", "name": "apply_patch", "description": "Edits", "format": {"type": "grammar"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
}
CODEX_TURNS: list[list[Body]] = [
    [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Rigel"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Pollux"},
        {
            "type": "local_shell_call",
            "call_id": "c2",
            "status": "completed",
            "action": {"type": "exec", "command": ["Altair"]},
        },
        {"type": "local_shell_call_output", "call_id": "c2", "output": '{"output": "Castor"}'},
        {"type": "function_call", "call_id": "c3", "name": "ex ec", "arguments": '{"command": ["Mira'},
        {
            "type": "function_call_output",
            "call_id": "c3",
            "output": [{"type": "input_text", "text": "Spica"}],
        },
    ],
    [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        {"type": "message", "role": "developer", "content": "Bellatrix."},
        {"type": "message", "role": "user", "content": "Thanks."},
    ],
]

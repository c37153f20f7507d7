"""`cllm launch`: coding agents pointed at a running server, by variables and options of their own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from typing import Annotated, NamedTuple

import typer
from typer import Argument, Option

from cllm.cli.client import KEY_VARIABLE, ServerClient, Url, get_key
from cllm.errors import ConfigError, ServerUnreachable

NO_KEY = "none"  # a server without keys takes any
ANY_MODEL, ANY_CONTEXT = "cllm", 32768  # what `--print` shows where no server runs
ANSWER_TOKENS = 4096
Settings = tuple[dict[str, str], tuple[str, ...]]  # variables, and the words after the program's name


class AgentServer(NamedTuple):
    """The server as a program must know it."""

    url: str
    model: str
    context: int  # tokens of one request
    key: str = NO_KEY


class Agent(NamedTuple):
    """A program: how it is called, installed and pointed at a server; how many tokens it begins with."""

    executable: str
    install: str
    begins_with: int
    settings: Callable[[AgentServer], Settings]


def claude_settings(server: AgentServer) -> Settings:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": server.key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return variables, ()


def codex_settings(server: AgentServer) -> Settings:
    values: dict[str, str | int] = {
        "model": server.model,
        "model_provider": "cllm",
        "model_context_window": server.context,
        "model_auto_compact_token_limit": server.context * 8 // 10,
        "model_providers.cllm.name": "cllm",
        "model_providers.cllm.base_url": f"{server.url}/v1",
        "model_providers.cllm.wire_api": "responses",
    }
    if server.key != NO_KEY:
        values["model_providers.cllm.env_key"] = KEY_VARIABLE
    words = [word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return {KEY_VARIABLE: server.key} if server.key != NO_KEY else {}, tuple(words)


def opencode_settings(server: AgentServer) -> Settings:
    limit = {"context": server.context, "output": min(ANSWER_TOKENS, server.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "cllm",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    config = {"model": f"cllm/{server.model}", "provider": {"cllm": provider}}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, ()


def aider_settings(server: AgentServer) -> Settings:
    variables = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
    return variables, ("--model", f"openai/{server.model}", "--edit-format", "diff")


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", 20_000, claude_settings),
    "codex": Agent("codex", "npm install -g @openai/codex", 7_000, codex_settings),
    "opencode": Agent("opencode", "npm install -g opencode-ai", 8_000, opencode_settings),
    "aider": Agent("aider", "pip install aider-chat", 3_000, aider_settings),
}


def launch_command(
    program: Annotated[str, Argument(metavar="PROGRAM", help="claude, codex, opencode or aider.")],
    arguments: Annotated[
        list[str] | None, Argument(metavar="ARGS", help="Passed on to it; after --.", show_default=False)
    ] = None,
    url: Url = "",
    model: Annotated[
        str,
        Option(metavar="NAME", help="One of the server's models. Default: its first.", show_default=False),
    ] = "",
    only_print: Annotated[bool, Option("--print", help="Print the lines to paste; run nothing.")] = False,
) -> None:
    """Run a coding agent on a running server: sets the variables and options that it wants.

    Its own configuration files stay as they are.
    """
    if program not in AGENTS:
        raise ConfigError(f"{program}: there are {', '.join(AGENTS)}; docs/agents.md has lines for others")
    agent = AGENTS[program]
    server = _find_server(url, model, optional=only_print)
    if only_print:
        _print_lines(agent, server, arguments or [])
        return
    if (path := shutil.which(agent.executable)) is None:
        raise ConfigError(f"{agent.executable} is not installed: `{agent.install}`")
    if server.context < agent.begins_with:
        typer.echo(
            f"cllm: {program} begins with about {agent.begins_with:,} tokens, and this server takes "
            f"{server.context:,}: serve with a larger --ctx-size",
            err=True,
        )
    variables, words = agent.settings(server)
    os.execve(path, [agent.executable, *words, *(arguments or [])], {**os.environ, **variables})


def _find_server(url: str, model: str, *, optional: bool) -> AgentServer:
    """The server and one of its models; with `optional`, a server that does not run has what it may have."""
    with ServerClient(url) as client:
        try:
            name, context = client.find_model(model)[:2]
        except ServerUnreachable:
            if not optional:
                raise
            typer.echo(f"cllm: no server answers at {client.url}: name and context are examples", err=True)
            name, context = model or ANY_MODEL, ANY_CONTEXT
        return AgentServer(client.url, name, context or ANY_CONTEXT, get_key() or NO_KEY)


def _print_lines(agent: Agent, server: AgentServer, arguments: list[str]) -> None:
    """Shell lines. A key is named by its variable, not shown."""
    variables, words = agent.settings(server)
    for name, value in variables.items():
        if name == KEY_VARIABLE:
            continue
        quoted = shlex.quote(value)
        if server.key != NO_KEY and server.key in value:
            before, after = (shlex.quote(part) if part else "" for part in value.split(server.key, 1))
            quoted = f'{before}"${KEY_VARIABLE}"{after}'
        typer.echo(f"export {name}={quoted}")
    typer.echo(shlex.join([agent.executable, *words, *arguments]))

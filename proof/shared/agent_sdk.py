"""One turn of an agent made with a library, run in that library's own environment: it is the program.

`python agent_sdk.py PACKAGE MODEL HISTORY PROMPT`: continues the session in the file HISTORY, if there is
one, and prints the answer. The server is in `OPENAI_BASE_URL`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: The file to read.
    """
    return Path(path).read_text(encoding="utf-8")


def write_file(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: The file to write.
        text: Its new text.
    """
    Path(path).write_text(text, encoding="utf-8")
    return "written"


INSTRUCTIONS = "You change files for the user. " + "Be brief, be exact, and say what you have done. " * 40


def run_openai_agents(model: str, history: Path, prompt: str) -> str:
    from agents import Agent, Runner, SQLiteSession, function_tool  # type: ignore[import-not-found]

    tools = [function_tool(read_file), function_tool(write_file)]
    agent = Agent(name="editor", instructions=INSTRUCTIONS, model=model, tools=tools)
    session = SQLiteSession("session", str(history))
    return str(Runner.run_sync(agent, prompt, session=session).final_output)


def run_pydantic_ai(model: str, history: Path, prompt: str) -> str:
    from pydantic_ai import Agent, ModelMessagesTypeAdapter  # type: ignore[import-not-found]

    agent = Agent(f"openai-chat:{model}", instructions=INSTRUCTIONS, tools=[read_file, write_file])
    earlier = ModelMessagesTypeAdapter.validate_json(history.read_bytes()) if history.exists() else None
    result = agent.run_sync(prompt, message_history=earlier)
    history.write_bytes(result.all_messages_json())
    return str(result.output)


if __name__ == "__main__":
    package, model, history, prompt = sys.argv[1:]
    run = run_openai_agents if package == "openai-agents" else run_pydantic_ai
    print(run(model, Path(history), prompt))

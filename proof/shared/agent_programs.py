"""Coding agents as they come from npm and PyPI: how each is installed, pointed at a server, and run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from cllm.build.toolchain import cache_directory
from cllm.cli.launch import AGENTS, AgentServer, Settings
from cllm.errors import SetupError
from cllm.testing import call_tool

INSTALL_S = 900.0
MODEL = "cllm"  # any plain name is served by the one model
BEFORE, AFTER = "alpha\n", "beta\n"  # what the tool loop does to a file
SDK_SCRIPT = Path(__file__).with_name("agent_sdk.py")


def agents_folder() -> Path:
    """Where the programs are installed: never the project's own environment."""
    return cache_directory() / "agents"


class Program(ABC):
    """One agent: its package, its configuration, its command line.

    `home` is its own home folder; it works in `home / "work"`. `context` is the server's limit of one
    request, in tokens.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    one_task: ClassVar[bool] = False  # no run continues another: a session is a task of many tool calls
    keeps_user_text: ClassVar[bool] = False  # when it compacts
    edits_in_text: ClassVar[bool] = False  # its model answers with the change itself, and is not asked again
    moves_text: ClassVar[bool] = False  # to the end of each prompt: no cache can have what follows history
    compacts: ClassVar[bool] = True  # or shows the server's refusal
    prompt_on_stdin: ClassVar[bool] = False
    agent: ClassVar[str] = ""  # its name for `cllm launch`
    context = 0

    def settings(self, url: str) -> Settings:
        """The variables and words with which `cllm launch` runs it."""
        return AGENTS[self.agent].settings(AgentServer(url, MODEL, self.context))

    @property
    def folder(self) -> Path:
        """Where it is installed, alone."""
        return agents_folder() / self.package.lstrip("@").replace("/", "-")

    @abstractmethod
    def install(self) -> None:
        """Install the newest version. Raises SetupError."""

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def command(self, prompt: str, home: Path, url: str, *, later: bool) -> Sequence[str]:
        """Its command line for one turn; a `later` one continues the session before it."""

    @abstractmethod
    def change_file(self, file: Path) -> Sequence[str]:
        """What the model says, turn by turn, to read a file and change BEFORE in it to AFTER."""

    def environment(self, home: Path, url: str) -> Mapping[str, str]:
        return {}

    def configure(self, home: Path, url: str, context: int) -> None:
        """Write its configuration files, if it has any."""
        self.context = context


def run_quietly(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """The output of a command. Raises SetupError with its end if it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise SetupError(f"{' '.join(command[:4])} failed: {(done.stdout + done.stderr)[-600:]}")
    return done.stdout.strip()


class NodeProgram(Program):
    """A program of npm, in a folder of its own."""

    executable: ClassVar[str]
    platform_package: ClassVar[str] = ""  # holds the binary

    @property
    def path(self) -> str:
        return str(self.folder / "node_modules" / ".bin" / self.executable)

    def install(self) -> None:
        if shutil.which("npm") is None:
            raise SetupError("npm is missing: install Node.js 20 or newer")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "package.json").write_text('{"private": true}\n')
        version = self._find_version() if self.platform_package else "latest"
        flags = ("--no-audit", "--no-fund", "--loglevel=error")
        run_quietly("npm", "install", *flags, f"{self.package}@{version}", cwd=self.folder)

    def _find_version(self) -> str:
        """The newest that is there with its binary for this platform: either may lag behind the other."""
        arch = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        names = (self.package, f"{self.platform_package}-{sys.platform}-{arch}")
        own, binary = (json.loads(run_quietly("npm", "view", name, "versions", "--json")) for name in names)
        released = [version for version in own if version in binary and "-" not in version]
        if not released:
            raise SetupError(f"no version of {names[0]} has its {names[1]}")
        return str(released[-1])

    def version(self) -> str:
        file = self.folder / "node_modules" / self.package / "package.json"
        return str(json.loads(file.read_text())["version"]) if file.exists() else ""


class ClaudeCode(NodeProgram):
    name, package, executable = "Claude Code", "@anthropic-ai/claude-code", "claude"
    agent = "claude"

    def environment(self, home: Path, url: str) -> Mapping[str, str]:
        return self.settings(url)[0]

    def command(self, prompt: str, home: Path, url: str, *, later: bool) -> Sequence[str]:
        flags = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Read,Edit")
        return (self.path, "-p", prompt, *flags, *(("--continue",) if later else ()))

    def change_file(self, file: Path) -> Sequence[str]:
        edit = {"file_path": str(file), "old_string": BEFORE.strip(), "new_string": AFTER.strip()}
        return call_tool("Read", {"file_path": str(file)}), call_tool("Edit", edit)


class Codex(NodeProgram):
    name, package, executable = "Codex CLI", "@openai/codex", "codex"
    keeps_user_text = True
    agent = "codex"

    def environment(self, home: Path, url: str) -> Mapping[str, str]:
        return {"CODEX_HOME": str(home / ".codex")}

    def configure(self, home: Path, url: str, context: int) -> None:
        super().configure(home, url, context)
        folder = home / ".codex"
        folder.mkdir()
        (folder / "config.toml").write_text(
            "check_for_update_on_startup = false\n[analytics]\nenabled = false\n"
        )

    def command(self, prompt: str, home: Path, url: str, *, later: bool) -> Sequence[str]:
        flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        resume = ("resume", "--last") if later else ()
        return (self.path, *self.settings(url)[1], "exec", *flags, *resume, prompt)

    def change_file(self, file: Path) -> Sequence[str]:
        read = call_tool("exec_command", {"cmd": f"cat {file}"})
        return read, call_tool("exec_command", {"cmd": f"sed -i s/alpha/beta/ {file}"})


class OpenCode(NodeProgram):
    name, package, executable = "opencode", "opencode-ai", "opencode"
    platform_package = "opencode"
    prompt_on_stdin = True  # it escapes quotes in arguments
    agent = "opencode"

    def environment(self, home: Path, url: str) -> Mapping[str, str]:
        return {
            **self.settings(url)[0],
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }

    def command(self, prompt: str, home: Path, url: str, *, later: bool) -> Sequence[str]:
        return (self.path, "run", "--pure", "--auto", *(("--continue",) if later else ()))

    def change_file(self, file: Path) -> Sequence[str]:
        edit = {"filePath": str(file), "oldString": BEFORE.strip(), "newString": AFTER.strip()}
        return call_tool("read", {"filePath": str(file)}), call_tool("edit", edit)


class Cline(NodeProgram):
    name, package, executable = "Cline", "cline", "cline"
    platform_package = "@cline/cli"
    one_task = True  # --id opens the terminal interface, and takes no prompt

    def configure(self, home: Path, url: str, context: int) -> None:
        options = ("--apikey", "none", "--modelid", MODEL, "--baseurl", f"{url}/v1")
        variables = base_environment(home, url) | dict(self.environment(home, url))
        run_quietly(self.path, "auth", "--provider", "openai-compatible", *options, env=variables)

    def environment(self, home: Path, url: str) -> Mapping[str, str]:
        return {"CLINE_SESSION_BACKEND_MODE": "local"}  # no daemon, which would outlive the run

    def command(self, prompt: str, home: Path, url: str, *, later: bool) -> Sequence[str]:
        return (self.path, "--json", prompt)

    def change_file(self, file: Path) -> Sequence[str]:
        edit = {"path": str(file), "old_text": BEFORE.strip(), "new_text": AFTER.strip()}
        return call_tool("read_files", {"files": [{"path": str(file)}]}), call_tool("editor", edit)


class PythonProgram(Program):
    """A program of PyPI, in a virtual environment of its own."""

    packages: ClassVar[tuple[str, ...]]

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def install(self) -> None:
        if not Path(self.python).exists():
            run_quietly(sys.executable, "-m", "venv", str(self.folder))
        run_quietly(self.python, "-m", "pip", "install", "--quiet", "--upgrade", *self.packages)

    def version(self) -> str:
        if not Path(self.python).exists():
            return ""
        code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
        return run_quietly(self.python, "-c", code, self.package)


class Aider(PythonProgram):
    """It edits by blocks of text, not by tools, and repeats its instructions after the history."""

    edits_in_text = moves_text = True

    name, package, packages = "aider", "aider-chat", ("aider-chat",)
    agent = "aider"

    def environment(self, home: Path, url: str) -> Mapping[str, str]:
        return self.settings(url)[0]

    def configure(self, home: Path, url: str, context: int) -> None:
        super().configure(home, url, context)
        limits = {"max_input_tokens": context, "max_tokens": context, "max_output_tokens": 4096}
        about = {**limits, "litellm_provider": "openai", "mode": "chat"}
        (home / ".aider.model.metadata.json").write_text(json.dumps({f"openai/{MODEL}": about}))

    def command(self, prompt: str, home: Path, url: str, *, later: bool) -> Sequence[str]:
        flags = ("--yes-always", "--no-git", "--no-check-update", "--analytics-disable")
        model = (*self.settings(url)[1], "--file", "notes.txt", "--map-tokens", "0")
        more = ("--restore-chat-history",) if later else ()
        executable = str(self.folder / "bin" / "aider")
        return (executable, *flags, "--no-pretty", "--no-stream", *model, *more, "--message", prompt)

    def change_file(self, file: Path) -> Sequence[str]:
        block = f"<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE"
        return (f"{file.name}\n```\n{block}\n```\n",)


class SdkProgram(PythonProgram):
    """A library: `agent_sdk.py` is the program."""

    compacts = False

    def environment(self, home: Path, url: str) -> Mapping[str, str]:
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }

    def command(self, prompt: str, home: Path, url: str, *, later: bool) -> Sequence[str]:
        return (self.python, "-P", str(SDK_SCRIPT), self.package, MODEL, str(home / "history"), prompt)

    def change_file(self, file: Path) -> Sequence[str]:
        read = call_tool("read_file", {"path": str(file)})
        return read, call_tool("write_file", {"path": str(file), "text": AFTER})


class OpenAIAgents(SdkProgram):
    name, package, packages = "openai-agents", "openai-agents", ("openai-agents",)


class PydanticAI(SdkProgram):
    name, package = "pydantic-ai", "pydantic-ai-slim"
    packages = ("pydantic-ai-slim[openai,anthropic]",)


PROGRAMS: tuple[Program, ...] = (
    *(ClaudeCode(), Codex(), OpenCode(), Cline(), Aider()),
    *(OpenAIAgents(), PydanticAI()),
)


def base_environment(home: Path, proxy: str) -> dict[str, str]:
    """The variables of every program: none of ours, and a proxy that lets nothing out of this machine."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        "http_proxy": proxy,
        "https_proxy": proxy,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }

"""Every command of the README and the documents runs as it is written; each exception has its reason here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.driver.hub import FakeHub
from tests.driver.server import ROOT, Server, StartServer, environment
from tests.tiny_media import make_causal
from tests.tiny_models import make_adapter, make_dense

# Lines that are not run, by their beginning.
NOT_RUN = {
    "make ": "CI runs `make check` and `make test`; the others are named in the Makefile",
    "cllm doctor MODEL --full": "minutes, and ✗ for random weights; tests/contract/test_checkup.py",
    "python -m venv lm-eval": "installs 0.8 GB; proof/evaluation.py",
    "lm-eval/": "the same",
    "cllm build": "compiles for minutes; tests/unit/build",
    "cllm llama-server": "test_llama_routes",
    "cllm_server": "the earlier server's spelling; test_cli",
    "cllm chat": "answers until it is left; test_chat",
    "echo ": "the same in a pipe; test_chat",
    "cllm launch": "runs other programs; test_launch",
    "cllm load": "needs a server of several models; test_launch",
    "cllm unload": "the same",
    "cllm cluster": "needs Ray; `proof/cluster.py`, tests/unit/cli/test_cluster.py",
    "cllm serve MODEL --cluster": "likewise; test_cluster without Ray",
    "scp ": "needs a second machine",
    "ssh ": "likewise",
    "docker ": "needs a daemon; tests/unit/test_wheel.py reads the Dockerfile",
    "pip install ": "`proof/wheel.py`",
    "cllm service install model.gguf": "needs the systemd of a user; tests/unit/cli/test_service.py",
    "cllm service status": "likewise",
    "cllm service remove": "likewise",
    "curl localhost:18081/v1/completions": "the server of the line before; test_adapters",
    "curl localhost:18081/admin/adapters": "likewise",
    "curl localhost:18081/v1/chat/completions": "likewise; test_pictures",
    "curl -X DELETE localhost:18081/admin/adapters": "likewise",
    "OPENAI_API_BASE_URL=": "another program; test_clients_open_webui",
    "CLLM_API_KEY=cllm-": "an address for containers; test_clients_open_webui",
}
LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}'
)
BLOCK = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = (
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.name.startswith("log")),
)
CLLM = f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c 'from cllm.cli.main import main; main()' \"$@\"\n"


class Command(NamedTuple):
    """A line of a document, with its continuation lines."""

    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line[:60]}"


def read_commands(page: Path) -> Iterator[Command]:
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"(^|\s{2,})#.*", "", line).strip()
            for part in words.split("; ") if words.startswith("cllm ") else [words] * bool(words):
                yield Command(str(page.relative_to(ROOT)), part)


def choose(line: str) -> str:
    """The line as one reader types it: optional parts are left out, examples are those of the hub here."""
    for shown, typed in {
        r" \[[^\]]+\]": "",
        r"^(cllm serve\b.*) --port 18081": r"\1",  # the server gets a free one
        r"^\.venv/bin/cllm": "cllm",
        r"^cllm search .*": "cllm search repo",
        r"^cllm rm ": "cllm rm --yes ",
        r"HF_ENDPOINT=\S+ ": "",
    }.items():
        line = re.sub(shown, typed, line)
    return line


COMMANDS = [command for page in PAGES for command in read_commands(page)]
# By what is typed: where several pages say the same, it is run once.
RUN = {choose(each.line): each for each in COMMANDS if not each.line.startswith(tuple(NOT_RUN))}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of a home with `cllm` on the PATH, a folder with the model NAME, and a hub with USER/REPO."""
    home = tmp_path_factory.mktemp("home")
    for folder in ("bin", "models", "media"):
        (home / folder).mkdir()
    (home / "bin" / "cllm").write_text(CLLM)
    (home / "bin" / "cllm").chmod(0o755)
    model = make_dense(home / "tiny.gguf")
    make_causal(home / "media").mmproj.rename(home / "media" / "mmproj.gguf")
    for name in ("sql", "legal"):
        make_adapter(home / f"{name}-lora.gguf")
    files = {"tiny-Q4_K_M.gguf": model.read_bytes(), "tiny-Q8_0.gguf": model.read_bytes()}
    with FakeHub({"USER/REPO": files}) as hub:
        yield {
            **hub.environment,
            "HOME": str(home),
            "CLLM_CACHE_DIR": os.environ.get("CLLM_CACHE_DIR", str(Path.home() / ".cache" / "cllm")),
            "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HF_HOME": str(home / "hf"),
            "MODELSCOPE_CACHE": str(home / "ms"),
            "CLLM_MODEL_DIR": str(home / "models"),
        }


def fill_in(line: str, place: dict[str, str], server: Server) -> str:
    """The line with the model and the server of this test."""
    model = f"{place['HOME']}/tiny.gguf"
    for shown, real in {
        r"(/path/to/)?\bmodel\.gguf\b": model,
        r"\bMODEL\b(?!=)": model,
        r"\bbase\.gguf\b": model,
        r"\bmmproj\.gguf\b": f"{place['HOME']}/media/mmproj.gguf",
        r"=(\w+-lora\.gguf)": rf"={place['HOME']}/\1",
        r"http://(127\.0\.0\.1|localhost):18081": server.url,
        r"\bkeys\.toml": f"{place['HOME']}/keys.toml",
        r"\bcllm run\b": "cllm run --max-tokens 16",  # a base model does not end its answer
    }.items():
        line = re.sub(shown, real, line)
    return line


@pytest.mark.parametrize("typed", RUN, ids=lambda typed: str(RUN[typed]))
def test_a_command_runs(
    typed: str, place: dict[str, str], embedded: Server, start: StartServer, tmp_path: Path
) -> None:
    shutil.copy(f"{place['HOME']}/tiny.gguf", f"{place['CLLM_MODEL_DIR']}/NAME.gguf")
    for name in ("question.txt", "notes.txt"):
        (tmp_path / name).write_text("Why is the sky blue?")
    (tmp_path / "night.jsonl").write_text(LINE)
    line = fill_in(typed, place, embedded)
    words = shlex.split(line)
    if words[:2] == ["cllm", "serve"]:
        assert start(*words[2:], "--ctx-size", "1024", **place).get("/health")
        return
    done = subprocess.run(
        ["bash", "-ec", line],
        cwd=tmp_path,
        env=environment(**place, CLLM_URL=embedded.url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_exception_is_out_of_date() -> None:
    for beginning in NOT_RUN:
        assert any(command.line.startswith(beginning) for command in COMMANDS), beginning

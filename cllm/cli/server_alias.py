"""`cllm_server --model-path M --port 18081`: how the earlier server was called."""

from __future__ import annotations

import sys

from cllm.cli.main import app


def main() -> None:
    """Translate `--model-path` and pass everything else on to `cllm serve`."""
    given, arguments = sys.argv[1:], ["serve"]
    while given:
        word = given.pop(0)
        if word == "--model-path" and given:
            arguments.append(given.pop(0))
        elif word.startswith("--model-path="):
            arguments.append(word.removeprefix("--model-path="))
        else:
            arguments.append(word)
    app(arguments, prog_name="cllm_server")

"""The published chat templates render as Transformers renders them.

Every template of llama.cpp's source × every shape of `tests/driver/chat_shapes.py`: each text that a template
makes here is held against Transformers' own, with the same messages and variables. A table says how many
prompts are those that Transformers makes of the client's messages, and which templates got them rewritten.
Transformers is installed without its dependencies, into a folder of its own under the cache.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from cllm.build.toolchain import cache_directory, run_pip
from cllm.testing import FakeVocabulary
from cllm.text.chat_template import ChatTemplate, TemplateRefused
from cllm.text.message_rewrites import prepare
from cllm.text.prompt import PromptBuilder
from proof.command import make_parser
from tests.driver.chat_shapes import SHAPES
from tests.driver.corpus import template_files

VERSION = "4.57.1"
# Transformers' sandbox forbids `append` and `pop` on lists; llama.cpp and cllm allow them.
QUEUES = ("append", "pop")
Render = Callable[..., str]


def load_transformers() -> Any:
    """Transformers' module of chat templates, without the rest of the package."""
    folder = cache_directory() / f"transformers-{VERSION}"
    if not (folder / "transformers").exists():
        run_pip("install", "--no-deps", "--target", str(folder), f"transformers=={VERSION}")
    for name in ("transformers", "transformers.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    stand_in = types.ModuleType("transformers.utils.logging")
    stand_in.get_logger = lambda name: None  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    found = types.ModuleType("transformers.utils.import_utils")
    for library in ("jinja", "torch", "vision"):
        setattr(found, f"is_{library}_available", lambda library=library: library == "jinja")
    sys.modules[found.__name__] = found
    return importlib.import_module("transformers.utils.chat_template_utils")


class Spelled(FakeVocabulary):
    begin_text = "<s>"
    end_text = "</s>"


class Compared(ChatTemplate):
    """A template whose every text is held against Transformers'."""

    def __init__(self, source: str, theirs: Render) -> None:
        super().__init__(source)
        self._theirs = theirs
        self.count = 0
        self.different: list[str] = []
        self.last: dict[str, Any] = {}

    def render(self, /, **variables: Any) -> str:
        self.count += 1
        self.last = variables
        expected = self._theirs(**variables)
        try:
            text = super().render(**variables)
        except TemplateRefused as error:
            if not expected.startswith("refused"):
                self.different.append(f"only cllm: {error}")
            raise
        if text != expected and not any(f"'{name}' of 'list'" in expected for name in QUEUES):
            self.different.append(f"{text[-300:]!r}, not {expected[-300:]!r}")
        return text


def compare(module: Any, source: str) -> tuple[Compared, int]:
    """One template: what was compared, and how many shapes are rendered as the client sent them."""
    compiled = module._compile_jinja_template(source)

    def theirs(**variables: Any) -> str:
        try:
            return str(compiled.render(**variables))
        except Exception as error:
            return f"refused: {error}"

    template = Compared(source, theirs)
    builder = PromptBuilder(Spelled(), template)
    same = 0
    for shape in SHAPES.values():
        chat = shape.chat()
        text = builder.render(chat)
        given = {**template.last, "messages": prepare(chat.messages), "tools": list(chat.tools) or None}
        same += text == theirs(**given) + chat.prefill
    return template, same


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, only=("", "templates with this in their name"))
    only = parser.parse_args(arguments).only
    module = load_transformers()
    texts = same = shapes = 0
    wrong: list[str] = []
    for name, path in template_files().items():
        if only.lower() not in name.lower():
            continue
        template, as_given = compare(module, path.read_text())
        texts, same, shapes = texts + template.count, same + as_given, shapes + len(SHAPES)
        wrong += [f"{name}: {difference}" for difference in template.different]
        print(f"{name:50} {template.count:4} texts, {as_given:2} of {len(SHAPES)} shapes as they were sent")
    print(f"{texts} texts, {len(wrong)} not as Transformers makes them")
    print(f"{same} of {shapes} prompts are those that Transformers makes of the client's messages")
    print(*wrong, sep="\n")
    return 1 if wrong else 0

"""The chat templates that llama.cpp's source carries take every shape of conversation that agents send."""

from __future__ import annotations

import pytest

from cllm.testing import FakeVocabulary
from cllm.text.chat_template import ChatTemplate
from cllm.text.prompt import PromptBuilder
from tests.driver.chat_shapes import GROWING, SHAPES, TOOLS, Shape
from tests.driver.corpus import template_files

# These put something before the last message of the user, or at the end, and move it in each turn.
MOVING = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "the preamble",
    "Mistral-Small-3.2-24B-Instruct-2506": "the tools",
    "mistralai-Mistral-Nemo-Instruct-2407": "the tools",
    "StepFun3.5-Flash": "marks of the reasoning",
}


class Spelled(FakeVocabulary):
    begin_text = "<s>"
    end_text = "</s>"


def find_names() -> list[str]:
    try:
        return list(template_files())
    except pytest.skip.Exception:
        return []


@pytest.mark.parametrize("name", find_names())
def test_a_template_takes_every_shape_and_keeps_the_prefix(name: str) -> None:
    builder = PromptBuilder(Spelled(), ChatTemplate(template_files()[name].read_text()))
    for shape, given in SHAPES.items():
        rendered = builder.render(given.chat())
        lost = [word for word in given.words.split() if word not in rendered]
        assert not lost, (shape, lost, rendered)

    def render(count: int, *, ends: bool) -> str:
        return builder.render(Shape(GROWING[:count], "", TOOLS).chat(add_generation_prompt=ends))

    asked = [
        count
        for count in range(1, len(GROWING))
        if GROWING[count]["role"] == "assistant" != GROWING[count - 1]["role"]
    ]
    for count, later in zip(asked, [*asked[1:], len(GROWING)], strict=True):
        before = render(count, ends=False).removesuffix(Spelled.end_text)  # some write it only at the end
        after = render(later, ends=True)
        assert after.startswith(before) or name in MOVING, f"turn {count}: {before!r}, then {after!r}"


def test_the_whole_corpus_is_there() -> None:
    assert len(template_files()) >= 70
    assert set(MOVING) <= set(template_files())

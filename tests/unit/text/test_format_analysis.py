"""Formats derived from chat templates: turns that a template writes are read back, for every one of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cllm.errors import InvalidRequest
from cllm.testing import FakeVocabulary
from cllm.text.chat_format import GENERIC, CallStyle, Tool
from cllm.text.chat_template import ChatTemplate
from cllm.text.format_analysis import KEYS, NAMES, REASON, TEXT, USER, VALUES, derive_format
from cllm.text.prompt import Chat, PromptBuilder
from scripts import format_table
from tests.driver.corpus import template_files
from tests.driver.turns import check_turns, get_family
from tests.unit.text.formats import FORMATS

TURNS = 4  # of each template; `proof/formats.py` reads 200


def test_every_turn_that_a_template_writes_is_read_back() -> None:
    wrong: list[str] = []
    for name in template_files():
        read, failed = check_turns(get_family(name), seed=0, count=TURNS)
        assert read, name
        wrong += failed
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen-Qwen3-0.6B", "hermes"),
        ("moonshotai-Kimi-K2", "kimi"),
        ("Qwen3-Coder", "coder"),
        ("GLM-4.6", "glm"),
        ("deepseek-ai-DeepSeek-V4", "dsml"),
        ("LFM2.5-8B-A1B", "python"),
        ("google-gemma-4-31B-it-interleaved", "gemma"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
        ("unsloth-mistral-Devstral-Small-2507", "ministral"),
        ("Apertus-8B-Instruct", "apertus"),
    ],
)
def test_known_families(name: str, known: str) -> None:
    assert get_family(name).format.calls == FORMATS[known].calls


def test_reasoning_is_found_under_each_name() -> None:
    wanted = {
        "Qwen-Qwen3-0.6B": ("<think>\n", "\n</think>\n\n", "reasoning_content"),
        "ByteDance-Seed-OSS": ("<seed:think>", "</seed:think>\n", "reasoning_content"),
        "upstage-Solar-Open-100B": ("<|think|>", "<|end|><|begin|>assistant", "reasoning"),
        "mistralai-Ministral-3-14B-Reasoning-2512": ("[THINK]", "[/THINK]", "parts"),
        "google-gemma-4-31B-it": ("<|channel>thought\n", "\n<channel|>", "reasoning_content"),
    }
    for name, (opening, closing, field) in wanted.items():
        found = get_family(name).format
        assert found.reasoning_openings == (opening,), name
        assert found.reasoning_closings == (closing,), name
        assert found.reasoning_field == field


def test_what_the_templates_take() -> None:
    llama = get_family("meta-llama-Llama-3.1-8B-Instruct").format
    assert llama.takes_tools and llama.one_call and llama.calls.bare
    functionary = get_family("meetkai-functionary-medium-v3.2").format
    assert functionary.takes_tools and not functionary.one_call
    gemma = get_family("google-gemma-2-2b-it").format
    assert not gemma.takes_tools and gemma.calls == GENERIC.calls
    lfm = get_family("LFM2-8B-A1B").format
    assert lfm.takes_tools and not lfm.writes_calls and lfm.calls.style is CallStyle.PYTHON


def test_control_tokens_and_the_tokens_that_end_an_answer() -> None:
    made = get_family("moonshotai-Kimi-K2")
    tokens = {"<|tool_call_begin|>": 5, "<|im_end|>": 6, "<|tool_calls_section_end|>": 7}
    found = derive_format(made.render, tokens, ends=("<|im_end|>", "<|tool_calls_section_end|>"))
    assert dict(found.tokens) == {"<|tool_call_begin|>": 5}
    assert found.calls.section_closing == "", "it ends the answer"
    llama = get_family("meta-llama-Llama-3.1-8B-Instruct")
    assert derive_format(llama.render, {"<|python_tag|>": 9}).calls.other_openings == ("<|python_tag|>",)


def test_a_template_that_refuses_everything_has_the_generic_format() -> None:
    def refuse(**_: Any) -> str:
        raise InvalidRequest("no")

    assert derive_format(refuse) == GENERIC
    assert derive_format(lambda **_: "always the same").calls == GENERIC.calls


def test_a_template_of_random_words_does_no_harm() -> None:
    rng = random.Random(3)
    words = ["<a>", "</a>", "{", "}", '"', *NAMES, *KEYS, *VALUES, TEXT, REASON, USER, "\n"]
    for _ in range(300):
        texts = iter([" ".join(rng.choices(words, k=rng.randint(0, 12))) for _ in range(100)])
        derive_format(lambda texts=texts, **_: next(texts, ""))


def test_the_table_of_formats_is_up_to_date() -> None:
    template_files()  # skips where there is no corpus
    assert format_table.make_table() in format_table.PAGE.read_text(), "run python scripts/format_table.py"


def test_tools_that_a_template_fails_on_are_described_in_words() -> None:
    """Command R+ takes tools, but none with an object for a parameter."""
    source = template_files()["CohereForAI-c4ai-command-r-plus-tool_use"].read_text(encoding="utf-8")
    prompts = PromptBuilder(FakeVocabulary(), ChatTemplate(source))
    for kind, in_words in (("string", False), ("object", True)):
        parameter = {"type": kind, "description": "Any."}
        tool = Tool("look", "Looks", {"type": "object", "properties": {"a": parameter}, "required": ["a"]})
        rendered = prompts.render(Chat(({"role": "user", "content": "?"},), (tool,)))
        assert "look" in rendered and ("You can call these tools" in rendered) is in_words

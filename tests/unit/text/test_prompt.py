"""Prompts: control tokens come from the template, never from a user."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.errors import InvalidRequest
from cllm.messages import Prepare, Prepared
from cllm.testing import FakeVocabulary
from cllm.text.chat_template import ChatTemplate
from cllm.text.prompt import Chat, PreparedPrompt, PromptBuilder, RawText
from cllm.types import Prompt, Span
from cllm.workers.tokenizer import TokenizerWorker

TEMPLATE = "{% for m in messages %}<|x|>{{ m.role }}:{{ m.content | trim }}{% endfor %}<|x|>"
CONTROL = 257


def builder(template: str | None = TEMPLATE) -> PromptBuilder:
    return PromptBuilder(FakeVocabulary(), ChatTemplate(template) if template else None)


def tokens_of(template: str | None, *messages: dict[str, Any], **more: Any) -> list[int]:
    return [*builder(template).tokenize(Chat(messages, **more))[0].items]


def test_a_conversation_is_rendered_with_control_tokens() -> None:
    tokens = tokens_of(TEMPLATE, {"role": "user", "content": "hi"})
    assert tokens == [CONTROL, *b"user:hi", CONTROL]


def test_control_tokens_in_a_message_stay_plain_text() -> None:
    tokens = tokens_of(TEMPLATE, {"role": "user", "content": " a<|x|>b <|x|>"})
    assert tokens == [CONTROL, *b"user:a<|x|>b <|x|>", CONTROL]
    worker = TokenizerWorker(FakeVocabulary(), None)
    for parse_special, expected in ((False, tuple(b"<|x|>")), (True, (CONTROL,))):
        answer = worker.perform(Prepare((RawText(("<|x|>",), parse_special=parse_special),)))
        assert answer == Prepared((PreparedPrompt(Prompt(expected)),))


def test_control_tokens_hidden_in_a_role_or_deeper_stay_plain_text() -> None:
    parts = [{"text": "<|x|>"}]
    tokens = tokens_of("{{ messages[0].parts[0].text }}", {"role": "user", "parts": parts})
    assert tokens == list(b"<|x|>")


def test_a_model_without_a_template_gets_chatml() -> None:
    text = builder(None).render(Chat(({"role": "user", "content": "hi"},)))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_refuses_every_shape_is_a_client_error() -> None:
    with pytest.raises(InvalidRequest, match=r"roles must alternate.*merging .* did not help") as refusal:
        tokens_of("{{ raise_exception('roles must alternate') }}", {"role": "user", "content": "hi"})
    assert refusal.value.field == "messages"


THINKING = "{% for m in messages %}{{ m.content }}|{% endfor %}<think>{{ '\\n' }}"


@pytest.mark.parametrize(
    ("fields", "end", "thinking"),
    [
        ({}, "<think>\n", True),
        ({"think": False}, "<think>\n\n</think>\n\n", False),
        ({"prefill": "It"}, "<think>\n\n</think>\n\nIt", False),
        ({"thoughts": "hm"}, "<think>\nhm", True),
        ({"thoughts": "hm", "prefill": "It"}, "<think>\nhm\n</think>\n\nIt", False),
        ({"thoughts": "hm", "think": False}, "<think>\nhm\n</think>\n\n", False),
    ],
)
def test_how_a_prompt_goes_on_after_the_template(fields: Any, end: str, thinking: bool) -> None:
    chat = Chat(({"role": "user", "content": "?"},), **fields)
    assert builder(THINKING).render(chat) == f"?|{end}"
    prompt, inside = builder(THINKING).tokenize(chat)
    assert (bytes(prompt.items).decode(), inside) == (f"?|{end}", thinking)


WITH_REASONING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning %}[THINK]{{ m.reasoning }}[/THINK]{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ opened }}{% endif %}"
)


@pytest.mark.parametrize(
    ("fields", "opened", "end", "thinking"),
    [
        ({}, False, "", False),
        ({}, True, "[THINK]", True),
        ({"think": False}, True, "", False),
        ({"prefill": "It"}, True, "It", False),
        ({"options": {"opened": "[THINK]"}}, False, "[THINK]", True),
        ({"options": {"opened": "[THINK]"}, "think": False}, False, "[THINK]\n\n[/THINK]\n\n", False),
        ({"thoughts": "hm"}, False, "[THINK]\nhm", True),
        ({"options": {"opened": "[THINK][/THINK]"}}, True, "[THINK][/THINK]", False),
    ],
)
def test_reasoning_between_other_markers(fields: Any, opened: bool, end: str, thinking: bool) -> None:
    chat = Chat(({"role": "user", "content": "?"},), **fields)
    prompt, inside = builder(WITH_REASONING).tokenize(chat, opened=opened)
    assert (bytes(prompt.items).decode(), inside) == (f"<user>?<assistant>{end}", thinking)


def test_items_of_pictures_replace_their_markers() -> None:
    picture = Prompt((7, -1, -2, 8), (Span(1, 3, 2, "digest"),))
    messages = ({"role": "user", "content": "a[1]b[2]"}, {"role": "user", "content": "[1]"})
    chat = Chat(messages, media={"[1]": picture, "[2]": Prompt((9,))})
    prompt, _ = builder("{% for m in messages %}{{ m.content }}{% endfor %}|").tokenize(chat)
    assert prompt.items == (*b"a", 7, -1, -2, 8, *b"b", 9, 7, -1, -2, 8, *b"|")
    assert [(span.begin, span.end) for span in prompt.spans] == [(2, 4), (8, 10)]
    with pytest.raises(InvalidRequest, match="leaves out a picture"):
        builder("{{ messages[1].content }}").tokenize(chat)

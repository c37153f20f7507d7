"""Prompts: control tokens come from the template, never from a user."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.errors import InvalidRequest
from cllm.testing import FakeVocabulary
from cllm.text.chat_template import ChatTemplate
from cllm.text.prompt import PromptBuilder
from cllm.workers.messages import Chat, Refused, TokenizeChat, TokenizeText, Tokens
from cllm.workers.tokenizer import TokenizerWorker

TEMPLATE = "{% for m in messages %}<|x|>{{ m.role }}:{{ m.content | trim }}{% endfor %}<|x|>"
CONTROL = 257


def builder(template: str | None = TEMPLATE) -> PromptBuilder:
    return PromptBuilder(FakeVocabulary(), ChatTemplate(template) if template else None)


def tokens_of(template: str | None, *messages: dict[str, Any], **more: Any) -> list[int]:
    return builder(template).from_messages(messages, **more).tokens


def test_a_conversation_is_rendered_with_control_tokens() -> None:
    tokens = tokens_of(TEMPLATE, {"role": "user", "content": "hi"})
    assert tokens == [CONTROL, *b"user:hi", CONTROL]


def test_control_tokens_in_a_message_stay_plain_text() -> None:
    tokens = tokens_of(TEMPLATE, {"role": "user", "content": " a<|x|>b <|x|>"})
    assert tokens == [CONTROL, *b"user:a<|x|>b <|x|>", CONTROL]
    worker = TokenizerWorker(FakeVocabulary(), None)
    assert worker.perform(TokenizeText("<|x|>")) == Tokens(tuple(b"<|x|>"))
    assert worker.perform(TokenizeText("<|x|>", parse_special=True)) == Tokens((CONTROL,))


def test_control_tokens_hidden_in_a_role_or_deeper_stay_plain_text() -> None:
    tokens = tokens_of("{{ messages[0].parts[0].text }}", {"parts": [{"text": "<|x|>"}]})
    assert tokens == list(b"<|x|>")


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        builder(None).from_messages([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_is_a_client_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        builder("{{ raise_exception('roles must alternate') }}").from_messages([])


@pytest.mark.parametrize(
    "hostile", ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"]
)
def test_a_template_cannot_walk_out_of_its_sandbox(hostile: str) -> None:
    answer = TokenizerWorker(FakeVocabulary(), hostile).perform(TokenizeChat(Chat(({"role": "user"},))))
    assert isinstance(answer, Refused)

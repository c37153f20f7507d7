"""Bodies shaped like those of coding agents are taken; their prompts keep their prefix."""

from __future__ import annotations

import logging

import pytest

from cllm.chat.conversation import Conversation
from cllm.errors import ContextLengthExceeded, InvalidRequest
from cllm.server.dialects.anthropic import MessagesBody
from cllm.server.dialects.openai.bodies import ChatBody
from cllm.server.dialects.responses_body import ResponsesBody
from cllm.testing import FakeVocabulary
from cllm.text.chat_template import ChatTemplate
from cllm.text.prompt import PromptBuilder
from tests.driver.agent_bodies import CLAUDE, CLAUDE_TURNS, CODEX, CODEX_TURNS, Body, text
from tests.unit.text.test_message_rewrites import LOOSE, NO_SYSTEM, STRICT

TEMPLATES = {"loose": LOOSE, "strict": STRICT, "without a system role": NO_SYSTEM}


def prompt(template: str, conversation: Conversation) -> str:
    """The prompt without its end, which opens the assistant's message."""
    chat = conversation.for_template()
    return PromptBuilder(FakeVocabulary(), ChatTemplate(template)).render(chat).removesuffix("<assistant>")


def claude(turns: int) -> Conversation:
    messages = [*CLAUDE["messages"], *(message for turn in CLAUDE_TURNS[:turns] for message in turn)]
    return MessagesBody.parse({**CLAUDE, "messages": messages}).conversation()


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_session_of_claude_code(template: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    first, second, third = (prompt(template, claude(turns)) for turns in range(3))
    assert "skipped a tool of type 'web_search_20250305'" in caplog.text
    assert len(CLAUDE["tools"][0]["description"]) == 18_780
    assert second.startswith(first) and third.startswith(second)
    for word in [
        "Sirius",
        "Rigel",
        "mcp__files__read",
        "Vega",
        "Deneb?",
        "Antares",
        "Pollux",
        "Castor",
        "Altair",
    ]:
        assert word in second, word
    assert "Bellatrix" in third and "billing" not in third and "web_search" not in third
    assert "[image: left out, this model accepts text only]" in third


def codex(turns: int) -> Conversation:
    items = [*CODEX["input"], *(item for turn in CODEX_TURNS[:turns] for item in turn)]
    return ResponsesBody.parse({**CODEX, "input": items}).to_conversation()


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_session_of_codex(template: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    first, second, third = (prompt(template, codex(turns)) for turns in range(3))
    for kind in ("tool of type 'namespace'", "tool of type 'local_shell'", "item of type 'item_reference'"):
        assert f"skipped a{'n' if kind[0] == 'i' else ''} {kind}" in caplog.text, kind
    assert second.startswith(first) and third.startswith(second)
    for word in ("Sirius", "Antares", "Vega", "Deneb?", "exec", "apply_patch", "Rigel", "Pollux", "Altair"):
        assert word in second, word
    for word in ("Castor", "local_shell", "ex ec", "Mira", "Spica", "Bellatrix", "Thanks."):
        assert word in third, word


# Single fields ----------------------------------------------------------------------------------------


def test_what_chat_completions_emitted_comes_back() -> None:
    calls = [
        {"id": None, "type": "function", "function": {"name": "get weather!", "arguments": {"city": "Bern"}}},
        {"id": "x" * 400, "function": {"name": "n" * 100, "arguments": '{"cut'}},
        {"function": {"name": "now"}},
    ]
    messages: list[Body] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": {"effort": "low"}},
        {"role": "tool", "content": "no id"},
        {"role": "tool", "tool_call_id": "unknown", "content": "no call"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "refusal": "Rather not.", "content": None},
        {"role": "user", "content": "!"},
    ]
    conversation = ChatBody.parse({"messages": messages}).conversation()
    called = [call["function"]["arguments"] for call in conversation.messages[1]["tool_calls"]]
    assert called == ['{"city": "Bern"}', '{"cut', "{}"]
    for template in TEMPLATES.values():
        shown = prompt(template, conversation)
        for word in ("get weather!", "Bern", "n" * 100, "cut", "now", "no id", "no call", "Rather not."):
            assert word in shown, word


@pytest.mark.parametrize("kind", ["image", "document", "video"])
def test_an_image_in_the_question_is_refused_by_name(kind: str) -> None:
    asked = {"role": "user", "content": [{"type": kind, "source": {"type": "url", "url": "x"}}, text("?")]}
    body = {"max_tokens": 1, "messages": [asked]}
    with pytest.raises(InvalidRequest, match=f"messages: content of type '{kind}' is not supported"):
        MessagesBody.parse(body).conversation()
    answered = [asked, {"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]
    shown = MessagesBody.parse({**body, "messages": answered}).conversation().messages[0]["content"]
    assert shown == f"[{kind}: left out, this model accepts text only]\n?"
    item = {"role": "user", "content": [{"type": f"input_{kind}"}]}
    with pytest.raises(InvalidRequest, match=f"input: content of type 'input_{kind}'"):
        ResponsesBody.parse({"input": [item]}).to_conversation()


def test_the_text_of_a_document_is_taken() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Sirius"}}
    found = {"type": "search_result", "source": "x", "title": "y", "content": [text("Vega")]}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [document, found, text("?")]}]}
    assert MessagesBody.parse(body).conversation().messages[0]["content"] == "Sirius\nVega\n?"


@pytest.mark.parametrize(
    ("last", "given", "continued"),
    [
        ("assistant", None, True),
        ("assistant", True, True),
        ("assistant", False, False),
        ("user", False, False),
    ],
)
def test_an_answer_is_continued_unless_it_should_not(last: str, given: bool | None, continued: bool) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": last, "content": "It"}]
    body = ChatBody.parse({"messages": messages, "continue_final_message": given})
    assert body.conversation().for_template().prefill == ("It" if continued else "")


def test_only_an_answer_can_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatBody.parse({"messages": [{"role": "user", "content": "?"}], "continue_final_message": True})


def test_a_long_prompt_is_refused_in_words_that_claude_code_knows() -> None:
    error = ContextLengthExceeded(9000, 8192)
    assert error.message.startswith("prompt is too long: 9000 tokens > 8192 maximum")
    assert "maximum context length is 8192" in error.message, "and in those that OpenAI's clients know"
    assert ContextLengthExceeded(9, 8, at_least=True).message.startswith(
        "prompt is too long: 9 tokens > 8 max"
    )

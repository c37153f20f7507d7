"""Test doubles for cllm: a model runner without a model, and a server that answers by script.

`FakeRunner` computes nothing. Its next token is a function of all tokens in a sequence's KV memory, so the
right text (`expected_text`) proves that the memory held exactly the right tokens: a leaked cell, a shared
slot or a lost token shows. `ScriptedRunner` answers with the text its prompt holds. Its workers are this
module, `python -m cllm.testing FD engine|tokenizer LOG_LEVEL`; the model's name, if any, is the time of a
step in milliseconds. So a program is tested without a model, on the real scheduler and processes:

    >>> from cllm import LLM
    >>> from cllm.testing import say
    >>> with LLM(worker="cllm.testing") as llm:
    ...     llm.generate([say("Hello!")])[0].text
    'Hello!'

The same behind HTTP, for tests of clients:

    $ python -m cllm.testing serve --port 8080
    $ curl 127.0.0.1:8080/generate -H 'Content-Type: application/json' -d '{"prompt": "\\u0002Hello!\\u0003"}'
"""

from __future__ import annotations

from cllm.testing.fake_runner import (
    END_TOKEN,
    FakeRunner,
    FakeSampler,
    FakeVocabulary,
    expected_text,
    expected_vector,
    next_token,
)
from cllm.testing.scripted import CHAT_TEMPLATE, ScriptedRunner, call_tool, main, say

__all__ = [
    "CHAT_TEMPLATE",
    "END_TOKEN",
    "FakeRunner",
    "FakeSampler",
    "FakeVocabulary",
    "ScriptedRunner",
    "call_tool",
    "expected_text",
    "expected_vector",
    "main",
    "next_token",
    "say",
]

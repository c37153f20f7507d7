"""Test doubles for cllm: a model runner without a model, and a server that answers by script.

`FakeRunner` computes nothing. Its next token is a function of all tokens in a sequence's KV memory, so the
right text (`expected_text`) proves that the memory held exactly the right tokens: a leaked cell, a shared
slot or a lost token shows. `ScriptedRunner` answers with the text its prompt holds:

    >>> from cllm import LLM
    >>> from cllm.testing import ScriptedRunner, say
    >>> with LLM(make_runner=lambda config: ScriptedRunner()) as llm:
    ...     llm.generate([say("Hello!")])[0].text
    'Hello!'

The same behind HTTP, with the real scheduler, admission and worker processes, for tests of clients:

    $ python -m cllm.testing serve --port 8080
    $ curl 127.0.0.1:8080/generate -H 'Content-Type: application/json' -d '{"prompt": "\\u0002Hello!\\u0003"}'

Its workers are this module too: `python -m cllm.testing FD engine|tokenizer LOG_LEVEL`.
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

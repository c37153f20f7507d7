"""A test double for cllm: a server that answers by script, without a model.

`ScriptedRunner` answers with the text its prompt holds, and with letters where it holds none. Its workers
are this module, `python -m cllm.testing FD engine|tokenizer LOG_LEVEL`; the model's name, if any, is the
time of a step in milliseconds. So a program is tested without a model, on the real scheduler and processes:

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

from cllm.testing.scripted import CHAT_TEMPLATE, FakeVocabulary, ScriptedRunner, call_tool, say
from cllm.testing.serve import main

__all__ = ["CHAT_TEMPLATE", "FakeVocabulary", "ScriptedRunner", "call_tool", "main", "say"]

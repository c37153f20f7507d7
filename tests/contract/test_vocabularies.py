"""Structured output on real vocabularies; `proof/vocabularies.py` tries all of llama.cpp's source."""

from __future__ import annotations

from contextlib import closing

import pytest

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel
from cllm.config import EngineConfig
from cllm.text.structured_output import _Tokenizer
from proof.vocabularies import CONSTRAINTS, check_vocabulary
from tests.driver.corpus import vocabulary_files


@pytest.mark.parametrize("name", ["llama-spm", "gpt-2"])
def test_no_constraint_is_refused_and_every_answer_fits(name: str) -> None:
    """Llama 2's vocabulary puts a blank before a text, GPT-2's does not."""
    faults, completed = check_vocabulary(vocabulary_files()[name], seeds=1)
    assert faults == [] and completed >= len(CONSTRAINTS) - 1


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe"])
def test_a_text_with_a_bos_of_its_own_gets_no_second_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model=str(vocabulary_files()[name]))
    with closing(LlamaModel(load(), config, DeferredFrees(), vocabulary_only=True)) as model:
        words = model.vocabulary
        plain = words.tokenize("Hello there", add_special=True, parse_special=True)
        with caplog.at_level("DEBUG"):
            text = f"{words.begin_text}Hello there"
            assert words.tokenize(text, add_special=True, parse_special=True) == plain
            assert len(words.tokenize(text, add_special=True, parse_special=False)) > len(plain)
        assert words.spelling(plain[0]) == words.begin_text != words.spelling(plain[1])
        assert "BOS" not in caplog.text


@pytest.mark.parametrize("name", ["llama-spm", "phi-3"])
def test_forced_text_is_spelled_exactly(name: str) -> None:
    config = EngineConfig(model=str(vocabulary_files()[name]))
    with closing(LlamaModel(load(), config, DeferredFrees(), vocabulary_only=True)) as model:
        tokenizer = _Tokenizer(model.vocabulary)
        for text in ("a", " a", "  a", "", " ", "\n", "name", '{"', "é€", "a\x02b", "<0x41>", "▁", "a ▁b"):
            tokens = tokenizer(text)
            assert b"".join(tokenizer.tokens[token] for token in tokens) == text.encode()
        plain = model.vocabulary.tokenize(" name of", add_special=False, parse_special=False)
        assert tokenizer("name of")[-1] == plain[-1], "as the model would write it, not letter by letter"
        assert len(tokenizer("name of")) == 2

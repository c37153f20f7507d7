"""A text is refused by its bytes only where it has more tokens than the limit, on real vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel, LlamaVocabulary
from cllm.config import EngineConfig
from cllm.messages import Prepare
from cllm.models.store import embedded_model
from cllm.text.prompt import RawText
from cllm.types import Failure, TokenBound
from cllm.workers.tokenizer import TokenizerWorker
from tests.tiny_encoders import make_encoder
from tests.tiny_models import make_dense

OPEN = "<|im_start|>"
SPACES = " " * 4
# Runs that long tokens stand for, letters, control tokens, bytes that the embedded model has no token for,
# and the character that SentencePiece writes for a space.
PARTS = st.sampled_from([*" \n\t#-=aé€🙂\0\x04\U00050000▁", "the ", OPEN, SPACES])
TEXTS = st.lists(st.tuples(PARTS, st.integers(1, 200)), max_size=6).map(
    lambda runs: "".join(part * count for part, count in runs)
) | st.text(max_size=200)


def make_sentencepiece(path: Path, *, name: str = "tiny") -> Path:
    """A vocabulary of SentencePiece, without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    normal = ["▁", "▁" * 4, "a", "aa", "aaaa", "▁the", "the", "é", "###########"]
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>", OPEN]
    tokens = [*special, SPACES, *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, *[kinds.CONTROL] * 4, kinds.USER_DEFINED, *[kinds.BYTE] * 256]
    types += [kinds.NORMAL] * len(normal)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaVocabulary]]:
    folder = tmp_path_factory.mktemp("vocabularies")
    paths = {
        "embedded": Path(embedded_model()),
        "tiny": make_dense(folder / "tiny.gguf"),
        "sentencepiece": make_sentencepiece(folder / "sentencepiece.gguf"),
        "strips": make_sentencepiece(folder / "strips.gguf", name="Phi-3 tiny"),
        "wordpiece": make_encoder(folder / "wordpiece.gguf"),
    }
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                LlamaModel(load(), EngineConfig(model=str(path)), DeferredFrees(), vocabulary_only=True)
            ).vocabulary
            for name, path in paths.items()
        }


def test_the_longest_token_and_what_has_none(vocabularies: dict[str, LlamaVocabulary]) -> None:
    embedded = vocabularies["embedded"]
    for byte in range(0x80):
        tokens = embedded.tokenize(chr(byte), add_special=False, parse_special=False)
        assert (byte in embedded.bound.dropped) == (not tokens), byte
    assert vocabularies["tiny"].bound == TokenBound(len("<|endoftext|>"))
    assert vocabularies["sentencepiece"].bound == TokenBound(len("<|endoftext|>"))


@pytest.mark.parametrize("name", ["strips", "wordpiece"])
def test_a_vocabulary_that_drops_text_has_no_bound(
    vocabularies: dict[str, LlamaVocabulary], name: str
) -> None:
    assert vocabularies[name].bound == TokenBound()
    assert vocabularies[name].bound.min_tokens("x" * 10_000) == 0


@pytest.mark.parametrize("name", ["embedded", "tiny", "sentencepiece", "strips", "wordpiece"])
@given(text=TEXTS, parse_special=st.booleans())
def test_no_text_has_fewer_tokens_than_its_bound(
    vocabularies: dict[str, LlamaVocabulary], name: str, text: str, parse_special: bool
) -> None:
    vocabulary = vocabularies[name]
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=parse_special)
    assert vocabulary.bound.min_tokens(text) <= len(tokens)
    limit = max(1, len(tokens))
    raw = RawText((text,), add_special=False, parse_special=parse_special)
    answer = TokenizerWorker(vocabulary, None).perform(Prepare((raw,), limit))
    assert not isinstance(answer, Failure), answer


def test_the_bound_is_reached(vocabularies: dict[str, LlamaVocabulary]) -> None:
    """By texts of the longest token alone: it refuses nothing less."""
    vocabulary = vocabularies["embedded"]
    longest = max((vocabulary.piece(token) for token in range(vocabulary.size)), key=len).decode()
    text = longest * 50
    assert len(vocabulary.tokenize(text, add_special=False, parse_special=False)) == 50
    assert vocabulary.bound.min_tokens(text) == 50
    assert vocabulary.bound.min_tokens(text + "x") == 51

"""The media worker: its parts make the prompt that llama.cpp makes of the whole; a crash costs one task."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cllm.backend.llama.media import Part, PromptText
from cllm.config import EngineConfig
from cllm.errors import InvalidRequest, ModelFileError
from cllm.messages import EncodedMedia, EncodeMedia
from cllm.text.prompt import PromptParts
from cllm.workers.executor import ProcessTokenizer
from cllm.workers.supervisor import Backoff
from tests.driver.media import encode_all, make_file, make_picture, make_text, open_encoder
from tests.driver.server import PATIENCE_S, find_workers, wait_for
from tests.tiny_media import MediaModel


@pytest.fixture(scope="module")
def worker(files: MediaModel) -> Iterator[ProcessTokenizer]:
    config = EngineConfig(model=str(files.model), mmproj=str(files.mmproj), threads=1)
    worker = ProcessTokenizer(config, role="media")
    yield worker
    worker.close()


def encode(worker: ProcessTokenizer, *pictures: bytes, tenant: str = "", rows: bool = True) -> EncodedMedia:
    answer = worker.submit(EncodeMedia(tuple(map(make_text, pictures)), tenant, rows)).result(PATIENCE_S)
    assert isinstance(answer, EncodedMedia)
    return answer


def test_parts_make_the_prompt_of_the_whole(files: MediaModel, worker: ProcessTokenizer) -> None:
    found = encode(worker, make_file(1), make_file(2, width=72))
    with open_encoder(files) as encoder:
        texts = [PromptText(text, parse_special=True) for text in ("Look at ", " and ", " now.")]
        parts: list[Part] = [texts[0], make_picture(1), texts[1], make_picture(2, 72), texts[2]]
        with encoder.tokenize(parts, add_special=False) as whole:
            rows = encode_all(encoder, whole)
            vocabulary = encoder._model.vocabulary
            made = PromptParts({"[1]": found.prompts[0], "[2]": found.prompts[1]})
            for text in made.split("Look at [1] and [2] now."):
                made.items += vocabulary.tokenize(text, add_special=False, parse_special=True)
            assert made.build() == whole.prompt
    assert found.rows.keys() == rows.keys()
    for name, values in rows.items():
        assert np.allclose(np.frombuffer(found.rows[name], np.float32), values.ravel(), atol=1e-4)


def test_a_picture_is_encoded_once_for_each_tenant(worker: ProcessTokenizer) -> None:
    first = encode(worker, make_file(5), make_file(5), tenant="a")
    again = encode(worker, make_file(5), tenant="a")
    assert (first.encoded, again.encoded) == (1, 0) and again.rows == first.rows
    assert encode(worker, make_file(5), tenant="b").encoded == 1
    counted = encode(worker, make_file(6), tenant="a", rows=False)
    assert counted.rows == {} and len(counted.prompts[0]) == len(first.prompts[0])


def test_equal_pictures_of_several_requests_are_encoded_once(worker: ProcessTokenizer) -> None:
    texts = [make_text(make_file(number)) for number in (1, 2, 3, 8)]
    asked = [worker.submit(EncodeMedia((texts[number % 3], texts[3]), "c")) for number in range(9)]
    found = [
        each for each in (future.result(PATIENCE_S) for future in asked) if isinstance(each, EncodedMedia)
    ]
    assert sum(each.encoded for each in found) == 4 and found[0].rows == found[3].rows != found[1].rows


def test_what_is_no_picture_is_refused(worker: ProcessTokenizer) -> None:
    for bad in (b"", b"no picture", make_file()[:60]):
        with pytest.raises(InvalidRequest, match="picture 2 "):
            encode(worker, make_file(), bad)
    with pytest.raises(InvalidRequest, match="33 pictures, the limit is 32"):
        encode(worker, *[make_file()] * 33)


def test_a_killed_worker_is_started_again(worker: ProcessTokenizer) -> None:
    before = encode(worker, make_file(7))
    (pid,) = find_workers(os.getpid(), "media")
    os.kill(pid, signal.SIGSTOP)
    waiting = worker.submit(EncodeMedia((make_text(make_file(7)),)))
    os.kill(pid, signal.SIGKILL)
    assert waiting.result(PATIENCE_S) == before
    wait_for(lambda: find_workers(os.getpid(), "media") not in ([], [pid]))


def test_an_mmproj_of_another_model_fails_pictures_only(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "MAX_IN_A_ROW", 1)  # starts before it fails
    model = str(models["dense"])
    wrong = ProcessTokenizer(EngineConfig(model=model, mmproj=model), role="media")
    try:
        with pytest.raises(ModelFileError, match="cannot be loaded as the multimodal projector"):
            encode(wrong, make_file())
    finally:
        wrong.close()

"""Media on a bare runner: random pictures, an encoder for a tiny model, and prompts computed part by part."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from cllm.backend.base import Batch, BatchKind, MediaRows, Row, StepStatus
from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.media import MediaEncoder, MediaPrompt, Part, Picture, PromptText, Rows
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.types import Prompt
from tests.driver.kinds import THREADS
from tests.tiny_media import MediaModel


def make_picture(seed: int = 0, width: int = 48, height: int = 32) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Picture(width, height, pixels.tobytes())


def make_file(seed: int = 0, kind: str = "PNG", width: int = 48, height: int = 32, **options: Any) -> bytes:
    """The file of a picture of `make_picture`; PNG and lossless WebP keep its pixels."""
    picture = make_picture(seed, width, height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), picture.rgb).save(file, kind, **options)
    return file.getvalue()


def make_sound(seed: int = 0, seconds: float = 1.0) -> bytes:
    """A WAV file of noise."""
    samples = np.random.default_rng(seed).integers(-20_000, 20_000, int(16_000 * seconds), np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def make_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def make_url(data: bytes) -> str:
    return f"data:image/png;base64,{make_text(data)}"


@contextmanager
def open_encoder(files: MediaModel) -> Iterator[MediaEncoder]:
    """An encoder beside a text model without weights."""
    library, frees = load(), DeferredFrees()
    config = EngineConfig(model=str(files.model), gpu_layers=0)
    with (
        LlamaModel(library, config, frees, weights=False) as model,
        MediaEncoder(library, model, files.mmproj, frees, threads=THREADS) as encoder,
    ):
        yield encoder


def encode(encoder: MediaEncoder, *parts: Part | str) -> tuple[Prompt, dict[str, Rows]]:
    """The prompt of these parts, and its rows."""
    with encoder.tokenize(
        [PromptText(part) if isinstance(part, str) else part for part in parts]
    ) as tokenized:
        return tokenized.prompt, encode_all(encoder, tokenized)


def encode_all(encoder: MediaEncoder, *prompts: MediaPrompt) -> dict[str, Rows]:
    """The rows of all media of these prompts, each once; several in one pass."""
    waiting = {media: chunk for each in prompts for media, chunk in each.chunks.items()}
    rows: dict[str, Rows] = {}
    while waiting:
        rows |= encoder.encode_batch(waiting)
        waiting = {media: chunk for media, chunk in waiting.items() if media not in rows}
    return rows


def open_media_runner(
    files: MediaModel,
    *,
    unified: bool = False,
    batch_tokens: int = 128,
    sequences: int = 2,
    cells: int = 1024,
) -> LlamaRunner:
    """A runner whose sums are exact: f32, without flash attention."""
    return LlamaRunner(
        EngineConfig(
            model=str(files.model),
            parallel=sequences,
            ctx_size=cells,
            threads=THREADS,
            batch_tokens=batch_tokens,
            flash_attention=False,
            unified_kv=unified,
            cache_type_k="f32",
            cache_type_v="f32",
        )
    )


def media_row(prompt: Prompt, rows: Mapping[str, Rows], begin: int, end: int, seq_id: int = 0) -> Row:
    """A row of a prompt's items from `begin` to `end`: of one span, or text."""
    span = prompt.span_at(begin)
    media = None
    if span is not None:
        first = begin - span.begin
        values = rows[span.media][first : end - span.begin]
        media = MediaRows(values, prompt.places(begin, end), span.causal)
    return Row(seq_id, prompt.position(begin), prompt.items[begin:end], 0, None, media=media)


def compute(
    runner: LlamaRunner,
    prompt: Prompt,
    rows: Mapping[str, Rows],
    *,
    begin: int = 0,
    end: int | None = None,
    chunk: int = 128,
    seq_id: int = 0,
) -> Rows:
    """Compute items of a prompt, `chunk` at most at a time; returns the logits of the last."""
    end = len(prompt) if end is None else end
    while begin < end:
        span = prompt.span_at(begin)
        border = (
            span.end
            if span is not None
            else min((s.begin for s in prompt.spans if s.begin > begin), default=end)
        )
        size = chunk if span is None or span.causal else len(prompt)
        stop = min(border, begin + size, end)
        row = media_row(prompt, rows, begin, stop, seq_id)
        kind = BatchKind.GENERATE if row.media is None else BatchKind.MEDIA
        if stop < end:
            assert runner.run(Batch((row,), kind)).status is StepStatus.DONE
        else:
            assert runner.decode((row._replace(outputs=1),)) == 0
            runner.api.llama_synchronize(runner.pointer)
        begin = stop
        assert runner.next_position(seq_id) == prompt.next_position(begin)
    return np.array(runner.logits(1)[0])

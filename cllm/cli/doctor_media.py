"""`cllm doctor MODEL --image FILE`: ask about a picture or sound, end to end."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cllm.backend.llama.gguf import GgufFile
from cllm.config import EngineConfig
from cllm.errors import ConfigError
from cllm.llm import LLM
from cllm.messages import EncodedMedia, EncodeMedia
from cllm.models.resolve import find_mmproj
from cllm.workers.executor import MEDIA_LIMIT_S, ProcessTokenizer

QUESTION = "Describe this in one sentence."
ANSWER_TOKENS = 32


def check_media(config: EngineConfig, file: Path) -> Iterator[tuple[str, str]]:
    """Yield what is found, by name, as it is found: family, rows, times, answer. Raises CllmError."""
    mmproj = find_mmproj(Path(config.model), config.mmproj)
    if not mmproj:
        raise ConfigError("there is no mmproj beside the model: name one with --mmproj")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    config = msgspec.structs.replace(config, mmproj=mmproj, cache_disk_mb=0)
    metadata = GgufFile(Path(mmproj)).metadata
    families = [str(value) for name, value in metadata.items() if name.endswith("projector_type")]
    yield "mmproj", f"{Path(mmproj).name}: {', '.join(families) or 'of an unknown family'}"
    times: list[float] = []
    worker = ProcessTokenizer(config, role="media")
    try:
        for rows in (False, True):  # the first one waits for the process, too
            begin = time.monotonic()
            task = EncodeMedia((base64.b64encode(data).decode(),), rows=rows)
            found = worker.submit(task).result(MEDIA_LIMIT_S)
            times.append(time.monotonic() - begin)
    finally:
        worker.close()
    assert isinstance(found, EncodedMedia)
    spans = found.prompts[0].spans
    kinds = {"M-RoPE" if each.columns else "causal" if each.causal else "not causal" for each in spans}
    count = sum(each.end - each.begin for each in spans)
    yield "rows", f"{count} in {len(spans)} parts, {', '.join(sorted(kinds))}; encoded in {times[1]:.2f} s"
    with LLM(config=config) as llm:
        begin = time.monotonic()
        parts = [{"type": "image_url", "image_url": data}, {"type": "text", "text": QUESTION}]
        reply = llm.chat([{"role": "user", "content": parts}], max_tokens=ANSWER_TOKENS, temperature=0)
    took = f"{reply.usage.prompt_tokens} prompt tokens, {time.monotonic() - begin:.1f} s"
    yield "answer", f"{reply.text!r} ({took})"

"""Pictures beside llama-server: four at once, different and equal; the worst gap of streams meanwhile.

The encoder is one of real size with random weights (24 layers of 1,024, a picture is 576 rows), made for the
text model. Each round asks the servers in turn, about pictures that none has seen.

    python -m bench.media --llama-server FILE [--model FILE] [--rounds 5]
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np
from PIL import Image

from bench.client import PlainClient
from bench.command import conclude, make_parser, run_command
from bench.peers import RunningPeer, ServerSettings, cllm_peer, embedded_model, llama_server_peer, running
from bench.report import Table
from cllm.backend.llama.gguf import GgufFile
from cllm.backend.llama.library import find

LAYERS, WIDTH, HEADS, FEED_FORWARD, PATCH, SIZE = 24, 1024, 16, 4096, 14, 336
PICTURES, STREAMS, TOKENS = 4, 4, 160
PICTURE_SIZE = (640, 480)
SLOTS, CELLS = 8, 2048
CHAT = "/v1/chat/completions"


def make_projector(path: Path, width: int) -> Path:
    """Write an encoder with random weights, whose rows have the text model's width."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name("random ViT-L")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name in ("clip.has_vision_encoder", "clip.use_gelu"):
        writer.add_bool(name, True)
    writer.add_string("clip.projector_type", "janus_pro")
    sizes = {"image_size": SIZE, "patch_size": PATCH, "embedding_length": WIDTH, "block_count": LAYERS}
    sizes |= {"feed_forward_length": FEED_FORWARD, "attention.head_count": HEADS, "projection_dim": width}
    for name, size in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", size)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5] * 3)

    def add(name: str, *shape: int) -> None:
        """A matrix with its bias; of one dimension, a norm."""
        weights = random.standard_normal(shape, np.float32) / np.sqrt(np.prod(shape[1:]))
        matrix = weights.astype(np.float16) if shape[1:] else np.ones(shape, np.float32)
        writer.add_tensor(f"{name}.weight", matrix)
        writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))

    add("v.patch_embd", WIDTH, 3, PATCH, PATCH)
    places = random.standard_normal(((SIZE // PATCH) ** 2, WIDTH), np.float32)
    writer.add_tensor("v.position_embd.weight", places)
    add("v.post_ln", WIDTH)
    add("mm.0", width, WIDTH)
    add("mm.1", width, width)
    for layer in (f"v.blk.{number}" for number in range(LAYERS)):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"{layer}.{part}", WIDTH, WIDTH)
        add(f"{layer}.ffn_up", FEED_FORWARD, WIDTH)
        add(f"{layer}.ffn_down", WIDTH, FEED_FORWARD)
        add(f"{layer}.ln1", WIDTH)
        add(f"{layer}.ln2", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_body(text: str, picture: int | None = None, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture is not None:
        pixels = np.random.default_rng(picture).integers(0, 256, (*PICTURE_SIZE[::-1], 3), np.uint8)
        Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG")
        url = f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"model": "m", "messages": [{"role": "user", "content": parts}], "temperature": 0, **fields}


def ask_all(client: PlainClient, pictures: Sequence[int]) -> float:
    """Seconds until the last of these pictures' requests has its first token."""
    bodies = [make_body(f"What is {number}?", each, max_tokens=1) for number, each in enumerate(pictures)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        begin = time.monotonic()
        list(pool.map(partial(client.fetch, "POST", CHAT), bodies))
        return time.monotonic() - begin


def stream(client: PlainClient, number: int, times: list[float]) -> None:
    """Note when each chunk of an answer comes."""
    body = make_body(f"Say {number}.", max_tokens=TOKENS, stream=True, ignore_eos=True)
    with client.open("POST", CHAT, body) as response:
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                times.append(time.monotonic())


def measure_gap(client: PlainClient, pictures: Sequence[int]) -> float:
    """The worst gap of streams: while they are alone, or from the arrival of pictures on."""
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, client, number, each) for number, each in enumerate(times)]
        while min(map(len, times)) < TOKENS // 16 and not any(each.done() for each in streams):
            time.sleep(0.01)
        begin = time.monotonic()
        if pictures:
            ask_all(client, pictures)
        for each in streams:
            each.result()
    return max(after - before for each in times for before, after in pairwise(each) if after > begin)


def measure(server: RunningPeer, seed: int) -> dict[str, float]:
    client = PlainClient(server.address)
    return {
        "four different": ask_all(client, range(seed, seed + PICTURES)),
        "four equal": ask_all(client, [seed + PICTURES] * PICTURES),
        "worst gap alone": measure_gap(client, ()),
        "worst gap with four": measure_gap(client, range(seed + 5, seed + 5 + PICTURES)),
    }


def run(llama_server: str, model: str, rounds: int, gpu: bool, out: Path | None) -> int:
    """Print the medians of all rounds; 1 if a bar is missed."""
    path = Path(model) if model else embedded_model()
    binary = Path(llama_server) if llama_server else find() / "bin" / "llama-server"
    metadata = GgufFile(path).metadata
    width = int(metadata[f"{metadata['general.architecture']}.embedding_length"])
    settings = ServerSettings(path, SLOTS, SLOTS * CELLS)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        mmproj = ("--mmproj", str(make_projector(Path(name) / "mmproj.gguf", width)))
        more = (*mmproj, "--chat-template", "chatml")
        peers = [cllm_peer(settings, flags=more), llama_server_peer(settings, binary, more=more)]
        servers = [stack.enter_context(running(each, Path(name) / each.family)) for each in peers]
        for number in range(rounds + 1):
            for server in servers[:: 1 - number % 2 * 2]:
                result = measure(server, 100 * number)
                print(number, server.peer.family, {key: round(s, 3) for key, s in result.items()}, flush=True)
                if number:  # the first one warms up
                    found.setdefault(server.peer.family, []).append(result)
    ours, theirs = (found[peer.family] for peer in peers)
    target = 0.05 if gpu else 0.25
    bars = {"four different": 0.9 if gpu else 1.1, "four equal": 0.4}
    rows, failed = [], False
    for key in ours[0]:
        ratio = median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))
        mine, their = (median(each[key] for each in side) for side in (ours, theirs))
        bar = f"≤ {bars[key]:g} ×" if key in bars else ""
        if key == "worst gap with four":
            limit = median(1.5 * each["worst gap alone"] + target for each in ours)
            bar, failed = f"≤ {limit:.3f} s", failed or mine > limit
        failed |= ratio > bars.get(key, ratio)
        rows.append((key, f"{mine:.3f} s", f"{their:.3f} s", f"{ratio:.2f}", bar))
    table = Table((f"{path.name}, {rounds} rounds", *(peer.family for peer in peers), "ratio", "bar"), rows)
    return conclude("media", table.markdown() + ("\nFAIL" if failed else "\npass"), found, out, failed=failed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "bench.media",
        __doc__,
        "--out",
        llama_server=("", "the program; default: that of `cllm build --with-server`"),
        model=("", "text model; default: the embedded one"),
        rounds=(5, "after one to warm up"),
        gpu=(False, "the bars of a GPU"),
    )
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    raise SystemExit(main())

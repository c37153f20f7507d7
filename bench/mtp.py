"""`python -m bench.mtp VOCABULARY`: drafts by a model's own head (MTP) on and off, in one server, in turns.

Beside it llama-server with its own drafts by the head (`--spec-type draft-mtp`), if there is one. With
`--ngrams` also the given model itself, which drafts by n-grams: on prose sampled at 0.8, and on random words,
after which its greedy answers repeat themselves.

The model's attention and feed-forward network are computed and add nothing, so the next token is a function
of the last one. Its head passes the embedding on and has a token table of its own, where a part of the rows
is another token's: of those it is wrong. On a GPU: `sh FOLDER/measure.sh OUT --mtp 24x1024 --mtp 36x4096`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import gguf
import numpy as np
import typer

from bench import footprint
from bench.gpu.models import CONTEXT, HEAD_WIDTH, KEY_VALUE_HEADS, Q, _Weights
from bench.load import run_load
from bench.peers import ServerSettings, cllm_peer, llama_server_peer, log_folder, running
from bench.report import Spread
from bench.wire import OpenAIApi
from bench.workloads import BenchRequest, single_requests
from bench.workloads.text import prose, words

STREAMS, CELLS, PROMPT_WORDS = (1, 2, 4, 8), 1024, 24
EXPERTS = 2


def make(path: Path, layers: int, width: int, right: float, vocabulary: Path) -> Path:
    """Write a glm4moe model in Q8_0 whose head is right about a part of the tokens. Returns `path`."""
    writer = gguf.GGUFWriter(path, "glm4moe")
    fields = gguf.GGUFReader(vocabulary).fields
    tokens = len(fields["tokenizer.ggml.tokens"].data)
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=items)
    heads = width // HEAD_WIDTH
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers + 1)
    writer.add_feed_forward_length(3 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(min(heads, KEY_VALUE_HEADS))
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_shared_count(1)
    writer.add_leading_dense_block_count(layers)
    writer.add_nextn_predict_layers(1)
    weights = _Weights(Q.Q8_0)

    def matrix(name: str, rows: int, columns: int, copies: int = 0) -> None:
        found = weights.matrix(rows * (copies or 1), columns)
        if "attn_output" in name or "ffn_down" in name:
            found[:] = 0
        shape = (copies, rows, found.shape[-1]) if copies else found.shape
        writer.add_tensor(f"{name}.weight", found.reshape(shape), raw_dtype=Q.Q8_0)

    table = weights.matrix(tokens, width)
    writer.add_tensor("token_embd.weight", table, raw_dtype=Q.Q8_0)
    matrix("output", tokens, width)
    norms = ["output_norm"]
    for layer in range(layers + 1):
        block = f"blk.{layer}."
        norms += [f"{block}attn_norm", f"{block}post_attention_norm"]
        for part, count in (
            ("q", heads),
            ("k", min(heads, KEY_VALUE_HEADS)),
            ("v", min(heads, KEY_VALUE_HEADS)),
        ):
            matrix(f"{block}attn_{part}", count * HEAD_WIDTH, width)
        matrix(f"{block}attn_output", width, heads * HEAD_WIDTH)
        kinds = (("", 3 * width, 0),) if layer < layers else (("_exps", width, EXPERTS), ("_shexp", width, 0))
        for kind, inner, copies in kinds:
            matrix(f"{block}ffn_gate{kind}", inner, width, copies)
            matrix(f"{block}ffn_up{kind}", inner, width, copies)
            matrix(f"{block}ffn_down{kind}", width, inner, copies)
    writer.add_tensor(f"{block}ffn_gate_inp.weight", np.ones((EXPERTS, width), np.float32))
    writer.add_tensor(f"{block}exp_probs_b.bias", np.zeros(EXPERTS, np.float32))
    writer.add_tensor(f"{block}nextn.eh_proj.weight", np.eye(width, 2 * width, dtype=np.float16))
    wrong = np.random.default_rng(0).permutation(tokens)[round(right * tokens) :]
    damaged = table.copy()
    damaged[wrong] = table[np.roll(wrong, 1)]
    writer.add_tensor(f"{block}nextn.embed_tokens.weight", damaged, raw_dtype=Q.Q8_0)
    for name in (*norms, *(f"{block}nextn.{part}" for part in ("enorm", "hnorm", "shared_head_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def measure(
    model: Path,
    rounds: int,
    output: int,
    threads: int = 0,
    logs: Path | None = None,
    llama_server: Path | None = None,
    *,
    drafter: str = "mtp",
    text: Callable[[str, int], str] = words,
    temperature: float = 0.0,
) -> None:
    """Print tokens per second with drafts over those without, and over llama-server's, by streams.

    Behind them the same of seconds of computing time, which does not depend on how busy the machine is.
    """
    settings = ServerSettings(model, max(STREAMS), max(STREAMS) * CELLS, threads)
    peer = cllm_peer(settings, None, OpenAIApi(), ("--draft", drafter))
    with ExitStack() as stack, log_folder(logs) as folder:
        server = stack.enter_context(running(peer, folder / "mtp.log"))
        plain = replace(server, peer=replace(peer, api=OpenAIApi(speculate=False)))
        servers = {"on": server, "off": plain}
        if llama_server is not None:
            other = llama_server_peer(settings, llama_server, more=("--spec-type", "draft-mtp"))
            servers["llama-server"] = stack.enter_context(running(other, folder / "llama-server.log"))
        for streams in STREAMS:
            rates: dict[str, list[tuple[float, float]]] = {label: [] for label in servers}
            for number in range(-1, rounds):  # the first one warms up
                texts = [text(f"{streams} {number} {each}", PROMPT_WORDS) for each in range(streams)]
                for label in sorted(servers, reverse=number % 2 == 1):
                    # Not the same text, or it would be cached; the head is as often right about both.
                    asked = [BenchRequest(f"{label} {each}", output, temperature) for each in texts]
                    used = servers[label]
                    before = footprint.measure(used.pid).cpu_s
                    load = run_load(used.address, used.peer.api, single_requests("mtp", asked, streams))
                    assert not load.errors, load.errors[0]
                    if number >= 0:
                        cpu_s = footprint.measure(used.pid).cpu_s - before
                        rates[label].append((load.tokens_per_second, load.generated_tokens / cpu_s))
            kind = f"{model.stem}, {text.__name__} at {temperature:g}"
            shown = f"{kind}, {streams} streams: {median(each for each, _ in rates['on']):.1f} tokens/s"
            for label in list(servers)[1:]:
                pairs = [*zip(rates["on"], rates[label], strict=True)]
                spreads = [Spread.of(on[of] / off[of] for on, off in pairs) for of in (0, 1)]
                rate, of_cpu = (spread.show(2) for spread in spreads)
                shown += (
                    f"; {label} {median(each for each, _ in rates[label]):.1f}, {rate}, of CPU time {of_cpu}"
                )
            print(shown, flush=True)


def run(
    vocabulary: Path,
    sizes: list[str],
    folder: Path,
    rounds: int,
    output: int,
    threads: int = 0,
    llama_server: Path | None = None,
    *,
    ngrams: bool = False,
) -> None:
    """Make and measure models of these sizes, LAYERSxWIDTH, with heads that are right for 0.6 and 0.8."""
    for text, temperature in ((prose, 0.8), (words, 0.0)) if ngrams else ():
        measure(vocabulary, rounds, output, threads, drafter="ngram", text=text, temperature=temperature)
    for size in sizes:
        layers, width = map(int, size.split("x"))
        for right in (0.8, 0.6):
            path = folder / f"mtp-{size}-{right}.gguf"
            made = path if path.exists() else make(path, layers, width, right, vocabulary)
            measure(made, rounds, output, threads, llama_server=llama_server)


def main(
    vocabulary: Annotated[Path, typer.Argument(help="GGUF file with the tokenizer")],
    size: Annotated[list[str] | None, typer.Option(help="LAYERSxWIDTH")] = None,
    folder: Annotated[Path, typer.Option(help="Where the models are made")] = Path("/tmp"),
    rounds: Annotated[int, typer.Option()] = 3,
    output: Annotated[int, typer.Option(help="Tokens of an answer")] = 256,
    threads: Annotated[int, typer.Option()] = 0,
    llama_server: Annotated[Path | None, typer.Option()] = None,
    ngrams: Annotated[bool, typer.Option(help="Drafts by n-grams, too")] = False,
) -> None:
    run(
        vocabulary,
        size or ["24x1024"] * (not ngrams),
        folder,
        rounds,
        output,
        threads,
        llama_server,
        ngrams=ngrams,
    )


if __name__ == "__main__":
    typer.run(main)

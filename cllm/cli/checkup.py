"""Checkup of `cllm doctor --full`: examine a model's files, then serve it and ask for all that it can do.

A finding says what was compared; it holds no text of a prompt or an answer.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import DeferredFrees, Library, find, load
from cllm.backend.llama.media import MediaEncoder
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.model import LlamaModel, LlamaVocabulary
from cllm.backend.llama.threads import default_threads
from cllm.chat.reply import ChatReply
from cllm.config import EngineConfig
from cllm.errors import CllmError
from cllm.llm import LLM
from cllm.text.chat_format import Tool, WrittenCall, write_calls
from cllm.text.chat_template import ChatTemplate
from cllm.text.output_parser import OutputParser, ToolCallArguments
from cllm.text.prompt import Chat, PromptBuilder

BENCH_LIMIT_S = 300.0
SAMPLE = 'Grüße, 東京 and Москва: naïve №42 🙂\n\tdef f(x): return {"a": [1, 2]}  # 3.14 %'
PROSE = "The capital of France is Paris. Two plus two is four, and the sun rises in the east every day."
LINES = " ".join(f"Line {number} says that {number} apples cost {3 * number} cents." for number in range(25))
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}}
WEATHER = Tool("get_weather", "The weather of a city.", CITY)
NEAR_TIE = 0.54  # of the top two log-probabilities: what another cut of a prompt moves them by, as measured
MEMORY = 0.9, 1.15  # predicted by held
SPEED = 0.9  # of llama-bench's, less what a busy machine takes
TOKENS = 64  # of an answer whose speed is measured
BUDGET = 16  # tokens of reasoning
GREEDY: Any = {"temperature": 0, "reasoning_effort": "none"}
Found = tuple[bool | None, str]


class Finding(msgspec.Struct, frozen=True):
    """What a check found. `passed` is None where there is nothing to compare."""

    name: str
    passed: bool | None
    detail: str


def check(name: str, function: Callable[..., Found], *arguments: Any) -> Finding:
    """Do one check; an error in it is what it found."""
    try:
        return Finding(name, *function(*arguments))
    except Exception as error:  # of templates and answers in any other shape
        return Finding(name, False, f"{error or type(error).__name__}")


def examine(config: EngineConfig) -> Iterator[Finding]:
    """Examine the files of a model, each part in a process that may die of it."""
    for name, part in PARTS.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                yield from pool.submit(part, config).result()
            except BrokenExecutor:
                yield Finding(name, False, "llama.cpp dies of it")


def examine_weights(config: EngineConfig) -> list[Finding]:
    """Examine the tensors in this process."""
    return [check("tensors", _check_tensors, config, load())]


def examine_texts(config: EngineConfig) -> list[Finding]:
    """Examine the vocabulary and the chat template in this process."""
    try:
        model = LlamaModel(load(), config, DeferredFrees(), vocabulary_only=True)
    except CllmError as error:
        return [Finding("vocabulary", False, error.message)]
    with model:
        vocabulary, findings = model.vocabulary, list[Finding]()
        if model.metadata("tokenizer.ggml.model") in ("llama", "gpt2"):  # others change a text
            findings.append(check("vocabulary", _check_vocabulary, vocabulary))
        if not (source := model.info(config.chat_template).chat_template):
            return [*findings, Finding("template", None, "the file has none: ChatML takes its place")]
        template = _RecordedTemplate(source)
        builder = PromptBuilder(vocabulary, template)
        findings.append(check("template", _check_template, builder, vocabulary))
        findings.append(check("calls in history", _check_history, builder))
        return [*findings, check("as Transformers", _compare_rendered, template)]


def examine_media(config: EngineConfig) -> list[Finding]:
    """Examine the mmproj, or those beside the model, in this process."""
    paths = [Path(config.mmproj)] if config.mmproj else sorted(Path(config.model).parent.glob("mmproj*.gguf"))
    return [check("mmproj", _check_mmproj, config, path) for path in paths]


PARTS = {"tensors": examine_weights, "vocabulary": examine_texts, "mmproj": examine_media}


def _check_tensors(config: EngineConfig, library: Library) -> Found:
    """Find values that are not finite, and matrices of layers with zeros only: holes that a download left."""
    header, damaged = GgufHeader.of(config), []
    for part in header.parts:
        with part.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for tensor in part.tensors:
                data = np.frombuffer(view, np.uint8, tensor.size or 0, part.data_begin + tensor.offset)
                valid = library.api.ggml_validate_row_data(tensor.type_id, data.ctypes.data, len(data))
                matrix = tensor.name.startswith("blk.") and len(tensor.shape) > 1
                filled = not matrix or data[:4096].any() or data.any()
                damaged += [] if valid and filled else [tensor.name]
                del data  # or the file could not be closed
    wrong = f"{len(damaged)} are not finite, or only zeros: {', '.join(damaged[:3])}"
    return not damaged, wrong if damaged else f"{len(header.tensors)} have finite values"


def _check_vocabulary(vocabulary: LlamaVocabulary) -> Found:
    tokens = vocabulary.tokenize(SAMPLE, add_special=False, parse_special=False)
    back = b"".join(map(vocabulary.piece, tokens)).decode("utf-8", "replace").removeprefix(" ")
    same = "comes back" if back == SAMPLE else "comes back as another one"
    return back == SAMPLE, f"{vocabulary.size} tokens; a text of five scripts {same}"


def _say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _check_template(builder: PromptBuilder, vocabulary: LlamaVocabulary) -> Found:
    talk = _say("system", "1st"), _say("user", "2nd"), _say("assistant", "3rd"), _say("user", "4th")
    text = builder.render(Chat(talk))
    places = [text.find(message["content"]) for message in talk]
    if -1 in places or sorted(places) != places:
        return False, "a message is left out, or in another place"
    tokens = vocabulary.tokenize(text[places[2] : places[3]], add_special=False, parse_special=True)
    if vocabulary.ends.isdisjoint(tokens):
        return False, "it ends an answer without an end token: answers run on to their limit"
    return True, "each message is there, in order; an end token ends an answer"


def _check_history(builder: PromptBuilder) -> Found:
    """Render a call and its result; read back the call as the model writes it."""
    arguments, known = {"city": "Tromsø"}, builder.describe(tools=True)
    function = {"name": WEATHER.name, "arguments": json.dumps(arguments)}
    call = _say("assistant", "", tool_calls=[{"id": "call00001", "type": "function", "function": function}])
    result = _say("tool", "3rd", tool_call_id="call00001", name=WEATHER.name)
    text = builder.render(Chat((_say("user", "1st"), call, result), tools=(WEATHER,)))
    parser = OutputParser(known, (WEATHER,))
    events = parser.feed(write_calls(known.calls, [WrittenCall(WEATHER.name, arguments, "call00001")]))
    given = [event.text for event in (*events, *parser.finish()) if isinstance(event, ToolCallArguments)]
    right = "Tromsø" in text and "3rd" in text and json.loads("".join(given)) == arguments
    shown = "come through" if right else "do not come through"
    return right, f"a call ({known.calls.style}) and its result {shown} the template and the parser"


class _RecordedTemplate(ChatTemplate):
    """A template that keeps what it rendered, of which variables."""

    def render(self, /, **variables: Any) -> str:
        text = super().render(**variables)
        self.__dict__.setdefault("texts", []).append((variables, text))
        return text


def _compare_rendered(template: _RecordedTemplate) -> Found:
    try:
        from transformers.utils import chat_template_utils  # type: ignore[import-not-found]
    except ImportError:
        return None, "Transformers cannot be imported"
    theirs, texts = chat_template_utils._compile_jinja_template(template.source), vars(template)["texts"]
    wrong = sum(theirs.render(**variables) != text for variables, text in texts)
    return not wrong, f"{wrong} of {len(texts)} texts differ"


def _check_mmproj(config: EngineConfig, path: Path) -> Found:
    library, frees = load(), DeferredFrees()
    model = LlamaModel(library, config, frees, weights=False)
    with MediaEncoder(library, model, path, frees, threads=1) as encoder:
        return True, f"suits the model; takes pictures: {encoder.sees}, sound: {encoder.sample_rate > 0}"


# A served model --------------------------------------------------------------------------------------------


def ask_model(config: EngineConfig, fit: MemoryFit) -> Iterator[Finding]:
    """Serve the model with settings that are ready, and ask for all that it can do."""
    try:
        with LLM(config=config) as llm:
            if llm.info.generates:
                yield check("memory", _check_memory, llm, fit)
                yield check("prose", _check_prose, llm)
                yield check("tool calls", _check_calls, llm)
                yield check("reasoning", _check_reasoning, llm)
                yield check("JSON schema", _check_schema, llm)
                yield check("turns", _check_turns, llm)
                yield check("prefix cache", _check_cache, llm)
                yield check("speed", _check_speed, llm, config)
            yield check("embeddings", _check_embeddings, llm)
    except CllmError as error:
        yield Finding("start", False, error.message)


def _check_memory(llm: LLM, fit: MemoryFit) -> Found:
    """Compare the sum with what the processes hold, once each weight was read."""
    llm.generate(LINES, max_tokens=8)
    try:
        pids = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in ("self", *pids)]
    except OSError:
        return None, "this system does not tell what a process holds"
    needed, held = fit.places[0].needed, sum(pages) * os.sysconf("SC_PAGE_SIZE")
    media = llm.info.sees or llm.info.hears  # whose worker starts when it is needed
    right = MEMORY[0] <= needed / held and (media or needed / held <= MEMORY[1])
    return right, f"the host: predicted {needed >> 20} MiB, held {held >> 20}"


def _check_prose(llm: LLM) -> Found:
    """Compare the loss of plain English with that of drawing tokens by lot."""
    (answer,) = llm.generate(PROSE, max_tokens=1, prompt_logprobs=0)
    scores = [entry.logprob for entry in answer.prompt_logprobs]
    loss, chance = -sum(scores) / len(scores), math.log(llm.info.vocabulary_size)
    return loss < chance - 1, f"plain English has {loss:.2f} nats a token, by lot {chance:.2f}"


def _stream(llm: LLM, prompt: str, **options: Any) -> tuple[int, ChatReply]:
    """Pieces of reasoning, and the reply, of a stream."""
    chunks = list(llm.chat(prompt, stream=True, **options))
    assert chunks[-1].reply is not None
    return sum(bool(chunk.reasoning) for chunk in chunks), chunks[-1].reply


def _check_calls(llm: LLM) -> Found:
    """Force a call, and leave it to the model; as a whole and as a stream."""
    question, shown = "What is the weather in Oslo?", []
    for choice in ("required", "auto"):
        given: Any = {"tools": [WEATHER.for_template()], "tool_choice": choice, **GREEDY}
        replies = {"whole": llm.chat(question, **given), "streamed": _stream(llm, question, **given)[1]}
        for way, reply in replies.items():
            read = [(call.name, *json.loads(call.arguments)) for call in reply.tool_calls]
            shown.append(f"{choice}, {way}: {len(read)}")
            if {*read} - {(WEATHER.name, "city")} or (choice == "required" and not read):
                return False, f"{shown[-1]}, and not what the tool takes"
    return True, "; ".join(shown)


def _check_reasoning(llm: LLM) -> Found:
    options = {"max_tokens": 100, "temperature": 0, "reasoning_budget": BUDGET}
    count, reply = _stream(llm, "How many legs have three cats?", **options)
    if "think>" in reply.text or not reply.reasoning:
        return False if "think>" in reply.text else None, "none is split from the answer"
    return count <= BUDGET + 1, f"{count} pieces with a budget of {BUDGET}"


def _check_schema(llm: LLM) -> Found:
    found = json.loads(llm.chat("Which city is it?", response_format=FORM, **GREEDY).text)
    return isinstance(found["city"], str), f"an object of {len(found)} field follows it"


def _check_turns(llm: LLM) -> Found:
    """Ask a second question, after the answer as it was, and after another one: as without its thoughts."""
    shown, right = [], True
    for kind in ("as it was", "without thoughts"):
        talk = [_say("user", f"An answer {kind}. {LINES}")]
        first = llm.chat(talk, max_tokens=24, temperature=0)
        talk += _say("assistant", first.text if kind == "as it was" else "I see."), _say("user", "And then?")
        asked, usage = first.usage.prompt_tokens, llm.chat(talk, max_tokens=1).usage
        computed, new = usage.prompt_tokens - usage.cached_tokens, usage.prompt_tokens - asked
        right &= computed <= 1.1 * new + 16
        shown.append(f"{kind}: {computed} of {usage.prompt_tokens} computed, {new} new")
    return right, "; ".join(shown)


def _check_cache(llm: LLM) -> Found:
    """Compare greedy answers without and with a cached prompt; they may part at a near tie."""
    hits = equal = ties = 0
    for number in range(4):
        prompt = f"Number {number}. {LINES} Tell me about line {number}."
        options: Any = {"max_tokens": 24, "logprobs": True, "top_logprobs": 2, **GREEDY}
        first, second = (llm.chat(prompt, **options) for _ in range(2))
        hits += second.usage.cached_tokens > second.usage.prompt_tokens // 2
        pairs = zip(first.logprobs, second.logprobs, strict=False)
        parted = [one.top for one, other in pairs if one.token != other.token][:1]
        equal += not parted
        ties += any(top[0][1] - top[-1][1] <= NEAR_TIE for top in parted)
    shown = f"{hits} of 4 prompts cached; {equal} texts equal, {ties} part at a near tie"
    return equal + ties == hits == 4, shown


def _check_embeddings(llm: LLM) -> Found:
    first, second, again = map(np.array, llm.embed([PROSE, LINES[:200], PROSE]))
    right = abs(first @ first - 1) < 0.01 and first @ again > 0.999 > first @ second
    return bool(right), f"{len(first)} numbers: of norm 1, alike for one text only"


def _check_speed(llm: LLM, config: EngineConfig) -> Found:
    """Measure 1, 4 and 8 requests at a time, and llama-bench of the same build with one."""
    speeds = {}
    for count in (1, 4, 8)[: 1 + (config.parallel >= 4) + (config.parallel >= 8)]:
        for attempt in range(2):  # the first measures what steps cost
            prompts = [f"{number}, {attempt}: {LINES[:200]}" for number in range(count)]
            started = time.monotonic()
            answers = llm.generate(prompts, max_tokens=TOKENS, ignore_eos=True)
            speeds[count] = count * TOKENS / (time.monotonic() - started)
    shown = ", ".join(f"{speed:.0f} tokens/s at {count}" for count, speed in speeds.items())
    lengths = f"{answers[0].usage.prompt_tokens},{TOKENS}"
    command = [str(find() / "bin" / "llama-bench"), "-m", config.model, "-p", "0", "-n", "0", "-pg", lengths]
    command += ["-r", "2", "-o", "json", "-ngl", str(config.gpu_layers)]
    command += ["-t", str(config.threads or default_threads())]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=BENCH_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None, f"{shown}; not compared: no llama-bench (`cllm build --with-server`), or it failed"
    theirs = TOKENS * 1e9 / json.loads(done.stdout)[0]["avg_ns"]
    return speeds[1] >= SPEED * theirs, f"{shown}; llama-bench {theirs:.0f} at 1"

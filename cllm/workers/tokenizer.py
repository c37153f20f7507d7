"""Tokenizer worker: tokenising, chat templates and grammar checks for one model, without weights or KV.

It runs in a process of its own: hostile text may crash native code (invariant: survives native death).
"""

from __future__ import annotations

import logging
import resource
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path

import msgspec

from cllm import messages
from cllm.config import EngineConfig
from cllm.errors import CllmError, ContextLengthExceeded, NotSupported
from cllm.text.chat_template import ChatTemplate, Guard, deadly_guard
from cllm.text.prompt import Chat, Gap, PreparedPrompt, PromptBuilder, PromptInput, PromptParts, infill_prompt
from cllm.text.structured_output import GrammarCompiler
from cllm.types import ConstraintSpec, Failure, TokenBound, Vocabulary
from cllm.workers.channel import Channel
from cllm.workers.executor import THREADS

log = logging.getLogger(__name__)
COMPILE_LIMIT_S = 10.0  # CPU time; what is within the limits takes a second at most
MAX_MEMORY = 4 << 30  # bytes beyond what it has when the vocabulary is loaded


class TokenizerWorker:
    """Does tokenizer tasks for one model. Safe from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None,
        guard: Guard = nullcontext,
        *,
        compile_guard: Guard = nullcontext,
        tool_template: str | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        templates = (ChatTemplate(source, guard) if source else None for source in (template, tool_template))
        self._prompts = PromptBuilder(vocabulary, *templates)
        self._guard = compile_guard
        self._lock = threading.Lock()

    @cached_property
    def _constraints(self) -> GrammarCompiler:
        return GrammarCompiler(self._vocabulary, guard=self._guard)  # takes half a second

    def warm_up(self) -> None:
        """Build the grammar compiler, so that the first grammar holds up no text."""
        with self._lock:
            _ = self._constraints

    def perform(self, task: messages.TokenizerTask) -> messages.TokenizerAnswer:
        """Do a task; what is wrong with it comes back as a Failure, never as an exception."""
        vocabulary = self._vocabulary
        try:
            messages.check_task(task, vocabulary)
            match task:
                case messages.Prepare(inputs, max_tokens, constraint, texts):
                    if constraint is not None:  # once, however many prompts there are
                        self._check(constraint)
                    prompts = tuple(self._prepare(each, max_tokens, constraint) for each in inputs)
                    plain = partial(vocabulary.tokenize, add_special=False, parse_special=False)
                    return messages.Prepared(prompts, tuple(tuple(plain(text)) for text in texts))
                case messages.RenderChat(chat):
                    return messages.Text(self._prompts.render(chat))
                case messages.TokenizeTexts(texts, max_tokens, field):
                    tokenize = partial(vocabulary.tokenize, add_special=True, parse_special=False)
                    return _all_limited(map(tokenize, texts), max_tokens, field)
                case messages.TokenizePairs(query, documents, max_tokens):
                    pairs = (vocabulary.tokenize_pair(query, document) for document in documents)
                    return _all_limited(pairs, max_tokens, "documents")
                case messages.Detokenize(tokens):
                    return messages.Text(b"".join(map(vocabulary.piece, tokens)).decode("utf-8", "replace"))
                case messages.SpellTokens(tokens):
                    return messages.Pieces(tuple(map(self._spell, tokens)))
                case messages.EncodeMedia():
                    raise NotSupported("this model accepts text only")
        except CllmError as error:
            return Failure.of(error)

    def _prepare(
        self, given: PromptInput, max_tokens: int, constraint: ConstraintSpec | None
    ) -> PreparedPrompt:
        vocabulary = self._vocabulary
        if isinstance(given, Chat):
            prompt = self._prompts.prepare(given, constraint, max_tokens, self._check)
        else:
            found = PromptParts({} if isinstance(given, Gap) else given.media)
            if isinstance(given, Gap):
                found.items = infill_prompt(vocabulary, given)
            else:
                for index, piece in enumerate(given.pieces):
                    if isinstance(piece, int):
                        found.items.append(piece)
                        continue
                    for text in found.split(piece):  # special tokens are added at the beginning only
                        first = given.add_special and not index and not found.items
                        found.items += vocabulary.tokenize(
                            text, add_special=first, parse_special=given.parse_special
                        )
            prompt = PreparedPrompt(found.build(), constraint=constraint)
        if max_tokens and len(prompt.prompt) > max_tokens:
            raise ContextLengthExceeded(len(prompt.prompt), max_tokens)
        return prompt

    def _check(self, spec: ConstraintSpec) -> None:
        with self._lock:
            self._constraints.check(spec)

    def _spell(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        control = vocabulary.is_control(token)
        return vocabulary.spelling(token).encode() if control else vocabulary.piece(token)


def _all_limited(inputs: Iterable[list[int]], max_tokens: int, field: str) -> messages.TokenLists:
    lists: list[tuple[int, ...]] = []
    for index, tokens in enumerate(inputs):
        if max_tokens and len(tokens) > max_tokens:
            raise ContextLengthExceeded.of_input(index, len(tokens), max_tokens, field)
        lists.append(tuple(tokens))
    return messages.TokenLists(tuple(lists))


def serve_tokenizer(channel: Channel, config: EngineConfig) -> None:
    """Answer tokenizer tasks until the parent closes its end."""
    from cllm.backend.llama.library import DeferredFrees, load
    from cllm.backend.llama.model import LlamaModel

    model = LlamaModel(load(), config, DeferredFrees(), vocabulary_only=True)
    info = model.info(config.chat_template)
    worker = TokenizerWorker(
        model.vocabulary,
        info.chat_template,
        deadly_guard,
        compile_guard=partial(deadly_guard, COMPILE_LIMIT_S, signal.SIGXCPU),
        tool_template=info.tool_template,
    )
    limit_memory()
    threading.Thread(target=worker.warm_up, name="warm-up", daemon=True).start()
    answer_tasks(channel, worker.perform, model.vocabulary.bound)


def limit_memory() -> None:
    """Let hostile input end this process, but not take all of the machine's memory.

    What may be written counts. A GPU's kernels reserve addresses for far more than they use.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (OSError, ValueError):
        pass  # the system does not support it


def answer_tasks(
    channel: Channel,
    perform: Callable[[messages.TokenizerTask], messages.TokenizerAnswer],
    bound: TokenBound,
    *,
    threads: int = THREADS,
) -> None:
    """Perform what comes in, several tasks at a time, until the parent closes its end.

    `bound` is that of the worker's vocabulary.
    """
    decoder = msgspec.msgpack.Decoder(messages.TokenizerCall)

    def answer(call: messages.TokenizerCall) -> None:
        try:
            answer = perform(call.task)
        except Exception as error:  # every task gets an answer; the log names no text
            log.error("a tokenizer task failed: %s in %s", type(error).__name__, type(call.task).__name__)
            answer = Failure("engine_error", "this text could not be processed")
        channel.send(msgspec.msgpack.encode(messages.TokenizerReply(call.call_id, answer)))

    channel.send(msgspec.msgpack.encode(messages.TokenizerReady(bound)))
    with ThreadPoolExecutor(threads) as pool:
        while (frame := channel.receive()) is not None:
            pool.submit(answer, decoder.decode(frame))

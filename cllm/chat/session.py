"""Chat session: a conversation opened on an engine, its outputs read as changes of replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from cllm.chat.conversation import Conversation
from cllm.chat.reply import BlockEvent, ReplyBuilder
from cllm.errors import CllmError
from cllm.frontend.async_calls import loaded, merged, run_tokenizer, submit_all
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.messages import EncodedMedia, EncodeMedia, Prepare, Prepared
from cllm.text.output_parser import OutputParser
from cllm.text.prompt import Chat
from cllm.types import ConstraintKind, ConstraintSpec, Prompt, Request, RequestOutput

ChatStep = tuple[int, list[BlockEvent], RequestOutput]  # which choice, the changes of its reply, the output


class ChatSession(NamedTuple):
    """A conversation with n choices on their way, each with a reply of its own."""

    engine: EngineClient
    chat: Chat
    prompt_tokens: int
    streams: list[AsyncOutputStream]
    replies: list[ReplyBuilder]

    async def steps(self) -> AsyncIterator[ChatStep]:
        """The changes of all replies as they arrive."""
        if len(self.streams) == 1:  # the usual case, without a generator in between
            stream, reply = self.streams[0], self.replies[0]
            while True:
                output = await stream.next()
                yield 0, reply.add(output), output
                if output.finish_reason is not None:
                    return
        async for index, output in merged(self.streams):
            yield index, self.replies[index].add(output), output

    def finish(self, collected: Iterable[Iterable[RequestOutput]]) -> list[ReplyBuilder]:
        """The replies, from all outputs of each choice."""
        for reply, outputs in zip(self.replies, collected, strict=True):
            for output in outputs:
                reply.add(output)
        return self.replies


async def open_chat(
    engine: EngineClient, conversation: Conversation, request: Request, n: int = 1
) -> ChatSession:
    """Submit n choices. Raises InvalidRequest (template, grammar), and what `EngineClient.submit` raises.

    `request` gives everything but the prompt. A constraint of it is for the text of the answer.
    """
    engine.check_capacity(request.tenant)
    limit = loaded(engine)[1].request_tokens
    texts = (conversation.prediction,) if conversation.prediction else ()
    media, rows = await encode_pictures(engine, conversation.pictures, request.tenant)
    chat = conversation.for_template(media)
    prepared = await run_tokenizer(engine, Prepare((chat,), limit, request.constraint, texts), Prepared)
    (prompt,) = prepared.prompts
    assert prompt.chat_format is not None
    request = msgspec.structs.replace(
        request,
        media=rows,
        constraint=prompt.constraint,
        reasoning=prompt.reasoning,
        markers=prompt.chat_format.markers,
        prediction=prepared.texts[0][:limit] if prepared.texts else (),
    )
    streams = submit_all(engine, request, [prompt.prompt], n, AsyncOutputStream)
    formed = prompt.constraint is not None and prompt.constraint.kind is not ConstraintKind.TOOLS
    make_parser = partial(
        OutputParser,
        prompt.chat_format,
        () if formed else chat.tools,
        thinking=prompt.thinking,
        forced=chat.forced,
        parallel=chat.parallel,
        reasoning=conversation.reasoning and (prompt.thinking or not formed or bool(prompt.chat_format.lead)),
    )
    replies = [ReplyBuilder(make_parser()) for _ in streams]
    return ChatSession(engine, chat, len(prompt.prompt), streams, replies)


async def encode_pictures(
    engine: EngineClient, pictures: Mapping[str, str], tenant: str = "", *, rows: bool = True
) -> tuple[dict[str, Prompt], dict[str, bytes]]:
    """Pictures by their markers as parts of a prompt, and their rows. Raises InvalidRequest."""
    if not pictures:
        return {}, {}
    task = EncodeMedia(tuple(pictures.values()), tenant, rows, engine.streaming)
    with engine.encoding():
        if task.streams:  # first their step ends, which has all cores
            with suppress(CllmError):
                await asyncio.wrap_future(engine.inspect())
        found = await run_tokenizer(engine, task, EncodedMedia)
    if rows:
        engine.metrics.pictures.labels("encoded").inc(found.encoded)
        engine.metrics.pictures.labels("cache").inc(len(pictures) - found.encoded)
    return dict(zip(map(str, pictures), found.prompts, strict=True)), found.rows


async def count_tokens(
    engine: EngineClient, conversation: Conversation, constraint: ConstraintSpec | None = None
) -> int:
    """Length of the prompt of this conversation, even where it is too long; nothing is generated."""
    media, _ = await encode_pictures(engine, conversation.pictures, rows=False)
    task = Prepare((conversation.for_template(media),), 0, constraint)
    return len((await run_tokenizer(engine, task, Prepared)).prompts[0].prompt)

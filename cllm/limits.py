"""Limits: what a request may cost before anything is computed for it.

Each is checked before the work that it bounds, on every API. What exceeds one is refused with its name, and
`docs/limits.md` lists them all.
"""

from __future__ import annotations

from typing import NamedTuple

from cllm.errors import InvalidRequest


class Limit(NamedTuple):
    """A limit as the documents show it."""

    name: str
    value: int
    bounds: str


LIMITS: list[Limit] = []


def _limit(value: int, name: str, bounds: str) -> int:
    LIMITS.append(Limit(name, value, bounds))
    return value


def check(count: int, limit: int, what: str, field: str | None, advice: str = "") -> None:
    """Raise InvalidRequest if `count` exceeds a limit. `what` names the limit, `field` what is counted."""
    if count > limit:
        place = f"{field or 'the body'}: {count} {what}, the limit is {limit}"
        raise InvalidRequest(f"{place}: {advice}" if advice else place, field)


# A body, counted in its bytes before it is decoded. Measured on one core of a busy x86 machine: no call takes
# the interpreter's lock for more than 50 ms.
MAX_DEPTH = _limit(64, "levels", "objects and lists inside each other, in a body")
MAX_VALUES = _limit(1 << 17, "values", "JSON values of a body, at any depth")
MAX_CONTAINERS = _limit(1 << 15, "objects and lists", "objects and lists of a body, at any depth")

# Fields.
MAX_MESSAGES = _limit(4096, "messages", "messages or items of a conversation; parts of one message")
MAX_TOOLS = _limit(4096, "tools", "tools of a request; calls of one message")
MAX_PROMPTS = _limit(256, "prompts", "prompts times the answers to each; token ids also count as values")
MAX_CHOICES = _limit(64, "answers", "answers to a prompt")
MAX_INPUTS = _limit(
    2048, "inputs", "inputs of `/v1/embeddings` (token ids also count as values), documents of `/v1/rerank`"
)
MAX_STOPS = _limit(16, "stop texts", "stop texts of a request")
MAX_TEXT = _limit(256, "characters of a stop text", "characters of a stop text or of a choice")
MAX_OPTIONS = _limit(256, "choices", "texts that an answer may be chosen from")
MAX_BIASES = _limit(1024, "biases", "entries of `logit_bias`; also of `stop_token_ids`")
MAX_BIASED_TOKENS = _limit(4096, "biased tokens", "tokens that the texts of `logit_bias` become")
MAX_TOKENIZED = _limit(2 << 20, "bytes to tokenise", "UTF-8 bytes of the text of `/tokenize` and `/encode`")
MAX_PIECES = _limit(1 << 16, "bytes with pieces", "the same where `with_pieces` is set")

# Pictures, counted before they are decoded. A request's rows are kept until it ends, for the next engine.
MAX_PICTURES = _limit(32, "pictures", "pictures of a request")
MAX_PICTURE_BYTES = _limit(20 << 20, "bytes of a picture", "bytes of a picture's file, without base64")
MAX_PIXELS = _limit(1 << 26, "pixels", "width times height of a picture, by its header")
MAX_FETCH_S = _limit(20, "seconds to fetch", "time to fetch a request's pictures of hosts of `--media-hosts`")
MAX_REDIRECTS = _limit(3, "redirects", "redirects to one of them")
MAX_SOUND_S = _limit(1800, "seconds of sound", "seconds of one sound")
MAX_ROW_BYTES = _limit(128 << 20, "bytes of rows", "bytes of the rows that a request's pictures become")

# Batches.
MAX_FILE_BYTES = _limit(200 << 20, "bytes of a file", "bytes of a file that is uploaded")
MAX_BATCH_LINES = _limit(50_000, "lines", "requests of a batch")
MAX_UPLOADS = _limit(4, "uploads", "files that a key uploads at the same time; one more gets a 429")

# Streams that can be reconnected to, and background answers.
MAX_LOG_BYTES = _limit(16 << 20, "bytes of a kept stream", "events of one answer; older ones are dropped")
MAX_LOGS_BYTES = _limit(256 << 20, "bytes of kept streams", "the same of all answers together")
MAX_RECONNECT_S = _limit(600, "seconds to reconnect", "`reconnect_s` of a request")

# Grammars, expressions, schemas, and the tools of a request together. Counted before native code sees them.
MAX_SOURCE = _limit(256 << 10, "characters", "characters of a grammar, an expression or a schema")
MAX_NESTING = _limit(64, "nested brackets", "brackets inside each other, in the same")
MAX_RULES = _limit(512, "rules", "rules of a grammar")
MAX_REFERENCES = _limit(512, "references", "`$ref` of all schemas of a request")
MAX_PROPERTIES = _limit(4096, "properties", "properties of all schemas of a request")
MAX_OBJECT_PROPERTIES = _limit(1024, "properties of one object", "properties of one object in a schema")
MAX_COMBINATIONS = _limit(1024, "combinations", "ways to combine the alternatives of one value (`allOf`)")
MAX_LEXER_STATES = _limit(1 << 16, "states", "states that the text of an answer makes of its grammar")
MAX_MASK_MS = _limit(25, "ms a mask", "CPU time of one token mask, tried before the first token")

"""A fake model that says what its prompt tells it to: exact answers for tests of what surrounds an engine.

`say("text")` anywhere in a prompt makes it answer `text`, one byte a token, and end. With `fails`, the step
after `text` fails for that request. Anything else is answered as `FakeBackend` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.backend.fake import END_TOKEN, FakeBackend, next_token
from cllm.types import SamplingParams

TURN = 257  # the fake vocabulary's control token: the template opens the assistant's turn with it
# Roles and tools as text, then the token that opens the answer. What it says of tool calls names their
# format, as published templates do.
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}, to be used as <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}<|x|>"
)
BEGIN, END, FAIL = "\x02", "\x03", "\x04"


def say(text: str, *, fails: bool = False) -> str:
    """What to put into a prompt."""
    return f"{BEGIN}{text}{FAIL if fails else ''}{END}"


class Script:
    """An answer as its prompt dictates it, and how much of it has been said."""

    def __init__(self, text: bytes, said: int) -> None:
        self.fails = text.endswith(FAIL.encode())
        self.text = text.removesuffix(FAIL.encode())
        self.said = said

    @property
    def over(self) -> bool:
        return self.said >= len(self.text)


def script_of(memory: Sequence[int]) -> Script | None:
    """The script in a sequence's tokens, if there is one: the last of a conversation, or of a raw prompt."""
    turns = [index for index, token in enumerate(memory) if token == TURN]
    plain = bytes(token if token < 256 else 0 for token in memory)
    begin = plain.rfind(BEGIN.encode(), 0, turns[-1] if turns else len(plain))
    end = plain.find(END.encode(), begin)
    if begin < 0 or end < 0:
        return None
    answer = turns[-1] + 1 if turns else end + 1
    return Script(plain[begin + 1 : end], len(memory) - answer)


class ScriptedBackend(FakeBackend):
    """`FakeBackend`, with the answers of its prompts."""

    def forward(self, batch: Batch) -> StepResult:
        for row in batch.rows:
            script = script_of([*self.memory[row.sequence_id], *row.tokens]) if row.outputs else None
            if script is not None and script.fails and script.over:
                return StepResult(StepStatus.BAD_BATCH, code=-1)
        return super().forward(batch)

    def _choose(self, memory: Sequence[int], params: SamplingParams) -> int:
        script = script_of(memory)
        if script is None:
            return next_token(memory, params.seed, ends=not params.ignore_eos)
        return END_TOKEN if script.over else script.text[script.said]

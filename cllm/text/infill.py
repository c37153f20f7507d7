"""A gap in a text, told with the model's own fill-in-the-middle tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cllm.errors import InvalidRequest
from cllm.types import InfillTokens, Vocabulary

PROJECT = "myproject\n"  # what llama-server tells a model that wants names; nobody sends real ones
FILE = "filename\n"
BETWEEN_FILES = "\n\n--- snippet ---\n\n"  # for models without a mark for files


class Snippet(msgspec.Struct, frozen=True):
    """Another piece of the project, for the model to know."""

    text: str
    filename: str = "tmp"


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before and after the gap. `prompt` is the beginning of what goes into it.

    `snippets` is None where just a text has a gap, and a list (maybe empty) where a file of a project has.
    """

    prefix: str | tuple[int, ...]
    suffix: str
    prompt: str = ""
    snippets: tuple[Snippet, ...] | None = None


def infill_prompt(vocabulary: Vocabulary, gap: Gap, room: int = 0) -> list[int]:
    """The tokens that ask for what belongs into the gap. Raises InvalidRequest.

    With `room`, what does not fit is cut away from its far ends: the prefix keeps its end, the suffix its
    beginning (three parts to one, if both are too long), snippets get what is left.
    Only `prompt` may hold control tokens.
    """
    marks = vocabulary.infill
    if marks is None:
        raise InvalidRequest(
            "this model has no fill-in-the-middle tokens: send a plain prompt, without a suffix",
            field="suffix" if gap.snippets is None else "input_suffix",
        )

    def plain(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    prompt = vocabulary.tokenize(gap.prompt, add_special=False, parse_special=True)
    prefix = plain(gap.prefix) if isinstance(gap.prefix, str) else list(gap.prefix)
    suffix = plain(gap.suffix)
    around = _project(vocabulary, marks, gap.snippets) if gap.snippets is not None else []
    if room:
        left = max(0, room - len(prompt) - 3 - (marks.begin is not None))
        kept = max(min(len(suffix), left // 4), left - len(prefix))  # the suffix's part: what it may have
        suffix = suffix[: max(0, kept)]
        prefix = _last(prefix, left - len(suffix))
        around = _last(around, left - len(suffix) - len(prefix))
    begin = [] if marks.begin is None else [marks.begin]
    return [*begin, *around, marks.prefix, *prefix, *prompt, marks.suffix, *suffix, marks.middle]


def _project(vocabulary: Vocabulary, marks: InfillTokens, snippets: Sequence[Snippet]) -> list[int]:
    """The other files, then the name of this one, as models with such marks were taught."""

    def plain(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    tokens: list[int] = []
    if marks.repository is not None:
        tokens += [marks.repository, *plain(PROJECT)]
    for snippet in snippets:
        if marks.separator is not None:
            tokens += [marks.separator, *plain(f"{snippet.filename}\n")]
        else:
            tokens += plain(BETWEEN_FILES)
        tokens += plain(snippet.text)
    if marks.separator is not None:
        tokens += [marks.separator, *plain(FILE)]
    return tokens


def _last(tokens: list[int], count: int) -> list[int]:
    return tokens[len(tokens) - count :] if 0 < count < len(tokens) else tokens[: max(0, count)]

"""Structured output on the vocabularies that llama.cpp's source carries.

Needs no weights: tokens are drawn at random from what each mask allows, and forced ones are taken, as an
engine does. No answer may be refused, and every answer that ends must fit its constraint.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import jsonschema
import numpy as np

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel
from cllm.config import EngineConfig
from cllm.errors import InvalidRequest
from cllm.text.structured_output import GrammarCompiler, MaskBuilder
from cllm.types import ConstraintKind, ConstraintSpec, Vocabulary
from proof.command import make_parser
from tests.driver.corpus import vocabulary_files
from tests.driver.masks import get_mask

ENCODERS = ("bert-bge", "nomic-bert-moe")  # no text is generated with these; they cannot spell a line break
MAX_TOKENS = 120
SCHEMA = {
    "type": "object",
    "properties": {
        "city name": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"enum": ["Monday", "Tuesday"]}, "minItems": 1, "maxItems": 3},
        "warm": {"type": "boolean"},
    },
    "required": ["city name", "days", "warm"],
}
CHOICES = ["alpha beta", "ein schöner Tag", "  two blanks", "你好 (x)"]
TOOLS = f"""start: call AFTER
call: %json {json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False, "key_separator": ": "}})}
AFTER: "\\n</tool_call>"
"""


def _fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


# Name → the constraint, and whether a text fits it.
CONSTRAINTS: dict[str, tuple[ConstraintSpec, Callable[[str], bool]]] = {
    "json_object": (
        ConstraintSpec(ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "json_schema": (ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)), _fits_schema),
    "gbnf": (
        ConstraintSpec(ConstraintKind.GRAMMAR, 'root ::= "the end of " [a-z]{2,4} "\\n" " is near"'),
        lambda text: re.fullmatch(r"the end of [a-z]{2,4}\n is near", text) is not None,
    ),
    "lark": (
        ConstraintSpec(ConstraintKind.GRAMMAR, 'start: "the day " /[0-9]{2}/ " of June"'),
        lambda text: re.fullmatch("the day [0-9]{2} of June", text) is not None,
    ),
    "regex": (
        ConstraintSpec(ConstraintKind.REGEX, " ?about [0-9]{3} € in all"),
        lambda text: re.fullmatch(" ?about [0-9]{3} € in all", text) is not None,
    ),
    "choice": (ConstraintSpec(ConstraintKind.CHOICE, json.dumps(CHOICES)), CHOICES.__contains__),
    "tools": (
        ConstraintSpec(ConstraintKind.TOOLS, TOOLS),
        lambda text: text.endswith("\n</tool_call>") and _fits_schema(text.removesuffix("\n</tool_call>")),
    ),
}


def write(
    compiler: GrammarCompiler, vocabulary: Vocabulary, spec: ConstraintSpec, seed: int
) -> tuple[str, bool]:
    """A random answer, and whether it is complete. Raises InvalidRequest where it is refused."""
    source = random.Random(seed)
    constraint, masks = compiler.compile(spec), MaskBuilder(vocabulary.size)
    forced: list[int] = []
    data = b""
    for _ in range(MAX_TOKENS):
        if constraint.complete:
            break
        if not forced:
            allowed = np.flatnonzero(get_mask(masks, constraint))
            endings = [token for token in allowed[:2000].tolist() if vocabulary.piece(token) in (b'"', b"}")]
            often = endings if endings and source.random() < 0.3 else allowed.tolist()
            forced = [source.choice(often)]
        token = forced.pop(0)
        if token in vocabulary.ends:
            return data.decode(), True
        constraint.accept(token)
        data += vocabulary.piece(token)
        forced = forced or list(constraint.forced())
    return data.decode("utf-8", "replace"), constraint.complete


def check_vocabulary(path: Path, seeds: int) -> tuple[list[str], int]:
    """What is wrong with the answers on one vocabulary, and how many of them were complete."""
    faults: list[str] = []
    completed = 0
    config = EngineConfig(model=str(path))
    with closing(LlamaModel(load(), config, DeferredFrees(), vocabulary_only=True)) as model:
        compiler = GrammarCompiler(model.vocabulary)
        for name, (spec, fits) in CONSTRAINTS.items():
            for seed in range(seeds):
                try:
                    text, complete = write(compiler, model.vocabulary, spec, seed)
                    completed += complete
                    if complete and not fits(text):
                        faults.append(f"{name}: {text[:80]!r} does not fit")
                except (InvalidRequest, ValueError, jsonschema.ValidationError) as error:
                    faults.append(f"{name}: {str(error).splitlines()[0]}")
    return faults, completed


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, seeds=(5, "answers for each constraint"))
    options = parser.parse_args(arguments)
    failed = 0
    for name, path in vocabulary_files().items():
        if name in ENCODERS:
            continue
        faults, completed = check_vocabulary(path, options.seeds)
        failed += bool(faults)
        print(f"{name}: {completed} of {options.seeds * len(CONSTRAINTS)} complete", *faults, sep="\n  ")
    return int(failed > 0)

"""Jinja as published chat templates expect it: what Transformers renders them with, in few lines."""

from __future__ import annotations

import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: marks the model's words for training; here, just its inside."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


EXTENSIONS: tuple[type[Extension], ...] = (LoopControls, GenerationTag)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML's escapes, in the argument order of Transformers."""
    if indent is not None and not 0 <= indent <= 16:
        raise jinja2.TemplateError("tojson: indent must be between 0 and 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

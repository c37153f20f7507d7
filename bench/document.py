"""A report as a list of blocks, written as Markdown or as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from bench.report import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1080px; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { border-bottom: 1px solid #d0d7de; padding-bottom: .3rem; margin-top: 2.2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 13.5px; }
th, td { border: 1px solid #d0d7de; padding: .3rem .6rem; text-align: left; white-space: nowrap; }
th { background: #f6f8fa; } td.met { color: #1a7f37; } td.missed { color: #b42318; font-weight: 600; }
img { max-width: 100%; } figcaption { color: #57606a; font-size: 13px; } figure { margin: 1.2rem 0; }
"""


class Heading(NamedTuple):
    """`level` as in HTML: the title is 1."""

    level: int
    text: str


class Paragraph(NamedTuple):
    text: str


class Bullets(NamedTuple):
    items: Sequence[str]


class Picture(NamedTuple):
    """An image file, by its path inside the report's folder."""

    path: str
    caption: str


Block = Heading | Paragraph | Bullets | Table | Picture


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    blocks: Sequence[Block]

    def markdown(self) -> str:
        return "\n\n".join([f"# {self.title}", *map(_markdown, self.blocks)]) + "\n"

    def html(self, folder: Path) -> str:
        """Pictures are read from `folder` and put into the page."""
        body = "\n".join(_html(block, folder) for block in self.blocks)
        title = escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
        )


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table():
            return block.markdown()
        case Picture(path, caption):
            return f"![{caption}]({path})\n\n*{caption}*"


def _html(block: Block, folder: Path) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Table(columns, rows):
            head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
            body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
            return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        case Picture(path, caption):
            data = base64.b64encode((folder / path).read_bytes()).decode()
            image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _cell(text: str) -> str:
    kind = (
        ' class="met"' if text.startswith("met") else ' class="missed"' if text.startswith("MISSED") else ""
    )
    return f"<td{kind}>{escape(text)}</td>"

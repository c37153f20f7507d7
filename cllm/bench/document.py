"""A report as a list of blocks, written as Markdown or as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from cllm.bench.report import Table

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


@dataclass(frozen=True, slots=True)
class Heading:
    level: int
    text: str

    def markdown(self) -> str:
        return f"{'#' * self.level} {self.text}"

    def html(self, folder: Path) -> str:
        return f"<h{self.level}>{escape(self.text)}</h{self.level}>"


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str

    def markdown(self) -> str:
        return self.text

    def html(self, folder: Path) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True, slots=True)
class Bullets:
    items: Sequence[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self, folder: Path) -> str:
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in self.items) + "</ul>"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table."""

    table: Table

    def markdown(self) -> str:
        return self.table.markdown()

    def html(self, folder: Path) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.table.columns)
        rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in self.table.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file, by its path inside the report's folder."""

    path: str
    caption: str

    def markdown(self) -> str:
        return f"![{self.caption}]({self.path})\n\n*{self.caption}*"

    def html(self, folder: Path) -> str:
        data = base64.b64encode((folder / self.path).read_bytes()).decode()
        alt = escape(self.caption)
        image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{alt}</figcaption></figure>"


Block = Heading | Paragraph | Bullets | Grid | Picture


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    blocks: Sequence[Block]

    def markdown(self) -> str:
        return "\n\n".join([f"# {self.title}", *(block.markdown() for block in self.blocks)]) + "\n"

    def html(self, folder: Path) -> str:
        """Pictures are read from `folder` and put into the page."""
        body = "\n".join(block.html(folder) for block in self.blocks)
        title = escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
        )


def _cell(text: str) -> str:
    kind = (
        ' class="met"' if text.startswith("met") else ' class="missed"' if text.startswith("MISSED") else ""
    )
    return f"<td{kind}>{escape(text)}</td>"

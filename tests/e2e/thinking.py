"""The tiny model with another chat template: one that lets it think unless a request disables it."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_models import CHAT_TEMPLATE, make_dense

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "<|im_start|>assistant {% if enable_thinking is undefined or enable_thinking %}<think>{% endif %}"
)


def make_thinking(path: Path) -> Path:
    """Greedy, it thinks for ever. The template is put over the one in the file: both have the same length."""
    padding = len(CHAT_TEMPLATE) - len(TEMPLATE) - len("{##}")
    assert padding >= 0
    padded = TEMPLATE + "{#" + " " * padding + "#}"
    content = make_dense(path).read_bytes()
    assert content.count(CHAT_TEMPLATE.encode()) == 1
    path.write_bytes(content.replace(CHAT_TEMPLATE.encode(), padded.encode()))
    return path

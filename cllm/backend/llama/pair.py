"""A query and a document as a reranker reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

Tokenize = Callable[[str, bool], list[int]]  # text, whether spellings of control tokens are taken for them


class PairFrame(NamedTuple):
    """What stands around the two: control tokens, or a template of the model's own."""

    before: Sequence[int]
    between: Sequence[int]
    after: Sequence[int]
    template: str | None = None  # with {query} and {document} in it

    def tokens(self, query: str, document: str, tokenize: Tokenize, controls: frozenset[str]) -> list[int]:
        """Nothing that stands in `query` or `document` becomes a control token."""
        if self.template is None:
            parts = tokenize(query, False), tokenize(document, False)
            return [*self.before, *parts[0], *self.between, *parts[1], *self.after]
        texts = {"{query}": query, "{document}": document}
        pieces = re.split(r"(\{query\}|\{document\})", self.template)
        if not any(control in text for text in texts.values() for control in controls):
            return tokenize("".join(texts.get(piece, piece) for piece in pieces), True)
        return [
            token
            for piece in pieces
            if piece
            for token in tokenize(texts.get(piece, piece), piece not in texts)
        ]

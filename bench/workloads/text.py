"""Text of a known length in tokens, the same for the same seed: words without meaning, or prose."""

from __future__ import annotations

import inspect
import random
import re
import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

_TEXT = """
    river copper window garden market winter silver mountain bridge paper engine forest kitchen hammer
    valley orange station doctor island candle harbor cotton planet rabbit wheel butter castle thunder
    pencil desert mirror village basket summer leather tunnel needle shadow coffee anchor marble ladder
    pocket feather ticket ocean pepper blanket lemon tower saddle cabin violet dragon sugar canyon
    hunter pillow meadow spider carpet bottle rocket prison ribbon turtle oven lamp knife bread horse
    cloud stone apple chair grass paint smoke tiger wagon salt drum clock shirt brick flute eagle storm
    fence honey glass sword train brush onion snake table wheat ghost pearl robin cabbage metal nurse
    queen sheep tooth uncle voice whale youth zebra arrow beach chain dance earth flame grape heart
    juice lunch mouse night olive piano radio scale theme urban virus water actor baker cause depth
    error field giant hotel image judge label magic novel order phone quiet route sense title unity
    value waste adult blood crime dream event fault grain house index joint limit motor north opera
    pilot range shape taste union video witness angle board coast draft entry focus group habit input
    layer month nerve offer point quest ratio sound touch upper visit wound anger brain claim dozen
    essay fruit guard humor irony jury kidney legal minor noise owner pride reply skill trend usage
"""
_WORDS = tuple(_TEXT.split())
_LONG_STRING = re.compile(r'(^[ ]*[rR]?)?"""(.*?)"""', re.MULTILINE | re.DOTALL)


def words(seed: str, count: int) -> str:
    """`count` words that depend on nothing but `seed`; two seeds hardly ever begin alike.

    A word is about one token for a vocabulary of English, a few for a byte-like one.
    """
    return " ".join(random.Random(f"words {seed}").choices(_WORDS, k=count))


def prose(seed: str, count: int) -> str:
    """`count` words of continuous prose, from the standard library's documentation; three random ones first.

    Answers to prose are prose. Answers to random words soon repeat themselves, which drafts profit from.
    """
    begin = words(seed, min(count, 3))
    text = _documentation()
    start = random.Random(f"prose {seed}").randrange(len(text))
    rest = (text[(start + number) % len(text)] for number in range(count - 3))
    return " ".join([begin, *rest])


@cache
def _documentation() -> tuple[str, ...]:
    """The words of Python's language reference and of the docstrings of the standard library's modules."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = (module.read_text(errors="replace") for module in modules)
    strings = (found for source in sources for found in _LONG_STRING.finditer(source))
    docstrings = (found[2] for found in strings if found[1] is not None)  # it begins its line
    texts = (*topics.values(), *docstrings)
    lines = (line for text in texts for line in inspect.cleandoc(text).splitlines())
    return tuple(word for line in lines if line[:1].isalpha() for word in line.split())


TEXTS: Mapping[str, Callable[[str, int], str]] = {"words": words, "prose": prose}
"""What the prompts of a workload may be made of."""

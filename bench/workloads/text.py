"""Text of a known length in tokens, without any meaning, the same for the same seed."""

from __future__ import annotations

import random

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


def words(seed: str, count: int) -> str:
    """`count` words that depend on nothing but `seed`; two seeds hardly ever begin alike.

    A word is about one token for a vocabulary of English, a few for a byte-like one.
    """
    return " ".join(random.Random(f"words {seed}").choices(_WORDS, k=count))

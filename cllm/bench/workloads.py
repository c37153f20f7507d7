"""What is asked of a server under measurement: deterministic lists of requests.

To add a workload, write a function `name(variant) -> Workload` and enter it in `WORKLOADS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One generation to ask for. Greedy, and of a known length unless `ignore_eos` is off."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """`clients` clients take `requests` in order, each the next one as soon as its last is answered."""

    name: str
    clients: int
    requests: tuple[BenchRequest, ...]

    def shortened(self, count: int) -> Workload:
        """The same with the first `count` requests only."""
        return replace(self, requests=self.requests[:count])


def distinct(variant: int = 0, *, count: int = 32, clients: int = 8) -> Workload:
    """64 tokens in, 64 out; no two prompts begin alike, so nothing can be shared."""
    requests = tuple(BenchRequest(words(variant * count + index, 63), 64) for index in range(count))
    return Workload("distinct", clients, requests)


def single(variant: int = 0, *, count: int = 4) -> Workload:
    """One client: 64 tokens in, 64 out, one after another."""
    return replace(distinct(variant, count=count), name="single", clients=1)


def soak(variant: int = 0, *, count: int = 1000, clients: int = 16) -> Workload:
    """Short requests of mixed sizes: 1 to 40 words in, 1 to 16 tokens out."""
    sizes = random.Random(f"soak {variant}")
    requests = tuple(
        BenchRequest(words(variant * count + index, sizes.randint(1, 40)), sizes.randint(1, 16))
        for index in range(count)
    )
    return Workload("soak", clients, requests)


def words(number: int, count: int) -> str:
    """The `number`-th text of `count` different words; neighbouring numbers begin differently.

    A word is one token for SmolLM2's vocabulary, a few for a byte-like one.
    """
    first = _WORDS[number % len(_WORDS)]
    rest = [word for word in _WORDS if word != first]
    return " ".join([first, *random.Random(f"words {number}").sample(rest, count - 1)])


WORKLOADS: Mapping[str, Callable[[int], Workload]] = {"distinct": distinct, "single": single}
"""By name; the number makes a variant with other words, so that a later round repeats no prompt."""

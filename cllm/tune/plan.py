"""How much is measured of each setting, so that the whole search stays within its time."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cllm.backend.trial import ALONE, Plan
from cllm.tune.space import Part

LONG = 800
PROMPTS = (1024, 512, 256)
PROMPT_SHARE = 0.07  # of the time, for one prompt; a chunk's size takes three measurements or more
BEGINNINGS = 3  # of long contexts are computed in all: flash attention and layout change how they are kept
OVERHEAD = 1.15  # contexts that are made, states that are copied, pauses between steps
MOST_STREAMS = 32
FIRST_LOOK = 32
SECOND_LOOK = 256
# From what is wanted to the least that tells anything: (long context, tokens of it that are timed as a
# prompt, steps of each case). Steps go before context: which attention is the fastest shows in long ones.
# Without a long one there is still prefill and generation after short ones, a big model's daily bread.
SIZES = (
    *((LONG, 256, 7), (LONG, 128, 5), (LONG, 128, 4), (LONG, 128, 3), (640, 128, 3), (512, 128, 3)),
    *((512, 64, 2), (384, 64, 2), (256, 64, 2), (128, 64, 2), (64, 32, 2), (0, 32, 1)),
)


def first_look(parallel: int, tokens: int = FIRST_LOOK) -> Plan:
    """A small measurement that says how fast this model is here."""
    return Plan(streams=min(parallel, MOST_STREAMS), short=tokens, long=0, steps=2)


def make_plans(
    look: Mapping[str, float],
    parallel: int,
    alternatives: Mapping[Part, int],
    *,
    longest: int,
    budget_s: float,
) -> dict[Part, Plan]:
    """What is measured for each part of the mix, so that so many alternatives fit into the time."""
    prompt = prompt_plan(look, longest=longest, budget_s=budget_s)
    # The present settings are measured between any two alternatives, and a winner twice.
    plan = fitted_plan(
        look,
        parallel,
        longest=longest,
        budget_s=budget_s - (3 * expected_s(prompt, look) if alternatives[Part.PROMPT] else 0.0),
        runs=4 + 2 * alternatives[Part.ALL] + alternatives[Part.SHORT],
    )
    short = msgspec.structs.replace(plan, long=0, prompt=0)
    return {Part.ALL: plan, Part.PROMPT: prompt, Part.SHORT: short}


def fitted_plan(
    look: Mapping[str, float], parallel: int, *, longest: int, budget_s: float, runs: int
) -> Plan:
    """The largest plan of which `runs` take about `budget_s`, by what a first look took.

    No context is longer than `longest` tokens.
    """
    plan = first_look(parallel)
    for long, prompt, steps in SIZES:
        wanted = Plan(streams=plan.streams, long=long, prompt=prompt, steps=steps)
        most = longest - wanted.room
        plan = msgspec.structs.replace(wanted, short=min(wanted.short, most), long=min(long, most))
        if BEGINNINGS * beginning_s(plan, look) + runs * expected_s(plan, look) <= budget_s:
            break
    return plan


def prompt_plan(look: Mapping[str, float], *, longest: int, budget_s: float) -> Plan:
    """A long prompt and nothing else: what the size of its chunks can be judged by."""
    for prompt in PROMPTS:
        plan = Plan(streams=1, short=0, steps=0, prompt=prompt, long=prompt)
        if prompt + plan.room <= longest and expected_s(plan, look) <= PROMPT_SHARE * budget_s:
            break
    most = longest - plan.room
    return msgspec.structs.replace(plan, prompt=min(plan.prompt, most), long=min(plan.long, most))


def beginning_s(plan: Plan, look: Mapping[str, float]) -> float:
    """About what a setting takes longer whose beginning of a long context is not there yet."""
    return max(0, plan.long - plan.prompt) * look["prefill"]


def expected_s(plan: Plan, look: Mapping[str, float]) -> float:
    """About what a setting will take. A step of everybody after long contexts costs some three short ones."""
    one, everybody = look["one_short"], look.get("all_short", 0.0)
    steps = 2 * ALONE * one + everybody * (2 + 3 * plan.long / LONG) if plan.long else ALONE * one + everybody
    tokens = plan.short + min(plan.prompt, plan.long)
    return OVERHEAD * (tokens * look["prefill"] + ((plan.steps + 1) * steps if plan.steps else 0.0))

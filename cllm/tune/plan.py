"""How much is measured of each setting, so that the whole search stays within its time."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cllm.backend.trial import ALONE, Plan

LONG = 800
MOST_STREAMS = 32
FIRST_LOOK = 32
SECOND_LOOK = 256
# From what is wanted to the least that tells anything: (long context, steps of each case). Without a long
# context there is still prefill and generation after short ones, a big model's daily bread.
SIZES = ((LONG, 7), (LONG, 5), (640, 5), (512, 5), (384, 4), (256, 4), (128, 3), (64, 2), (0, 1))


def first_look(parallel: int, tokens: int = FIRST_LOOK) -> Plan:
    """A small measurement that says how fast this model is here."""
    return Plan(streams=min(parallel, MOST_STREAMS), short=tokens, long=0, steps=2)


def fitted_plan(look: Mapping[str, float], parallel: int, *, longest: int, target_s: float) -> Plan:
    """The largest plan that takes about `target_s`, by what a first look took, within `longest` tokens."""
    plan = first_look(parallel)
    for long, steps in SIZES:
        wanted = Plan(streams=plan.streams, long=long, steps=steps)
        most = longest - wanted.room
        plan = msgspec.structs.replace(wanted, short=min(wanted.short, most), long=min(long, most))
        if expected_s(plan, look) <= target_s:
            break
    return plan


def expected_s(plan: Plan, look: Mapping[str, float]) -> float:
    """About what a setting will take. A step of everybody after long contexts costs some three short ones."""
    one, everybody = look["one_short"], look.get("all_short", 0.0)
    steps = 2 * ALONE * one + everybody * (2 + 3 * plan.long / LONG) if plan.long else ALONE * one + everybody
    return (plan.short + plan.long) * look["prefill"] + (plan.steps + 1) * steps

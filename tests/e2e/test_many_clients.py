"""Far more clients than slots: every request is answered, no slot is shared, every text is its own."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from tests.driver.same_text import Soloist
from tests.driver.server import PATIENCE_S, Server, get_data
from tests.driver.slot_log import SlotLog


def ask_all(server: Server, prompts: list[str], max_tokens: int) -> list[dict[str, Any]]:
    """All prompts at the same time, each from a client of its own; greedy."""

    async def ask() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=None)
        client = httpx.AsyncClient(
            base_url=server.url, timeout=4 * PATIENCE_S, trust_env=False, limits=limits
        )
        async with client:

            async def one(prompt: str) -> dict[str, Any]:
                body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": False}
                return get_data(await client.post("/generate", json=body))

            return list(await asyncio.gather(*map(one, prompts)))

    return asyncio.run(ask())


def check(server: Server, model: Path, prompts: list[str], max_tokens: int) -> None:
    before = len(server.log_text)
    counters = server.kv()["counters"]
    answers = ask_all(server, prompts, max_tokens)

    assert len({answer["id"] for answer in answers}) == len(prompts)
    assert server.kv_is_zero()
    assert server.kv()["counters"]["leased_total"] == counters["leased_total"] + len(prompts)
    ids = SlotLog(server.log_text[before:].splitlines())
    assert ids.find_faults(answer["id"] for answer in answers) == []
    assert {seq_id for seq_id, _ in ids.slots} == set(range(8)), "it never ran eight at a time"

    with closing(Soloist(model)) as soloist:
        alone = [soloist.answer(prompt, max_tokens) for prompt in prompts]
    wrong = [
        (prompt, answer["text"], single)
        for prompt, answer, single in zip(prompts, answers, alone, strict=True)
        if not single.agrees(answer["text"])
    ]
    assert not wrong, f"{len(wrong)} differ, such as {wrong[0]}"
    ties = sum(single.tie for single in alone)
    whole = sum(answer["text"] == single.text for answer, single in zip(answers, alone, strict=True))
    print(f"{len(prompts)} clients: {ties} with a tie, {whole} the same to the end")
    assert ties < len(prompts), "with a tie in every answer, nothing was compared to its end"


def test_80_clients_on_8_slots_tiny_model(tiny: Server, tiny_model: Path) -> None:
    check(tiny, tiny_model, [f"client {number}: " + "ab " * (number % 7) for number in range(80)], 12)


def test_12_clients_on_8_slots_large_vocabulary(wide: Server, wide_model: Path) -> None:
    animals = ("cat", "dog", "owl", "fox", "bee", "cow")
    prompts = [f"{count} facts about the {animal}:" for animal in animals for count in (3, 7)]
    check(wide, wide_model, prompts, 10)

"""Template probes: short conversations that show which folds a chat template needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from cllm.text.folding import (
    FOLDS,
    ROLE_FOLDS,
    THOUGHTS,
    Fold,
    Message,
    alternate,
    apply_folds,
    arguments_as_object,
    arguments_as_text,
    calls_as_text,
    no_empty_answers,
    no_later_system,
    no_system,
    no_user_after_result,
    null_content,
    one_call,
    open_calls_as_text,
    results_first,
    short_ids,
    stray_results,
    text_before_calls,
    thoughts_as_parts,
    thoughts_for_text,
    user_first,
)


def _call(number: int, arguments: Any = None, call_id: str = "") -> Message:
    called = {"name": f"Zulu_f{number}", "arguments": arguments or {"city": f"Zulu_a{number}"}}
    return {"id": call_id or f"call0000{number}", "type": "function", "function": called}


def _say(role: str, text: str = "", *calls: Message, **more: Any) -> Message:
    return {"role": role, "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def _result(number: int, call_id: str = "") -> Message:
    call = call_id or f"call0000{number}"
    return {"role": "tool", "content": f"Zulu_r{number}", "tool_call_id": call, "name": f"Zulu_f{number}"}


class Probe(NamedTuple):
    """A conversation, and the words that its rendering must have; in this order, if `ordered`."""

    folds: tuple[Fold, ...]
    messages: list[Message]
    words: str
    ordered: bool = True


_A, _B = _say("user", "Zulu_1"), _say("user", "Zulu_2")
_ANSWER = _say("assistant", "Zulu_3")
_SYSTEM, _LATER = _say("system", "Zulu_4"), _say("system", "Zulu_5")
_CALLING = _say("assistant", "", _call(1))
_THINKING = dict.fromkeys(THOUGHTS, "Zulu_6")
_LONG = "call_0123456789"
# Objects in the place of text: the template expects text there.
_OBJECTS = ("{'city", "{'type", '{"type": "thinking')
_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}}
_NAME = "Zulu_tool"
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": _CITY}}
PROBES = (
    Probe((alternate,), [_A, _B], "Zulu_1 Zulu_2"),
    Probe((alternate,), [_A, _ANSWER, _say("assistant", "Zulu_7"), _B], "Zulu_1 Zulu_3 Zulu_7 Zulu_2"),
    Probe((no_system,), [_SYSTEM, _A], "Zulu_4 Zulu_1"),
    Probe((no_later_system,), [_SYSTEM, _A, _ANSWER, _LATER, _B], "Zulu_4 Zulu_1 Zulu_3 Zulu_5 Zulu_2"),
    Probe((no_later_system,), [_SYSTEM, _LATER, _A], "Zulu_4 Zulu_5 Zulu_1"),
    Probe((no_later_system,), [_SYSTEM, _A, _LATER], "Zulu_4 Zulu_1 Zulu_5"),
    Probe((user_first,), [_ANSWER, _A], "Zulu_3 Zulu_1"),
    Probe((user_first,), [_SYSTEM], "Zulu_4"),
    Probe((no_empty_answers,), [_A, _say("assistant"), _B], "Zulu_1 Zulu_2"),
    Probe((arguments_as_text,), [_A, _CALLING, _result(1)], "Zulu_f1 Zulu_a1"),
    *(
        Probe(folds, [_A, _CALLING, _result(1)], "Zulu_1 Zulu_f1 Zulu_a1 Zulu_r1")
        for folds in ((null_content,), (null_content, arguments_as_text), (calls_as_text,))
    ),
    Probe(
        (one_call,),
        [_A, _say("assistant", "", _call(1), _call(2)), _result(1), _result(2)],
        "Zulu_f1 Zulu_f2 Zulu_r1 Zulu_r2",
        ordered=False,
    ),
    Probe((short_ids,), [_A, _say("assistant", "", _call(1, None, _LONG)), _result(1, _LONG)], "Zulu_f1"),
    Probe((arguments_as_object,), [_A, _say("assistant", "", _call(1, "Zulu_8 {")), _result(1)], "Zulu_8"),
    Probe((no_user_after_result,), [_A, _CALLING, _result(1), _B], "Zulu_f1 Zulu_r1 Zulu_2"),
    Probe((results_first,), [_A, _CALLING, _B, _result(1)], "Zulu_f1 Zulu_r1 Zulu_2", ordered=False),
    Probe((stray_results,), [_A, _ANSWER, _result(1), _B], "Zulu_1 Zulu_3 Zulu_r1 Zulu_2"),
    Probe(
        (text_before_calls,),
        [_A, _say("assistant", "Zulu_7", _call(1)), _result(1)],
        "Zulu_f1 Zulu_r1",
    ),
    Probe(
        (thoughts_for_text,),
        [_A, _say("assistant", "Zulu_7", _call(1), **_THINKING), _result(1)],
        "Zulu_f1 Zulu_r1",
    ),
    Probe(
        (thoughts_as_parts,),
        [_A, _say("assistant", "Zulu_7", _call(1), **_THINKING), _result(1)],
        "Zulu_6 Zulu_7 Zulu_f1",
    ),
)
# Some templates write the system's text only while the user speaks last: agents would lose it.
TOOL_PROBES = (Probe((no_system,), [_SYSTEM, _A, _CALLING, _result(1)], "Zulu_4 Zulu_f1"),)
Render = Callable[[list[Message], Any], str | None]
"""Renders messages with a value of `tools`; None where the template refuses them."""


class Folding:
    """The folds that one template needs, found by rendering probes with it."""

    def __init__(self, render: Render) -> None:
        self.no_tools: list[Any] | None = None  # stands for no tools; some templates need a list
        if render([_A], None) is None:
            self.no_tools = []
        self.takes_tools = _NAME in (render([_A], [_TOOL]) or "")
        self._needed = self._find(PROBES, render, set())
        self._with_tools = self._find(TOOL_PROBES, render, self._needed)

    def _find(self, probes: Iterable[Probe], render: Render, needed: set[Fold]) -> set[Fold]:
        for probe in probes:
            more = needed.union(probe.folds)
            if not self._passes(probe, render, needed) and self._passes(probe, render, more):
                needed = more
        return needed

    @property
    def names(self) -> list[str]:
        """The names of the folds."""
        return [fold.__name__ for fold in FOLDS if fold in self._with_tools]

    def shapes(
        self, messages: list[Message], *, tools: bool = False, as_text: bool = False
    ) -> Iterator[list[Message]]:
        """The messages with the folds that the template needs; then, should it refuse, with others as well.

        `tools`: the request has some. With `as_text` calls are text in any case.
        """
        needed = self._with_tools if tools else self._needed
        needed = needed | {calls_as_text} if as_text else needed
        tried: list[list[Message]] = []
        roles = set(ROLE_FOLDS)
        last = (roles, {*roles, open_calls_as_text}, {*roles, calls_as_text})
        for extra in (set(), *({fold} for fold in FOLDS), *last):
            folded = apply_folds(messages, needed | extra)
            if folded not in tried:
                tried.append(folded)
                yield folded

    def _passes(self, probe: Probe, render: Render, folds: set[Fold]) -> bool:
        rendered = render(apply_folds(probe.messages, folds), self.no_tools)
        if rendered is None or any(written in rendered for written in _OBJECTS):
            return False
        places = [rendered.find(word) for word in probe.words.split()]
        return min(places) >= 0 and (not probe.ordered or places == sorted(places))

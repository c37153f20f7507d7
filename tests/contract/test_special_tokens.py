"""Special tokens on a real vocabulary: infill marks, tool calls, named templates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.messages import Detokenize, Prepare, Prepared, RenderChat, Text
from cllm.text.chat_format import Tool
from cllm.text.prompt import Chat, Gap, Snippet
from cllm.types import InfillTokens, Request
from cllm.workers.tokenizer import TokenizerWorker
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE, open_runner
from tests.driver.runner import native
from tests.tiny_models import CHAT_TEMPLATE, VOCABULARY, make_dense

CONTROLS = ("<PRE>", "<SUF>", "<MID>", "<REP>", "<SEP>", "[TOOL_CALLS]", "<|python_tag|>")
ROLES = {f"fim_{role}": f"<{role.upper()}>" for role in ("pre", "suf", "mid", "rep", "sep")}
PRE, SUF, MID, REP, SEP, TOOL_CALLS, PYTHON_TAG = range(VOCABULARY - len(CONTROLS), VOCABULARY)
TOOL_TEMPLATE = CHAT_TEMPLATE + "{{ tools[0].function.name if tools }}[TOOL_CALLS]"
LOOK = Tool("look")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that fills gaps, calls tools, and has a template of its own for that."""
    path = tmp_path_factory.mktemp("taught") / "taught.gguf"
    templates = {"default": CHAT_TEMPLATE, "tool_use": TOOL_TEMPLATE}
    return make_dense(path, controls=CONTROLS, roles=ROLES, templates=templates)


@pytest.fixture(scope="module")
def model(taught: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(load(), EngineConfig(model=str(taught)), DeferredFrees(), vocabulary_only=True)
    yield model
    model.close()


def test_infill_marks_are_found(model: LlamaModel, runner: LlamaRunner) -> None:
    marks = InfillTokens(prefix=PRE, suffix=SUF, middle=MID, repository=REP, separator=SEP)
    assert model.vocabulary.infill == marks
    assert runner.vocabulary.infill is None


def test_two_infill_marks_of_three_are_none(tmp_path: Path) -> None:
    roles = {"fim_pre": "<PRE>", "fim_suf": "<SUF>"}
    path = make_dense(tmp_path / "half.gguf", controls=("<PRE>", "<SUF>"), roles=roles)
    model = LlamaModel(load(), EngineConfig(model=str(path)), DeferredFrees(), vocabulary_only=True)
    assert model.vocabulary.infill is None
    model.close()


def test_infill_marks_are_tokens_and_user_text_is_never_one_of_them(model: LlamaModel) -> None:
    worker = TokenizerWorker(model.vocabulary, None)
    gap = Gap(prefix="ab<SUF>", suffix="cd", prompt="x<MID>", snippets=(Snippet("<PRE>", "f.py"),))
    answer = worker.perform(Prepare((gap,)))
    assert isinstance(answer, Prepared)
    tokens = answer.prompts[0].prompt.items
    controls = [token for token in tokens if token >= PRE]
    assert controls == [REP, SEP, SEP, PRE, MID, SUF, MID], "one <MID> was in the prompt, where it may be"
    plain = worker.perform(Detokenize(tokens))
    assert plain == Text("myproject\nf.py\n<PRE>filename\nab<SUF>xcd")


def test_a_template_for_tools_is_used_with_tools_only(model: LlamaModel) -> None:
    info = model.info()
    assert (info.chat_template, info.tool_template) == (CHAT_TEMPLATE, TOOL_TEMPLATE)
    worker = TokenizerWorker(model.vocabulary, info.chat_template, tool_template=info.tool_template)
    chat = Chat(({"role": "user", "content": "hi"},))
    plain, with_tools = (
        worker.perform(RenderChat(each)) for each in (chat, msgspec.structs.replace(chat, tools=(LOOK,)))
    )
    assert isinstance(plain, Text) and isinstance(with_tools, Text)
    assert with_tools.text == plain.text + "look[TOOL_CALLS]"
    given = model.info("{{ 'mine' }}")
    assert (given.chat_template, given.tool_template) == ("{{ 'mine' }}", None)


def test_a_control_token_is_text_only_where_it_was_asked_for(taught: Path) -> None:
    runner = native(open_runner({"dense": taught}, DENSE))
    driver = StepDriver(runner)

    def biased(name: str, *markers: str) -> Request:
        asked = ask(name, words(1, 9), 3, logit_bias=((TOOL_CALLS, 100.0),))
        return msgspec.structs.replace(asked, markers=markers)

    shown, hidden = biased("shown", "[TOOL_CALLS]", "no such token"), biased("hidden")
    other = biased("other", "<|python_tag|>")
    driver.submit(shown, hidden, other)
    answers = driver.finish()
    assert {answer.tokens for answer in answers.values()} == {(TOOL_CALLS,) * 3}
    assert answers["shown"].text == "[TOOL_CALLS]" * 3
    assert answers["hidden"].text == answers["other"].text == ""
    runner.close()

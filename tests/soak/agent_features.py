"""Fields that agents rely on, sent by the official SDKs to the scripted model: a scenario each."""

from __future__ import annotations

from collections.abc import Callable

import anthropic
import openai

from cllm.testing import say

MODEL = "cllm"
TOKENS = 200
SIGNATURE = "c2lnbmVkIGVsc2V3aGVyZQ=="  # of another server: conversations move


def continue_response(url: str) -> str:
    """`previous_response_id`: the second request carries only what is new."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    instructions = "Be brief. " * 200
    first = client.responses.create(
        model=MODEL, instructions=instructions, input=f"One. {say('Yes.', 'No.')}"
    )
    second = client.responses.create(
        model=MODEL, instructions=instructions, input="Two.", previous_response_id=first.id
    )
    assert (first.output_text, second.output_text) == ("Yes.", "No."), second.output_text
    assert first.usage is not None and second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens / second.usage.input_tokens
    assert cached >= 0.95, f"{cached:.1%} cached"
    return f"{cached:.1%} cached"


def pass_thinking(url: str) -> str:
    """Thinking blocks are streamed apart from the text, and taken back with whatever signature they have."""
    client = anthropic.Anthropic(base_url=url, api_key="none")
    script = say("<think>\nA plan.\n</think>\n\nLet me see.", "It rains.")
    question: anthropic.types.MessageParam = {"role": "user", "content": f"Rain? {script}"}
    with client.messages.stream(
        model=MODEL,
        max_tokens=4096,
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[question],
    ) as stream:
        first = stream.get_final_message()
    kinds = [block.type for block in first.content]
    assert kinds == ["thinking", "text"], kinds
    thought = first.content[0]
    assert isinstance(thought, anthropic.types.ThinkingBlock) and thought.thinking.strip() == "A plan."
    assert thought.signature, "clients drop reasoning without a signature from their history"
    signed = thought.model_copy(update={"signature": SIGNATURE})
    second = client.messages.create(
        model=MODEL,
        max_tokens=4096,
        messages=[
            question,
            {"role": "assistant", "content": [signed, *first.content[1:]]},
            {"role": "user", "content": "And now?"},
        ],
    )
    (block,) = second.content
    assert isinstance(block, anthropic.types.TextBlock) and block.text == "It rains.", second.content
    return "apart, taken back signed"


def predict_answer(url: str) -> str:
    """`prediction`: an answer that is known beforehand, and is nowhere in the prompt, is drafted from it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(prediction: str) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Anything."}],
            prediction={"type": "content", "content": prediction},
            temperature=0,
            seed=7,
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
        )
        details = answer.usage.completion_tokens_details if answer.usage else None
        assert details is not None
        return answer.choices[0].message.content or "", details.accepted_prediction_tokens or 0

    text, by_chance = ask("not this")
    same, accepted = ask(text)
    assert same == text, "a prediction changed the answer"
    assert accepted > by_chance + TOKENS // 2, f"{accepted} of {TOKENS} accepted, {by_chance} without it"
    return f"{accepted} of {TOKENS} accepted"


FEATURES: dict[str, Callable[[str], str]] = {
    "previous_response_id": continue_response,
    "thinking blocks": pass_thinking,
    "prediction": predict_answer,
}

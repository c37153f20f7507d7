"""Built-in chat templates: each renders a conversation as the models of its name were trained."""

from __future__ import annotations

import pytest

from cllm.errors import ConfigError
from cllm.text.chat_template import BUILTIN_TEMPLATES, ChatTemplate, read_template

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": " A "},
    {"role": "user", "content": "U2"},
]
EXPECTED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n A "
    "<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nU1<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama2": "[INST] S\nU1 [/INST] A </s>[INST] U2 [/INST]",
    "llama2-sys": "[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST] A </s>[INST] U2 [/INST]",
    "gemma": "<start_of_turn>user\nS\n\nU1<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n",
    "mistral-v1": " [INST] S\n\nU1 [/INST]  A </s> [INST] U2 [/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U1[/INST]  A </s>[INST] U2[/INST]",
    "vicuna": "S\n\nUSER: U1\nASSISTANT:  A </s>\nUSER: U2\nASSISTANT:",
    "deepseek3": "S\n\n<｜User｜>U1<｜Assistant｜> A <｜end▁of▁sentence｜><｜User｜>U2<｜Assistant｜>",
}


def render(name: str, **options: bool) -> str:
    return ChatTemplate(read_template(name)).render(
        messages=MESSAGES, tools=None, **{"add_generation_prompt": True, **options}
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_a_conversation(name: str) -> None:
    assert render(name) == EXPECTED[name]


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_all_texts_are_there_and_the_opening_can_be_left_out(name: str) -> None:
    whole, closed = render(name), render(name, add_generation_prompt=False)
    assert all(text in whole for text in ("S", "U1", "A", "U2")) and whole.startswith(closed)


def test_another_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"rwkv-world: .*chatml.*llama3"):
        read_template("rwkv-world")

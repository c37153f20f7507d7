"""Built-in chat templates, by llama.cpp's names for them: for models that carry none."""

from __future__ import annotations

import json
from typing import NamedTuple


class _Turns(NamedTuple):
    """What stands around each message. System text belongs to the turn of the user after it."""

    system: str
    user: str
    assistant: str
    opening: str = ""  # of the answer
    begin: str = ""  # before a system or user message that begins a turn
    trim: bool = False

    def template(self) -> str:
        """As Jinja."""
        text = "message.content | trim" if self.trim else "message.content"

        def write(form: str) -> str:
            before, after = form.split("{}")
            return f"{{{{ {json.dumps(before)} ~ ({text}) ~ {json.dumps(after)} }}}}"

        return (
            "{% set turn = namespace(open=false) %}{% for message in messages %}"
            "{% if message.role == 'assistant' %}" + write(self.assistant) + "{% else %}"
            f"{{% if not turn.open %}}{{{{ {json.dumps(self.begin)} }}}}{{% endif %}}"
            "{% set turn.open = message.role == 'system' %}"
            "{% if turn.open %}" + write(self.system) + "{% else %}" + write(self.user) + "{% endif %}"
            "{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {json.dumps(self.opening)} }}}}{{% endif %}}"
        )


def _same(form: str, trim: bool = False) -> _Turns:
    """Messages that differ in the name of their role only."""
    system, user, assistant = (form.replace("ROLE", role) for role in ("system", "user", "assistant"))
    return _Turns(system, user, assistant, assistant.split("{}")[0], trim=trim)


_END = "<｜end▁of▁sentence｜>"
_TURN = "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
_TURNS = {
    "chatml": _same("<|im_start|>ROLE\n{}<|im_end|>\n"),
    "command-r": _Turns(
        _TURN.replace("ROLE", "SYSTEM"),
        _TURN.replace("ROLE", "USER"),
        _TURN.replace("ROLE", "CHATBOT"),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        trim=True,
    ),
    "deepseek": _Turns("{}", "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", "### Response:\n"),
    "deepseek2": _Turns("{}\n\n", "User: {}\n\n", "Assistant: {}" + _END, "Assistant:"),
    "deepseek3": _Turns("{}\n\n", "<｜User｜>{}", "<｜Assistant｜>{}" + _END, "<｜Assistant｜>"),
    "exaone3": _Turns(
        "[|system|]{}[|endofturn|]\n",
        "[|user|]{}\n",
        "[|assistant|]{}[|endofturn|]\n",
        "[|assistant|]",
        trim=True,
    ),
    "falcon3": _same("<|ROLE|>\n{}\n"),
    "gemma": _Turns(
        "{}\n\n",
        "{}<end_of_turn>\n",
        "<start_of_turn>model\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "<start_of_turn>user\n",
        trim=True,
    ),
    "granite": _same("<|start_of_role|>ROLE<|end_of_role|>{}<|end_of_text|>\n"),
    "llama2": _Turns("{}\n", "{} [/INST]", "{}</s>", begin="[INST] "),
    "llama2-sys": _Turns("<<SYS>>\n{}\n<</SYS>>\n\n", "{} [/INST]", "{}</s>", begin="[INST] "),
    "llama3": _same("<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>", trim=True),
    "mistral-v1": _Turns("{}\n\n", "{} [/INST]", " {}</s>", begin=" [INST] "),
    "mistral-v3": _Turns("{}\n\n", "{}[/INST]", " {}</s>", begin="[INST] "),
    "mistral-v3-tekken": _Turns("{}\n\n", "{}[/INST]", "{}</s>", begin="[INST]"),
    "mistral-v7": _Turns("[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "[INST] {}[/INST]", " {}</s>"),
    "mistral-v7-tekken": _Turns("[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "{}</s>"),
    "openchat": _Turns(
        "{}<|end_of_turn|>",
        "GPT4 Correct User: {}<|end_of_turn|>",
        "GPT4 Correct Assistant: {}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "phi3": _same("<|ROLE|>\n{}<|end|>\n"),
    "phi4": _same("<|im_start|>ROLE<|im_sep|>{}<|im_end|>"),
    "vicuna": _Turns("{}\n\n", "USER: {}\n", "ASSISTANT: {}</s>\n", "ASSISTANT:"),
    "vicuna-orca": _Turns("SYSTEM: {}\n", "USER: {}\n", "ASSISTANT: {}</s>\n", "ASSISTANT:"),
    "zephyr": _same("<|ROLE|>\n{}<|endoftext|>\n"),
}

BUILTIN_TEMPLATES = {name: turns.template() for name, turns in _TURNS.items()}

"""Chat formats of known families, written down: what the analysis derives from their templates."""

from __future__ import annotations

from typing import Any

from cllm.text.chat_format import DECLARED, GENERIC, CallFormat, CallStyle, ChatFormat, Slot, Tool

NATIVE: dict[str, Any] = {"takes_tools": True, "writes_calls": True}
HERMES_CALLS = CallFormat(opening="<tool_call>\n", closing="\n</tool_call>", before="\n")
CODER_CALLS = CallFormat(
    style=CallStyle.TAGGED,
    opening="<tool_call>\n<function=",
    closing="</function>\n</tool_call>",
    before="\n\n",
    after_name=">\n",
    key_opening="<parameter=",
    key_closing=">\n",
    value_closing="\n</parameter>\n",
)
HARMONY = DECLARED[0][1]
FORMATS: dict[str, ChatFormat] = {
    "generic": GENERIC,
    "hermes": ChatFormat(
        reasoning_openings=("<think>\n",),
        reasoning_closings=("\n</think>\n\n",),
        exact=True,
        calls=HERMES_CALLS,
        reasoning_field="reasoning_content",
        **NATIVE,
    ),
    "loose": ChatFormat(calls=HERMES_CALLS, **NATIVE),
    "mistral": ChatFormat(
        calls=CallFormat(
            section_opening="[TOOL_CALLS][",
            section_closing="]",
            between=", ",
            keys=(("name", Slot.NAME), ("arguments", Slot.ARGUMENTS), ("id", Slot.ID)),
        ),
        **NATIVE,
    ),
    "ministral": ChatFormat(
        calls=CallFormat(style=CallStyle.NAMED, opening="[TOOL_CALLS]", after_name="[ARGS]", between=""),
        **NATIVE,
    ),
    "llama": ChatFormat(
        calls=CallFormat(
            keys=(("name", Slot.NAME), ("parameters", Slot.ARGUMENTS)),
            between="; ",
            other_openings=("<|python_tag|>",),
        ),
        **NATIVE,
    ),
    "apertus": ChatFormat(
        calls=CallFormat(
            section_opening="<|tools_prefix|>[",
            section_closing="]<|tools_suffix|>",
            between=", ",
            keys=((Slot.NAME, Slot.ARGUMENTS),),
        ),
        **NATIVE,
    ),
    "kimi": ChatFormat(
        calls=CallFormat(
            style=CallStyle.NAMED,
            section_opening="<|tool_calls_section_begin|>",
            section_closing="<|tool_calls_section_end|>",
            opening="<|tool_call_begin|>functions.",
            closing="<|tool_call_end|>",
            after_name=f":{Slot.INDEX}<|tool_call_argument_begin|>",
            between="",
        ),
        **NATIVE,
    ),
    "solar": ChatFormat(
        calls=CallFormat(
            style=CallStyle.NAMED,
            section_opening="<|tool_calls|>",
            opening=f"<|tool_call:begin|>{Slot.ID}<|tool_call:name|>",
            closing="<|tool_call:end|>",
            after_name="<|tool_call:args|>",
            between="",
        ),
        text_openings=("<|content|>",),
        text_closings=("<|end|>",),
        **NATIVE,
    ),
    "coder": ChatFormat(calls=CODER_CALLS, **NATIVE),
    "glm": ChatFormat(
        calls=CallFormat(
            style=CallStyle.TAGGED,
            opening="<tool_call>",
            closing="</tool_call>",
            between="\n",
            before="\n",
            after_name="\n",
            key_opening="<arg_key>",
            key_closing="</arg_key>\n<arg_value>",
            value_closing="</arg_value>\n",
        ),
        **NATIVE,
    ),
    "dsml": ChatFormat(
        calls=CallFormat(
            style=CallStyle.TAGGED,
            section_opening="<｜DSML｜tool_calls>\n",
            section_closing="</｜DSML｜tool_calls>",
            opening='<｜DSML｜invoke name="',
            closing="</｜DSML｜invoke>\n",
            between="",
            before="\n\n",
            after_name='">\n',
            key_opening='<｜DSML｜parameter name="',
            key_closing=f'" string="{Slot.TYPE}">',
            value_closing="</｜DSML｜parameter>\n",
            types=(
                ("string", "true"),
                *((kind, "false") for kind in ("integer", "number", "boolean", "object", "array", "null")),
            ),
        ),
        **NATIVE,
    ),
    "python": ChatFormat(
        calls=CallFormat(
            style=CallStyle.PYTHON,
            section_opening="<|tool_call_start|>[",
            section_closing="]<|tool_call_end|>",
            between=", ",
        ),
        **NATIVE,
    ),
    "gemma": ChatFormat(
        calls=CallFormat(
            style=CallStyle.GEMMA, opening="<|tool_call>call:", closing="<tool_call|>", between=""
        ),
        **NATIVE,
    ),
    "harmony": HARMONY,
    "muse": DECLARED[1][1],
}
ANY = {"type": "object", "properties": {"city": {"type": "string"}, "n": {}, "x_y": {}}}
TOOLS = tuple(Tool(name, "", ANY) for name in ("look", "get.weather", "add-2", "f_"))

"""Declared formats: chat formats that cannot be derived, each by a text that its template renders."""

from __future__ import annotations

from cllm.text.chat_format import CallFormat, CallStyle, ChatFormat, Slot

_HARMONY = "<|start|>assistant"
_MUSE = "<|start|>assistant to="
_TYPES = ("string", "number", "boolean", "object", "array", "null")

# By a text that the template renders.
DECLARED: tuple[tuple[str, ChatFormat], ...] = (
    # gpt-oss: channels. A header may name the channel and the called tool in either order.
    (
        "<|channel|>final<|message|>",
        ChatFormat(
            reasoning_openings=(f"{_HARMONY}<|channel|>analysis<|message|>",),
            reasoning_closings=("<|end|>",),
            text_openings=(
                f"{_HARMONY}<|channel|>final<|message|>",
                f"{_HARMONY}<|channel|>commentary<|message|>",
            ),
            text_closings=("<|end|>", "<|return|>"),
            lead=_HARMONY,
            exact=True,
            calls=CallFormat(
                style=CallStyle.NAMED,
                opening=f"{_HARMONY}<|channel|>commentary to=functions.",
                other_openings=(f"{_HARMONY} to=functions.", f"{_HARMONY}<|channel|>analysis to=functions."),
                after_name=" <|constrain|>json<|message|>",
                closing="<|call|>",
                between="",
            ),
            takes_tools=True,
            writes_calls=True,
            one_call=True,
            reasoning_field="thinking",
        ),
    ),
    # Muse: like gpt-oss, with the calls in tags.
    (
        "<|start|>assistant to=user<|message|>",
        ChatFormat(
            reasoning_openings=(f"{_MUSE}self<|message|>",),
            reasoning_closings=("<|eom|>",),
            text_openings=(f"{_MUSE}user<|message|>",),
            text_closings=("<|eom|>", "<|eot|>"),
            lead=_HARMONY,
            exact=True,
            calls=CallFormat(
                style=CallStyle.TAGGED,
                opening=f'{_MUSE}{Slot.NAME}<|message|><atem:function_calls>\n<atem:invoke name="',
                after_name='">\n',
                key_opening='<atem:parameter name="',
                key_closing='">',
                value_closing="</atem:parameter>\n",
                closing="</atem:invoke>\n</atem:function_calls>",
                between="<|eom|>",
            ),
            takes_tools=True,
            writes_calls=True,
            reasoning_field="reasoning_content",
        ),
    ),
    # Kimi K3: everything between <|open|> and <|close|>.
    (
        "<|open|>response<|sep|>",
        ChatFormat(
            reasoning_openings=("<|open|>think<|sep|>",),
            reasoning_closings=("<|close|>think<|sep|>",),
            text_openings=("<|open|>response<|sep|>",),
            text_closings=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
            exact=True,
            calls=CallFormat(
                style=CallStyle.TAGGED,
                section_opening="<|open|>tools<|sep|>",
                section_closing="<|close|>tools<|sep|>",
                opening='<|open|>call tool="',
                after_name=f'" index="{Slot.INDEX}"<|sep|>',
                key_opening='<|open|>argument key="',
                key_closing=f'" type="{Slot.TYPE}"<|sep|>',
                value_closing="<|close|>argument<|sep|>",
                closing="<|close|>call<|sep|>",
                between="",
                types=(*((kind, kind) for kind in _TYPES), ("integer", "number")),
            ),
            takes_tools=True,
            writes_calls=True,
            reasoning_field="reasoning_content",
        ),
    ),
    # Functionary 3.2: a recipient on a line of its own before each part.
    (
        "<|end_header_id|>\n\n>>>all\n",
        ChatFormat(
            text_openings=(">>>all\n",),
            lead=">>>",
            calls=CallFormat(style=CallStyle.NAMED, opening=">>>", after_name="\n", between=""),
            takes_tools=True,
            writes_calls=True,
        ),
    ),
)
# Calls of templates that describe tools and write no calls, by a text that they render.
_LFM = CallFormat(
    style=CallStyle.PYTHON,
    section_opening="<|tool_call_start|>[",
    section_closing="]<|tool_call_end|>",
    between=", ",
)
DESCRIBED: tuple[tuple[str, CallFormat], ...] = (
    ("<|tool_list_start|>", _LFM),  # LFM2
    ("<|im_start|>system\nList of tools: [", _LFM),
    (
        "<|tool_call|>",
        CallFormat(section_opening="<|tool_call|>[", section_closing="]", between=", "),
    ),  # Granite
    ("<tool_call>", CallFormat(opening="<tool_call>\n", closing="\n</tool_call>", before="\n")),  # Hermes
)

"""Bodies of llama-server's own routes, under its names."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, ConfigDict, Field

from cllm.server.schema import Body, ConstrainedBody, StopText, Text

TokenId = Annotated[int, Field(ge=0)]


class LlamaCompletionBody(ConstrainedBody):
    """`POST /completion`. Here -1 tokens means no limit, and the prompt may hold control tokens."""

    prompt: Text | Annotated[list[TokenId], Field(min_length=1)] = Field(description="Text or tokens")
    n_predict: int = Field(
        -1, ge=-1, validation_alias=AliasChoices("n_predict", "max_tokens"), description="-1: as many as fit"
    )
    stop: list[StopText] = Field(default=[], max_length=16)
    stream: bool = False
    n_probs: int = Field(0, ge=0, le=20, description="Log-probabilities of the likeliest")
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    penalty_last_n: int = Field(
        64, ge=-1, le=2**31 - 1, validation_alias=AliasChoices("repeat_last_n", "penalty_last_n")
    )

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "1+1=", "n_predict": 8}})


class LlamaTokenizeBody(Body):
    """`POST /tokenize`."""

    content: Text
    add_special: bool = Field(False, description="Add what the model wants at the beginning")
    parse_special: bool = Field(True, description="Take spellings of control tokens for them")


class LlamaDetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[TokenId] = Field(max_length=1_000_000)

"""All recorded requests: a group for each API, asked in this order, and one of a server that has keys."""

from __future__ import annotations

import json
import re
from typing import Any

from cllm.testing import say
from tests.e2e.golden.cases import (
    ADD,
    ADMIN,
    GENERATING,
    LONG,
    MESSAGE_TOOL,
    NO_MODEL,
    ORIGIN,
    RESPONSE_TOOL,
    SCHEMA,
    USER,
    Case,
    Cases,
    asked,
    each,
    get,
    refused,
    user,
)

YES = say("A")
LONE = "\ud800"
TALK: dict[str, Any] = {"messages": user(YES), "seed": 1}
PROMPT: dict[str, Any] = {"prompt": YES, "seed": 1}
# Of any route that generates.
SAMPLING = (
    *each(temperature=("hot", -1, True), top_p=(2,), top_k=(-2, 1.5), seed=("x", 2**70), samplers=(5,)),
    *each(logit_bias=({"a": 1}, {"1": 101}, [[1, 2, 3]], {"9999": 1}), dry_sequence_breakers=([""],)),
    *each(stop=("", ["a"] * 17, [1], "a\0"), stop_token_ids=([-1], [9999]), min_tokens=(-1,)),
    *each(timeout=(0, "x"), priority=("high",), cache_prompt=("yes",), stream=("yes", 1)),
    *each(grammar=("", "root ::= ("), regex=("(",), choice=([],), guided_json=("{",)),
    *each(json_schema=(5, {"type": "nonsense"}), structured_outputs=({"json": 5},)),
    {"regex": "a", "choice": ["a"]},
)
WRONG_MESSAGES: tuple[Any, ...] = (
    *(..., [], "hi", [5], [{}], [{"content": "x"}], [{"role": "robot", "content": "x"}]),
    *map(user, (5, LONE, [5], [{"type": "text"}], [{"type": "image_url", "image_url": {"url": "x"}}])),
    *map(user, (LONG, None)),
)
CHOICES: tuple[Any, ...] = (
    {"type": "function", "function": {"name": "sub"}},
    "sometimes",
    {"type": "robot"},
    {},
)
TALKS = (
    *each(messages=WRONG_MESSAGES, functions=([{}],), tool_choice=("required",), chat_template_kwargs=(5,)),
    *each(tools=(5, [{"type": "function"}], [{"type": "web_search"}], [ADD, ADD])),
    *each(tools=([{"type": "function", "function": {"name": "a b"}}],)),
    *({"tools": [ADD], "tool_choice": choice} for choice in CHOICES),
    *each(continue_final_message=(True,), reasoning_format=("x",), reasoning_effort=(5,), thinking=("x",)),
)
FORMATS: tuple[Any, ...] = (
    5,
    {},
    {"type": "xml"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "a"}},
)
OPENAI = (
    *SAMPLING,
    *each(n=(0, 65), user=(5,), model=("x" * 300,), stream_options=(5,), response_format=FORMATS),
    *each(max_tokens=(-2, "5", 1.5, 10**9), prompt_logprobs=(1, 21)),
    {"response_format": {"type": "json_object"}, "regex": "a"},
)


def types_of(raw: str) -> Any:
    """Of the metrics: names and types; when a labelled one began is shown from its first request on."""
    return sorted(re.findall(r"^# TYPE (?!\w+_created )(.*)$", raw, re.MULTILINE))


def operations(raw: str) -> Any:
    """Of the OpenAPI document: the summary, the tags and the statuses of each route."""
    return {
        f"{method.upper()} {path}": [about["summary"], about["tags"], sorted(about["responses"])]
        for path, methods in json.loads(raw)["paths"].items()
        for method, about in methods.items()
    }


def nothing(raw: str) -> Any:
    """Of a page."""


CLLM: Cases = {
    **GENERATING["cllm"],
    **refused(
        "/generate",
        PROMPT,
        *SAMPLING,
        *each(prompt=(..., "", 5, ["a"], None, LONE, LONG), max_tokens=(0, -2, "5", 1.5, True, None, -1)),
    ),
    **refused("/generate_stream", PROMPT, *each(prompt=(5, ..., LONG))),
    "/generate NaN": Case("/generate", b'{"prompt": "x", "temperature": NaN}'),
    "/generate GET": get("/generate"),
    **refused("/encode", {"text": "aé<|x|>"}, *each(text=("", 5, ..., LONE))),
    **refused("/decode", {"tokens": [97]}, *each(tokens=([], [195], ..., 5, ["a"], [-1], [9999], [1.5]))),
    "/model/info": get("/model/info"),
    "/model/info POST": Case("/model/info", {}),
    "/model/info unknown": get(f"/model/info?model={NO_MODEL}"),
}
COMPLETIONS: Cases = {
    **GENERATING["completions"],
    **asked(
        "/v1/completions",
        {"prompt": "abc", "seed": 1, "max_tokens": 3},
        *({"best_of": 3, "n": 2}, {"max_tokens": 0, "echo": True, "logprobs": 0}),
        *({"prompt_logprobs": 1}, {"max_tokens": None, "prompt": YES}, {"timings_per_token": True}),
    ),
    **refused(
        "/v1/completions",
        {**PROMPT, "max_tokens": 8},
        *OPENAI,
        *each(prompt=(..., [], [[]], 5, [1.5], ["a", 5], [[1], "a"], [-1], [9999], LONE, LONG, "")),
        *each(prompt=(["a"] * 257,), suffix=("c",), logprobs=(21,), echo=(1,)),
        *({"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}),
    ),
    "/v1/completions GET": get("/v1/completions"),
}
MODELS = (
    "/v1/models",
    "/v1/models/fake",
    "/v1/models/a/b",
    "/v1/models/..%2Fa",
    "/models",
    "/v1",
    "/v1/nowhere",
)
CHAT: Cases = {
    **GENERATING["chat"],
    **asked(
        "/v1/chat/completions",
        {"messages": user("abc"), "seed": 1, "max_tokens": 3},
        *each(prompt_logprobs=(1,), verbose=(True,), max_completion_tokens=(2,), n_predict=(2,)),
        {"max_tokens": -1, "messages": user(YES)},
    ),
    **refused(
        "/v1/chat/completions",
        {**TALK, "max_tokens": 8},
        *OPENAI,
        *TALKS,
        *each(logprobs=(2,), top_logprobs=(1,)),
        *each(prediction=({"type": "content"}, {"type": "x", "content": "a"})),
        {"logprobs": True, "top_logprobs": 21},
        {"prompt_logprobs": 1, "stream": True},
        {"messages": user(LONG), "stream": True},
    ),
    **refused("/chat/completions", {**TALK, "max_tokens": 8}, *each(messages=(..., user(LONG)))),
    "/v1/chat/completions GET": get("/v1/chat/completions"),
    **{path: get(path) for path in MODELS},
    **{f"{path} POST": Case(path, {}) for path in (*MODELS, "/v1/audio/speech")},
}
STORED = {"input": "And?", "previous_response_id": "LAST"}
RESPONSES: Cases = {
    **GENERATING["responses"],
    "stored": Case("/v1/responses", {"input": say("One.", "Two.")}),
    "GET": get("/v1/responses/LAST"),
    "input items": get("/v1/responses/LAST/input_items"),
    "cancel": Case("/v1/responses/LAST/cancel"),
    "PUT": Case("/v1/responses/LAST", {}, "PUT"),
    "POST": Case("/v1/responses/LAST", {}),
    "continued": Case("/v1/responses", STORED),
    "continued as a stream": Case("/v1/responses", {**STORED, "stream": True}),
    "DELETE its input items": Case("/v1/responses/LAST/input_items", method="DELETE"),
    "DELETE": Case("/v1/responses/LAST", method="DELETE"),
    "DELETE again": Case("/v1/responses/LAST", method="DELETE"),
    "GET after that": get("/v1/responses/LAST"),
    "GET all": get("/v1/responses"),
    **refused(
        "/v1/responses",
        {"input": YES, "seed": 1, "max_output_tokens": 16},
        *SAMPLING,
        *each(input=(..., "", [], 5, [5], [{}], user(5), user(LONE), user([{"type": "x"}]), LONG)),
        *each(input=([{"role": "user"}], [{"type": "function_call", "call_id": 5}])),
        *each(input=([{"type": "item_reference", "id": "a"}],), previous_response_id=("resp_1", 5)),
        *each(max_output_tokens=(0, "5"), tools=(5, [{"type": "function"}]), top_logprobs=(21,)),
        *each(text=({"format": {"type": "json_schema"}}, {"format": {"type": "xml"}}), reasoning=(5,)),
        *each(include=("x",), metadata=({"a": 5}, {"a" * 65: "x"}), truncation=("x",), conversation=("a",)),
        *each(prompt=({"id": "a"},), background=(False,)),
        {"background": True, "store": False},
        {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "sub"}},
        {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "file_search"}},
        {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    ),
    **refused(
        "/v1/responses/input_tokens",
        {"input": "abc"},
        *each(input=(..., 5), tools=([RESPONSE_TOOL],)),
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    **refused("/responses", {"input": YES}, *each(input=(...,))),
    **asked("/responses/input_tokens", {"input": "abc"}, {}, *each(input=(5,))),
}
MESSAGES: Cases = {
    **GENERATING["messages"],
    **refused(
        "/v1/messages",
        {**TALK, "max_tokens": 8},
        *SAMPLING,
        *each(messages=WRONG_MESSAGES, max_tokens=(..., 0, "5"), system=(5, [{"type": "text"}])),
        *each(
            messages=(user([{"type": "image", "source": {}}]), user([{"type": "tool_result", "content": 5}]))
        ),
        *each(messages=([*user("x"), {"role": "assistant", "content": [{"type": "tool_use"}]}],)),
        *each(stop_sequences=("x",), metadata=({"user_id": 5},), tool_choice=({"type": "any"},)),
        *each(tools=(5, [{"name": "a"}], [{"name": "a b", "input_schema": {}}])),
        *each(thinking=({"type": "x"}, {"type": "enabled", "budget_tokens": -2})),
        *each(output_config=({"format": {"type": "json_schema"}},)),
        {"temperature": 1.5},
        {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool"}},
        {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool", "name": "sub"}},
        {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "x"}},
        {"messages": user(LONG), "stream": True},
    ),
    **refused(
        "/v1/messages/count_tokens",
        TALK,
        *each(messages=(..., []), tools=(5, [MESSAGE_TOOL]), system=("Be brief.",)),
    ),
    "/v1/messages GET": get("/v1/messages"),
    "/v1/messages/nowhere": Case("/v1/messages/nowhere", {}),
    "/v1/messages/batches": Case("/v1/messages/batches", {"requests": []}),
}
INPUTS: tuple[Any, ...] = (
    ...,
    "",
    [],
    [""],
    5,
    [5.5],
    ["a", 5.5],
    [-1],
    [9999],
    {},
    [{}],
    None,
    LONE,
    "x" * 300,
)
INPUTS = (*INPUTS, ["a", "b"], [97, 98], [[97], [98]], [97, "b"], [{"content": "a"}], {"prompt_string": "a"})
RANK, SCORE = {"query": "a", "documents": ["b"]}, {"text_1": "a", "text_2": "b"}
WRONG_RANK = (
    *each(query=(..., "", 5), documents=(..., [], ["a", 5], [{}]), top_n=(0,), return_documents=("x",)),
)
EMBEDDINGS: Cases = {
    **refused(
        "/v1/embeddings",
        {"model": "m", "input": "abc"},
        *each(input=(*INPUTS, [{"content": [{"type": "text", "text": "b"}]}]), user=(5,)),
        *each(dimensions=(2, 0, 99, "x"), encoding_format=("base64", "x")),
    ),
    **refused("/embedding", {"content": "abc"}, *each(content=INPUTS, embd_normalize=(-1, 0, 1, 65))),
    **asked("/embedding", {"input": "abc"}, {}),
    **asked("/embeddings", {"content": "abc"}, {}, *each(content=(5,))),
    "/embeddings PUT": Case("/embeddings", {}, "PUT"),
    **refused("/v1/rerank", RANK, *WRONG_RANK),
    **refused("/rerank", RANK, *WRONG_RANK),
    **asked("/v1/reranking", RANK, {}),
    **asked("/reranking", RANK, {}),
    **refused(
        "/v1/score",
        SCORE,
        *each(text_1=(..., 5), text_2=([],)),
        {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
    ),
    **asked("/score", SCORE, {}, *each(text_1=(5,))),
}
SLOTS = {
    "erase": Case("/slots/0?action=erase", {}),
    "save": Case("/slots/0?action=save", {"filename": "a.bin"}),
    "restore": Case("/slots/0?action=restore", {"filename": "a.bin"}),
    "save a path": Case("/slots/0?action=save", {"filename": "../a"}),
    "save without a name": Case("/slots/0?action=save", {}),
    "save, wrong name": Case("/slots/0?action=save", {"filename": 5}),
    "no such slot": Case("/slots/99?action=erase", {}),
    "no such action": Case("/slots/0?action=dance", {}),
    "no action": Case("/slots/0", {}),
    "no number": Case("/slots/x?action=erase", {}),
    "erase with nothing": Case("/slots/0?action=erase"),
}
LLAMA_READ = (
    "/slots",
    "/slots?fail_on_no_slot=1",
    "/slots/0",
    "/props",
    f"/props?model={NO_MODEL}",
    "/lora-adapters",
)
LLAMA: Cases = {
    **SLOTS,
    **{path: get(path) for path in LLAMA_READ},
    **{f"{path} POST": Case(path, {}) for path in ("/slots", "/props", "/lora-adapters")},
    "/props PUT": Case("/props", {}, "PUT"),
    **GENERATING["llama"],
    **refused(
        "/completion",
        {**PROMPT, "n_predict": 8},
        *SAMPLING,
        *each(prompt=(..., "", [], 5, None, [-1], [9999], [1.5], {}, {"prompt_string": 5}, LONE, LONG)),
        *each(n_predict=(-2, "5", 0), n_probs=(21,), n_cmpl=(0,), response_fields=("x",), n_indent=(-1,)),
        {"grammar": "", "json_schema": SCHEMA, "prompt": "abc", "n_predict": -1},
        {"prompt": LONG, "stream": True},
    ),
    **refused("/completions", PROMPT, *each(prompt=(...,))),
    **refused(
        "/infill", {"input_prefix": "a", "input_suffix": "b"}, *each(input_prefix=(...,), input_extra=([{}],))
    ),
    **refused(
        "/tokenize",
        {"content": "a<|x|>é"},
        *each(content=([97, "b"], ..., 5, [-1]), parse_special=(False,), with_pieces=(True, "x")),
        *each(add_special=(True,)),
    ),
    **refused("/detokenize", {"tokens": [97, 257]}, *each(tokens=(..., [195], 5, [9999], ["a"]))),
    **refused(
        "/apply-template",
        TALK,
        *TALKS,
        *each(tools=([ADD],), add_generation_prompt=(False,)),
        *each(messages=([*user("a"), {"role": "assistant", "content": "b"}],)),
    ),
    **asked("/chat/completions/input_tokens", TALK, {}, *each(messages=(5,), tools=([ADD],))),
    **asked("/v1/chat/completions/input_tokens", TALK, {}, *each(messages=(5,))),
}
DELETED: dict[str, Any] = {
    "unknown": {"model": "nothing-of-this-name"},
    "no model": {},
    "a number": {"model": 5},
}
DELETED |= {"a list": [], "not JSON": b"{", "nothing": None}
OLLAMA: Cases = {
    **{path: get(path) for path in ("/api/version", "/api/tags", "/api/ps", "/api/nowhere")},
    "/api/tags POST": Case("/api/tags", {}),
    **refused("/api/show", {"model": "fake"}, {"model": ..., "name": "fake:latest"}, *each(model=(..., ""))),
    **GENERATING["ollama"],
    **refused(
        "/api/chat",
        {"model": "m", **TALK, "options": {"seed": 1}, "stream": False},
        *each(
            messages=WRONG_MESSAGES[1:], model=(...,), tools=(5, [ADD, ADD]), format=("xml", 5), think=("x",)
        ),
        *each(options=(5, {"temperature": "hot"}, {"num_predict": "x"}, {"stop": [1]}, {"num_ctx": "x"})),
        *each(keep_alive=("x", "5m"), top_logprobs=(21,)),
        *each(messages=([{"role": "user", "content": "a", "images": ["x"]}],)),
        {"messages": user(LONG), "stream": True},
    ),
    **refused(
        "/api/generate",
        {"model": "m", **PROMPT, "stream": False},
        *each(prompt=(5, LONG), images=(["x"],), template=("x",), context=([1],), raw=("x",)),
        {"suffix": "a", "raw": True},
    ),
    **refused(
        "/api/embed",
        {"model": "m", "input": "abc"},
        *each(input=(["a", "b"], "", [], "x" * 300, ..., 5, [""]), dimensions=(2, 99)),
        {"input": "x" * 300, "truncate": False},
    ),
    **refused("/api/embeddings", {"model": "m", "prompt": "abc"}, *each(prompt=("", 5))),
    **refused("/api/pull", {"model": "llama3"}, *each(model=(...,), stream=(False, "x"))),
    **{f"/api/delete {name}": Case("/api/delete", body, "DELETE") for name, body in DELETED.items()},
    "/api/delete POST": Case("/api/delete", {"model": "a"}),
    "/api/copy unknown": Case("/api/copy", {"source": "nothing-of-this-name", "destination": "a"}),
    "/api/copy no name": Case("/api/copy", {"source": "fake", "destination": ""}),
    "/api/copy": Case("/api/copy", {"source": "a", "destination": "b"}),
}
PAGES = ("/docs", "/page/index.html", "/page/api.js", "/page/../app.py")
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST"}
READ = ("/health", "/v1/health", "/ready", "/debug/kv", "/debug/requests", "/admin/models", "/")
LARGE = b"x" * (8 << 20) + b"x"
OPERATION: Cases = {
    "/admin/cache/clear": Case("/admin/cache/clear"),
    "/admin/cache/clear with a body": Case("/admin/cache/clear", {"a": 1}),
    **{path: get(path) for path in READ},
    **{f"{path} HEAD": Case(path, method="HEAD") for path in READ},
    **{f"{path} POST": Case(path, {}) for path in (*READ, "/live", "/page/api.js", "/nowhere")},
    **{f"{path} unknown model": get(f"{path}?model={NO_MODEL}") for path in READ},
    "/debug/kv?snapshot=x": get("/debug/kv?snapshot=x"),
    "/metrics": get("/metrics", shows=types_of),
    "/openapi.json": get("/openapi.json", shows=operations),
    "/live": get("/live", hold="event|data"),
    "/ as a page": get("/", headers={"accept": "text/html"}, shows=nothing),
    **{path: get(path, shows=nothing) for path in PAGES},
    "/page/api.js compressed": get("/page/api.js", headers={"accept-encoding": "gzip"}, shows=nothing),
    **{
        path: get(path)
        for path in ("/page/nothing.js", "/favicon.ico", "/nowhere", "/admin/nowhere", "/health/")
    },
    **refused("/admin/models/load", {"model": "fake"}, *each(model=(..., ""))),
    **refused("/admin/models/unload", {"model": "fake"}, *each(model=(...,))),
    **refused("/admin/reload", {"model": "a.gguf"}, *each(model=("",))),
    "/admin/requests/x/cancel": Case("/admin/requests/x/cancel"),
    "/admin/requests/x/cancel GET": get("/admin/requests/x/cancel"),
    **{f"{path} OPTIONS": Case(path, method="OPTIONS") for path in ("/v1/responses", "/v1/messages", "/")},
    "preflight without origins": Case("/v1/chat/completions", method="OPTIONS", headers=PREFLIGHT),
    "an origin": get("/health", headers={"origin": ORIGIN}),
    **{
        f"{path} at a foreign host": get(path, headers={"host": "evil.example"})
        for path in ("/health", "/v1/models")
    },
    "a large header": get("/health", headers={"x-large": "x" * 40_000}),
    **{f"{path} large": Case(path, LARGE) for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")},
    # What a running request looks like, and its end.
    "a stream": Case(
        "/generate_stream", {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True}, hold="data"
    ),
    "/debug/kv of it": get("/debug/kv", loose=True),
    "/slots of it": get("/slots", loose=True),
    "/debug/requests of it": get("/debug/requests", loose=True),
    "its end": Case("/admin/requests/LAST/cancel"),
}
USERS, NOBODYS = {"authorization": f"Bearer {USER}"}, {"authorization": ""}
EACH_API: dict[str, Any] = {
    "/generate": PROMPT,
    "/v1/completions": PROMPT,
    "/v1/chat/completions": TALK,
    "/v1/responses": {"input": YES},
    "/v1/messages": {**TALK, "max_tokens": 8},
    "/v1/embeddings": {"input": "a"},
    "/completion": PROMPT,
    "/api/chat": {"model": "m", **TALK},
}
KEYLESS = ("/health", "/v1/health", "/", "/ready", "/metrics", "/v1/models", "/nowhere", "/docs")
FOR_USERS = ("/v1/models", "/metrics", "/debug/kv", "/admin/models", "/slots", "/live", "/api/ps", "/props")
ASKED_BEFORE: dict[str, dict[str, str]] = {
    "": {},
    " without key": NOBODYS,
    " with headers": {"access-control-request-headers": "x-api-key"},
    " from elsewhere": {"origin": "https://b.example"},
    " of PUT": {"access-control-request-method": "PUT"},
    " of a private network": {"access-control-request-private-network": "true"},
}
RANKED = {"model": "m", "query": "a", "documents": ["b", {"text": "c"}, "ddd"]}
RANKINGS: tuple[dict[str, Any], ...] = (
    *({}, {"top_n": 1, "return_documents": True}, {"documents": ["x" * 300]}),
    *({"documents": ..., "texts": ["b", "c"], "return_text": shown} for shown in (False, True)),
)
LATE = {"timeout": 0.05, "options": {"timeout": 0.05}}
ENDLESS = {"prompt": "abc", "max_tokens": 8000, "ignore_eos": True}
CLOSED: Cases = {
    **{f"{path} without key": Case(path, body, headers=NOBODYS) for path, body in EACH_API.items()},
    **{f"{path} without key": get(path, headers=NOBODYS) for path in KEYLESS},
    "a wrong key": get("/v1/models", headers={"authorization": "Bearer x"}),
    "another scheme": get("/v1/models", headers={"authorization": "Basic x"}),
    "x-api-key beside a wrong key": get(
        "/v1/models", headers={"authorization": "Bearer x", "x-api-key": ADMIN}
    ),
    **{f"{path} for a user": get(path, headers=USERS) for path in FOR_USERS},
    "/api/pull for a user": Case("/api/pull", {"model": "a"}, headers=USERS),
    "unload for a user": Case("/api/generate", {"model": "m", "keep_alive": 0}, headers=USERS),
    **{
        f"preflight{name}": Case("/v1/messages", method="OPTIONS", headers={**PREFLIGHT, **headers})
        for name, headers in ASKED_BEFORE.items()
    },
    "an origin": get("/v1/models", headers={"origin": ORIGIN}),
    "an origin with an error": Case("/v1/chat/completions", {}, headers={"origin": ORIGIN}),
    "another origin": get("/v1/models", headers={"origin": "https://b.example"}),
    **asked("/v1/rerank", RANKED, *RANKINGS),
    **asked("/rerank", RANKED, *RANKINGS),
    **asked(
        "/v1/score",
        {"model": "m", "text_1": "a", "text_2": ["b", "c"]},
        {},
        *each(text_1=(["a", "b"],), text_2=("b", "x" * 300)),
    ),
    **asked("/v1/embeddings", {"input": "a"}, {}),
    "fill the cache": Case("/generate", {"prompt": "abc" * 50, "max_tokens": 8, "seed": 1}),
    "save a slot": Case("/slots/0?action=save", {"filename": "slot"}),
    "restore a slot": Case("/slots/0?action=restore", {"filename": "slot"}),
    "a stream": Case("/generate_stream", ENDLESS, hold="data"),
    **{f"{path} late": Case(path, {**body, **LATE}) for path, body in EACH_API.items()},
    **{f"a stream that waits, {number}": Case("/generate_stream", ENDLESS, hold=":") for number in (1, 2, 3)},
    **{f"{path} with a full queue": Case(path, body) for path, body in EACH_API.items()},
    "a stream with a full queue": Case("/generate_stream", ENDLESS),
    "/slots with none free": get("/slots?fail_on_no_slot=1"),
}
# Which values each field of a body takes: fields that routes share are asked for once.
VALUES: tuple[Any, ...] = (None, True, "x", 1.5, 2.0, -7, 10**7, [], {}, ["x"], [1], {"a": 1})
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "/generate": (
        PROMPT,
        "timeout priority cache_prompt speculate temperature dynatemp_range dynatemp_exponent top_k top_p "
        "min_p typical_p top_n_sigma repetition_penalty frequency_penalty presence_penalty penalty_last_n "
        "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
        "xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay "
        "logit_bias ignore_eos seed "
        "min_tokens stop_token_ids samplers grammar regex choice json_schema structured_outputs guided_json "
        "guided_regex guided_choice guided_grammar prompt max_tokens stop stream",
    ),
    "/encode": ({}, "text"),
    "/decode": ({}, "tokens"),
    "/v1/completions": (
        PROMPT,
        "prompt max_tokens user n response_format stream_options timings_per_token return_progress verbose "
        "prompt_logprobs suffix best_of logprobs echo stop repeat_penalty",
    ),
    "/v1/chat/completions": (
        TALK,
        "max_tokens max_completion_tokens n_predict user n prediction reasoning_effort enable_thinking "
        "thinking reasoning thinking_budget reasoning_budget messages tools tool_choice parallel_tool_calls "
        "functions function_call chat_template_kwargs reasoning_format continue_final_message logprobs "
        "top_logprobs",
    ),
    "/v1/responses": (
        {"input": YES},
        "user input instructions tools tool_choice parallel_tool_calls text reasoning max_output_tokens "
        "top_logprobs include store metadata truncation chat_template_kwargs previous_response_id "
        "conversation prompt background stream stop",
    ),
    "/v1/messages": (
        {**TALK, "max_tokens": 8},
        "messages system tools tool_choice thinking output_config output_format chat_template_kwargs "
        "temperature stop_sequences metadata max_tokens stream",
    ),
    "/v1/embeddings": ({"input": "a"}, "user input encoding_format dimensions"),
    "/embedding": ({"content": "a"}, "content embd_normalize"),
    "/v1/rerank": (RANK, "user query documents texts top_n return_documents return_text"),
    "/v1/score": (SCORE, "user text_1 text_2"),
    "/completion": (
        PROMPT,
        "prompt repeat_penalty repeat_last_n n_predict max_tokens n_cmpl n n_probs logprobs "
        "post_sampling_probs return_tokens return_progress timings_per_token response_fields n_indent "
        "t_max_predict_ms stop temperature top_k grammar json_schema logit_bias stream",
    ),
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, "input_prefix input_suffix input_extra prompt"),
    "/tokenize": ({}, "content add_special parse_special with_pieces"),
    "/detokenize": ({}, "tokens"),
    "/apply-template": (TALK, "messages add_generation_prompt tools"),
    "/api/chat": (TALK, "format options think keep_alive logprobs top_logprobs messages tools stream"),
    "/api/generate": (
        PROMPT,
        "prompt suffix system raw images template context temperature num_predict stop",
    ),
    "/api/embed": ({"input": "a"}, "input truncate dimensions keep_alive"),
    "/api/embeddings": ({}, "prompt keep_alive"),
}
GROUPS: dict[str, Cases] = {
    "operation": OPERATION,
    "cllm": CLLM,
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "embeddings": EMBEDDINGS,
    "llama": LLAMA,
    "ollama": OLLAMA,
    "fields": {},  # FIELDS
    "closed": CLOSED,
}

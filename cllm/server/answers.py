"""Examples for routes that do not yet say it themselves with `documented()`."""

from __future__ import annotations

from typing import Any

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"

_OPENAI_USAGE = {
    "prompt_tokens": 4,
    "completion_tokens": 3,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_OWN_USAGE = {
    "prompt_tokens": 4,
    "completion_tokens": 3,
    "cached_tokens": 0,
    "decoded_tokens": 6,
    "steps": 3,
    "ubatches": 3,
    "cells": 6,
    "drafted_tokens": 0,
    "accepted_tokens": 0,
}
_LIMITS = {
    "sequences": 8,
    "cells": 32768,
    "sequence_cells": 4096,
    "request_tokens": 4096,
    "batch_tokens": 512,
    "unified": False,
    "embed": {"tokens": 4096, "batch_tokens": 512, "rows": 32, "chunked": True},
}
_LLAMA_END = {
    "stop": True,
    "model": "SmolLM2-135M-Instruct",
    "tokens_predicted": 3,
    "tokens_evaluated": 4,
    "tokens_cached": 0,
    "truncated": False,
    "stop_type": "limit",
    "stopping_word": "",
    "timings": {
        "cache_n": 0,
        "prompt_n": 4,
        "prompt_ms": 21.5,
        "predicted_n": 3,
        "predicted_ms": 18.2,
        "predicted_per_second": 164.8,
    },
}
_COMPLETION = {"content": "2\n\n", "tokens": [34, 198, 198], **_LLAMA_END}
_COMPLETION_EVENTS = (
    'data: {"content":"2","tokens":[34],"stop":false}\n\n'
    'data: {"content":"","tokens":[],"stop":true,"stop_type":"limit","timings":{"predicted_n":3}}\n\n'
)
_GENERATE_EVENTS = (
    'data: {"id":"8f0c","token":" there","done":false}\n\n'
    'data: {"id":"8f0c","token":"","done":true,"generated_tokens":3,"finish_reason":"length",'
    '"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\n'
)
_CHAT_EVENTS = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":'
    '[{"index":0,"delta":{"role":"assistant","content":"AI"},"finish_reason":null}]}\n\n'
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":'
    '[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    "data: [DONE]\n\n"
)
_TEXT_EVENTS = (
    'data: {"id":"cmpl-1","object":"text_completion","choices":'
    '[{"index":0,"text":" there","logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)
_RESPONSE_EVENTS = (
    "event: response.created\n"
    'data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1"}}\n\n'
    "event: response.output_text.delta\n"
    'data: {"type":"response.output_text.delta","sequence_number":4,"output_index":0,"content_index":0,'
    '"item_id":"msg_1","delta":"AI","logprobs":[]}\n\n'
    "event: response.completed\n"
    'data: {"type":"response.completed","sequence_number":9,"response":{"id":"resp_1"}}\n\n'
)
_MESSAGE_EVENTS = (
    'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","content":[]}}\n\n'
    "event: content_block_delta\n"
    'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"AI"}}\n\n'
    'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
_RESPONSE = {
    "id": "resp_8f0c2d7e",
    "object": "response",
    "created_at": 1767225600,
    "completed_at": 1767225601,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": "Be brief.",
    "max_output_tokens": 64,
    "temperature": 0.8,
    "top_p": 0.95,
    "user": None,
    "model": "SmolLM2-135M-Instruct",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
    "metadata": {},
    "top_logprobs": 0,
    "truncation": "disabled",
    "store": False,
    "background": False,
    "previous_response_id": None,
    "service_tier": "default",
    "output": [
        {
            "id": "msg_2b7e",
            "status": "completed",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "AI is …", "annotations": [], "logprobs": []}],
        }
    ],
    "usage": {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    },
}
_MESSAGE = {
    "id": "msg_8f0c2d7e",
    "type": "message",
    "role": "assistant",
    "model": "SmolLM2-135M-Instruct",
    "content": [{"type": "text", "text": "AI is …"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 4,
        "output_tokens": 3,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
    },
}
_VECTOR_USAGE = {"prompt_tokens": 8, "total_tokens": 8}
_METRICS = (
    "# HELP cllm_requests_running Requests being computed\n"
    "# TYPE cllm_requests_running gauge\n"
    "cllm_requests_running 3.0\n"
)


def _openai(kind: str, **choice: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1" if kind == "chat.completion" else "cmpl-1",
        "object": kind,
        "created": 1767225600,
        "model": "SmolLM2-135M-Instruct",
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": "stop"}],
        "usage": _OPENAI_USAGE,
    }


ANSWERS: dict[str, dict[str, Any]] = {
    "POST /generate": {
        JSON: {
            "success": True,
            "data": {
                "id": "8f0c2d7e4b6a4f5e9c1d2a3b4c5d6e7f",
                "text": " there was a",
                "response_time": 0.051,
                "tokens_per_second": 58.8,
                "generated_tokens": 3,
                "max_tokens": 32,
                "finish_reason": "stop",
                "usage": _OWN_USAGE,
            },
        },
        EVENTS: _GENERATE_EVENTS,
    },
    "POST /generate_stream": {EVENTS: _GENERATE_EVENTS},
    "POST /encode": {JSON: {"tokens": [6403, 1980, 253, 655], "length": 4}},
    "POST /decode": {JSON: {"text": "Once upon"}},
    "GET /model/info": {
        JSON: {
            "name": "SmolLM2-135M-Instruct",
            "architecture": "llama",
            "description": "llama 135M Q4_1",
            "parameters": 134515584,
            "size_bytes": 96862464,
            "vocabulary_size": 49152,
            "context_train": 8192,
            "embedding_length": 576,
            "layers": 30,
            "chat_template": "{% for message in messages %}…{% endfor %}",
            "tool_template": None,
            "recurrent": False,
            "sliding_window": 0,
            "generates": True,
            "pooling": "mean",
            "vector_length": 576,
            "limits": _LIMITS,
        }
    },
    "GET /v1/models": {
        JSON: {
            "object": "list",
            "data": [{"id": "SmolLM2-135M-Instruct", "object": "model", "created": 0, "owned_by": "cllm"}],
        }
    },
    "POST /v1/completions": {JSON: _openai("text_completion", text=" there was a"), EVENTS: _TEXT_EVENTS},
    "POST /v1/chat/completions": {
        JSON: _openai(
            "chat.completion", message={"role": "assistant", "content": "AI is …", "refusal": None}
        ),
        EVENTS: _CHAT_EVENTS,
    },
    "POST /v1/responses": {JSON: _RESPONSE, EVENTS: _RESPONSE_EVENTS},
    "POST /v1/responses/input_tokens": {JSON: {"object": "response.input_tokens", "input_tokens": 14}},
    "POST /v1/messages": {JSON: _MESSAGE, EVENTS: _MESSAGE_EVENTS},
    "POST /v1/messages/count_tokens": {JSON: {"input_tokens": 14}},
    "POST /v1/embeddings": {
        JSON: {
            "object": "list",
            "model": "SmolLM2-135M-Instruct",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.118, -0.042, 0.307]}],
            "usage": _VECTOR_USAGE,
        }
    },
    "POST /embedding": {JSON: [{"index": 0, "embedding": [[0.118, -0.042, 0.307]]}]},
    "POST /v1/rerank": {
        JSON: {
            "object": "list",
            "model": "bge-reranker-v2-m3",
            "results": [{"index": 0, "relevance_score": 5.27}],
            "usage": _VECTOR_USAGE,
        }
    },
    "POST /completion": {JSON: _COMPLETION, EVENTS: _COMPLETION_EVENTS},
    "POST /infill": {JSON: _COMPLETION, EVENTS: _COMPLETION_EVENTS},
    "POST /tokenize": {JSON: {"tokens": [33, 27, 33, 45]}},
    "POST /detokenize": {JSON: {"content": "1+1="}},
    "POST /apply-template": {
        JSON: {"prompt": "<|im_start|>user\nWhat is AI?<|im_end|>\n<|im_start|>assistant\n"}
    },
    "GET /props": {
        JSON: {
            "default_generation_settings": {"n_ctx": 4096},
            "total_slots": 8,
            "model_alias": "SmolLM2-135M-Instruct",
            "chat_template": "{% for message in messages %}…{% endfor %}",
            "build_info": "cllm 0.1.0",
        }
    },
    "GET /slots": {JSON: [{"id": 0, "n_ctx": 4096, "is_processing": True}]},
    "GET /health": {JSON: {"status": "ok", "engine": "ready"}},
    "GET /ready": {JSON: {"status": "ready"}},
    "GET /metrics": {PLAIN: _METRICS},
    "GET /debug/kv": {
        JSON: {
            "sequences": {"total": 8, "leased": 1, "free": 7},
            "cells": {"total": 32768, "used": 57},
            "leases": [
                {
                    "seq_id": 0,
                    "request_id": "8f0c2d7e",
                    "tokens": 58,
                    "position": 57,
                    "state": "running",
                    "age_s": 0.31,
                }
            ],
            "counters": {
                "leased_total": 12,
                "released_total": 11,
                "cleared_cells_total": 913,
                "integrity_failures": 0,
            },
        }
    },
    "POST /admin/prefixes/save": {JSON: {"entries": 12, "tokens": 9216, "bytes": 212860928, "skipped": 0}},
    "POST /admin/prefixes/restore": {JSON: {"entries": 12, "tokens": 9216, "bytes": 212860928, "skipped": 0}},
    "POST /admin/reload": {
        JSON: {
            "model": "SmolLM2-360M-Instruct",
            "description": "llama 360M Q8_0",
            "sequences": 8,
            "request_tokens": 4096,
        }
    },
    "GET /debug/requests": {
        JSON: {
            "requests": [
                {
                    "id": "8f0c2d7e",
                    "place": "running",
                    "age_s": 0.31,
                    "prompt_tokens": 42,
                    "generated_tokens": 16,
                    "max_tokens": 256,
                }
            ]
        }
    },
}

_COMPUTING = (
    "/generate",
    "/generate_stream",
    "/completion",
    "/infill",
    "/embedding",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
)
LEGACY = {
    route: {
        "x-computes": route.split()[1] in _COMPUTING,
        "x-content": {
            kind: {"schema": {} if kind == JSON else {"type": "string"}, "example": example}
            for kind, example in content.items()
        },
    }
    for route, content in ANSWERS.items()
}

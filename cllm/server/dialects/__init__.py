"""The dialects of the server: one package or module for each HTTP API."""

from __future__ import annotations

from cllm.server.dialect import Dialect, DialectTable
from cllm.server.dialects.anthropic import messages  # noqa: F401  (they register their routes)
from cllm.server.dialects.anthropic.dialect import anthropic
from cllm.server.dialects.cllm import admin, generate  # noqa: F401
from cllm.server.dialects.cllm.dialect import cllm, operation
from cllm.server.dialects.llama_server import routes as llama_server_routes  # noqa: F401
from cllm.server.dialects.llama_server.dialect import llama_server
from cllm.server.dialects.ollama import routes as ollama_routes  # noqa: F401
from cllm.server.dialects.ollama import store as ollama_store  # noqa: F401
from cllm.server.dialects.ollama.dialect import ollama
from cllm.server.dialects.openai import chat, completions, models  # noqa: F401
from cllm.server.dialects.openai.dialect import openai
from cllm.server.dialects.openai.embeddings import embeddings
from cllm.server.dialects.responses import responses as responses_routes  # noqa: F401
from cllm.server.dialects.responses.dialect import llama_responses, responses

DIALECTS: tuple[Dialect, ...] = (
    cllm,
    openai,
    responses,
    anthropic,
    embeddings,
    ollama,
    llama_server,
    llama_responses,
    operation,
)
TABLE = DialectTable(DIALECTS)

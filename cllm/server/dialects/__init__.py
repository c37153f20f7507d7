"""The dialects of the server, one for each HTTP API. Importing a module registers its routes."""

from __future__ import annotations

from cllm.server.dialect import DialectTable
from cllm.server.dialects.anthropic import anthropic
from cllm.server.dialects.cllm import cllm
from cllm.server.dialects.llama_server import llama_server
from cllm.server.dialects.ollama import ollama
from cllm.server.dialects.openai import batches, chat, completions, models, openai  # noqa: F401
from cllm.server.dialects.openai.embeddings import embeddings
from cllm.server.dialects.operation import operation
from cllm.server.dialects.responses import llama_responses, responses

DIALECTS = (cllm, openai, responses, anthropic, embeddings, ollama, llama_server, llama_responses, operation)
TABLE = DialectTable(DIALECTS)

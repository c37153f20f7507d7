"""The dialects of the server: one package for each HTTP API. Importing a module registers its routes."""

from __future__ import annotations

from cllm.server.dialect import Dialect, DialectTable
from cllm.server.dialects.anthropic import anthropic
from cllm.server.dialects.cllm import admin as admin
from cllm.server.dialects.cllm import cllm, operation
from cllm.server.dialects.cllm import generate as generate
from cllm.server.dialects.llama_server import llama_server
from cllm.server.dialects.llama_server import routes as llama_server_routes
from cllm.server.dialects.ollama import ollama
from cllm.server.dialects.ollama import routes as ollama_routes
from cllm.server.dialects.ollama import store as ollama_store
from cllm.server.dialects.openai import chat as chat
from cllm.server.dialects.openai import completions as completions
from cllm.server.dialects.openai import models as models
from cllm.server.dialects.openai import openai
from cllm.server.dialects.openai.embeddings import embeddings
from cllm.server.dialects.responses import llama_responses, responses

__all__ = ["DIALECTS", "TABLE", "llama_server_routes", "ollama_routes", "ollama_store"]

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

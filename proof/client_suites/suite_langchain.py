"""LangChain's standard tests of chat models, for `ChatOpenAI` (both of its APIs) and `ChatAnthropic`."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["CLLM_URL"]


class _Tests(ChatModelIntegrationTests):
    """What cllm serves: text, tools, schemas; no images, no audio, no files."""

    has_tool_calling = has_tool_choice = has_structured_output = True
    supports_json_mode = supports_anthropic_inputs = True
    returns_usage_metadata = True

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 512, "max_retries": 0, "timeout": 300}


class TestChatOpenAI(_Tests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "cllm", "base_url": f"{URL}/v1", "api_key": "none", "stream_usage": True}


class TestChatOpenAIResponses(TestChatOpenAI):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestChatAnthropic(_Tests):
    supports_json_mode = False  # its API has none

    @property
    def chat_model_class(self) -> type[ChatAnthropic]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "cllm", "base_url": URL, "api_key": "none"}


del ChatModelIntegrationTests, _Tests

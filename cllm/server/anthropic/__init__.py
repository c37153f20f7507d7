"""Anthropic's words for what the server does."""

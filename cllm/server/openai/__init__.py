"""OpenAI's shapes: what its clients send and what they expect back."""

"""The bench of a GPU machine: random models of real sizes, cllm beside llama-server and bare decode."""

"""Measure cllm, alone and beside others, over HTTP: no runner is imported, the engine by `tenants` alone.

`run.run_bench` compares servers; modules with a `main` are commands of their own.
"""

"""Measure cllm, alone and beside others, over HTTP: nothing here imports a backend, only `tenants` the engine.

`run.run_bench` compares servers; modules with a `main` are commands of their own.
"""

"""Benchmarks: cllm, alone and beside other servers, over HTTP. In the repository, not in the package.

`python -m bench` compares servers (`run`). Commands of their own: `overload`, `tenants`,
`wire_cost`, `growth`, `compare_trees`.
"""

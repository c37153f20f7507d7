"""Benchmarks: cllm, alone and beside other servers, over HTTP. In the repository, not in the package.

`python -m bench` compares servers (`run`). Commands of their own: `overload`, `tenants`, `choices`,
`wire_cost`, `growth`, `libraries`, `compare_trees`.
"""

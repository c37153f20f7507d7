"""Measure cllm, alone and beside others, over HTTP only: nothing here imports the engine or a backend.

`run.run_bench` compares servers, `python -m cllm.bench.seeds` replays the earlier server's failures,
`python -m cllm.bench.soak` watches memory over thousands of requests.
"""

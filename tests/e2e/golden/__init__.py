"""Recorded answers of every route, and how they are compared.

A case (`cases.py`, `groups.py`) is a request to the real server on the scripted fake model, so its answer is
the same on every machine: status, headers, and the body, whole or as events, with its keys in their order.
`normal.py` takes out what may differ. The answers of a group are `recordings/GROUP.jsonl`, one a line.
`python -m tests.e2e.golden.record --diff` shows all that differ now; without `--diff` it records anew.
"""

"""Recorded event sequences of streams, and how they are compared.

A case (`cases.py`) is a request to the real server on the scripted fake model, so its answer is the same on
every machine. Its recording is `recordings/NAME.jsonl`, one event a line, ids and times normalised
(`normal.py`). To add a case, or after a change that is meant: `python -m tests.e2e.golden.record NAME …`
(no NAME: all), then read the diff.
"""

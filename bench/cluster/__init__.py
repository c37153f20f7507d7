"""`python -m bench.cluster`: a discrete-event simulation of many replicas and ways to place requests."""

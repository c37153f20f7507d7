"""Suites that pytest runs in the clients' own environment, by `proof.clients`; never in `make test`."""

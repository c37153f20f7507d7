"""Suites that pytest runs in the clients' own environment, by `tests.soak.clients`; never in `make test`."""

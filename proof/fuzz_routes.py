"""Schemathesis on every route, on a tiny real model.

Valid and invalid requests, NUL characters among them: those of the description's limits, and random ones. The
result of each route is kept in `build`; `--resume` goes on after those that passed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from proof.command import ROOT, make_parser
from proof.evidence import Bar, Evidence, record
from proof.shared.kept import Kept
from tests.driver.server import PATIENCE_S, Server, environment, make_client, wait_for
from tests.tiny_models import make_dense

LIMIT_S = 3600.0
UNLOADED = " is unloaded: "  # on purpose, by Ollama's `keep_alive`: then the workers are others
EXAMPLES = 1000
# Decided otherwise: what a description cannot say is refused (a prompt that is too long, a grammar that is
# wrong), and what clients send though it does not say so is taken (null for what is not given, say).
DECIDED = ("positive_data_acceptance", "negative_data_rejection")
# A request that asks for a time limit of a millisecond gets its 504.
SETTINGS = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]\n'
# A reload takes seconds, and replaces the children on purpose. POST /props is a 501, as in llama-server.
# /api/pull asks a hub, and /api/delete deletes.
LEFT_OUT = ("/admin/reload", "/props", "/api/pull", "/api/delete")


class RouteResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent to one route, and what came of it."""

    route: str
    seed: int
    examples: int  # random cases, at most
    cases: int  # of all phases
    seconds: float
    passed: bool
    died: Sequence[str] = ()


def fuzz(
    url: str,
    folder: Path,
    examples: int,
    seed: int = 1,
    phases: str = "examples,coverage,fuzzing",
    checks: str = "not_a_server_error",
    route: str = "",
) -> subprocess.CompletedProcess[str]:
    """Every route or one, valid and invalid data; the same requests for the same seed. 0: nothing found."""
    with make_client() as client:
        client.get(f"{url}/openapi.json")  # the first takes longest, and schemathesis waits for 10 s only
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
    command += [f"{url}/openapi.json"]
    command += ["--checks", checks, *(["--exclude-checks", ",".join(DECIDED)] if checks == "all" else [])]
    command += ["--mode", "all", "--max-examples", str(examples), "--seed", str(seed)]
    command += ["--generation-allow-x00", "true"]
    for path in LEFT_OUT:
        command += ["--exclude-path", path]
    command += ["--include-path", route] if route else []
    command += ["--generation-database", "none", "--phases", phases, "--request-timeout", str(PATIENCE_S)]
    command += ["--max-response-time", str(PATIENCE_S)]  # its own limit is 10 s: fifty prompts of one request
    return subprocess.run(
        [*command, "--no-color"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
    )


def fuzz_route(server: Server, folder: Path, route: str, options: argparse.Namespace) -> RouteResult:
    """One route; what schemathesis says is printed where it finds something."""
    before = {role: server.child(role) for role in ("engine", "tokenizer")}
    unloads = server.log_text.count(UNLOADED)
    began = time.monotonic()
    done = fuzz(server.url, folder, options.examples, options.seed, checks=options.checks, route=route)
    wait_for(server.idle, message="requests are left after the route")
    kept = server.log_text.count(UNLOADED) == unloads
    found = re.search(r"^\s*([\d,]+) generated", done.stdout, re.MULTILINE)
    result = RouteResult(
        route=route,
        seed=options.seed,
        examples=options.examples,
        cases=int(found[1].replace(",", "")) if found else 0,
        seconds=time.monotonic() - began,
        passed=done.returncode == 0 and found is not None,
        died=[role for role, pid in before.items() if server.child(role) != pid and kept],
    )
    if not result.passed or result.died:
        print(f"{done.stdout}\n{server.log_tail}")
    return result


def fuzz_routes(options: argparse.Namespace) -> list[RouteResult]:
    """All routes one after the other, on one server."""
    kept = Kept(
        ROOT / "build" / "fuzz-routes.jsonl", RouteResult, fresh=not (options.resume or options.route)
    )
    size = (options.seed, options.examples)
    known = {
        route: one
        for route, one in kept.found.items()
        if one.passed and not one.died and (one.seed, one.examples) == size
    }
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_dense(folder / "dense.gguf")
        settings = ("--parallel", "4", "--ctx-size", "512", "--threads", "1")
        with Server(folder / "log", str(model), *settings) as server:
            routes = [path for path in server.get("/openapi.json")["paths"] if path not in LEFT_OUT]
            for route in options.route or routes:
                result = known.get(route) or fuzz_route(server, folder, route, options)
                kept.add(route, result)
                results.append(result)
                verdict = "passed" if result.passed and not result.died else "FAILED"
                print(f"{route:<44} {result.cases:>6} cases {result.seconds:>6.0f} s  {verdict}", flush=True)
            tracebacks = server.log_text.count("Traceback")
    if tracebacks:
        print(f"{tracebacks} tracebacks are in the log")
    return results


ROUTES = 43  # as many as the description has, less LEFT_OUT


def make_evidence(results: Sequence[RouteResult], examples: int) -> Evidence:
    """The row of the proof."""
    failed = [result.route for result in results if not result.passed]
    died = [f"{role} at {result.route}" for result in results for role in result.died]
    few = [result for result in results if result.cases < examples]
    return Evidence(
        name="fuzz-routes",
        order=60,
        title="Every route by its description",
        about=(
            f"schemathesis sends {examples:,} random cases to each route, valid and invalid, NUL characters "
            "allowed, beside those at the limits of every field, to a real server with a tiny model. "
            "A route without parameters or with few of them has fewer distinct cases: then all of these. "
            f"Left out: {', '.join(LEFT_OUT)}, which have tests of their own."
        ),
        bars=(
            Bar("routes", f"{ROUTES}", f"{len(results)}", len(results) >= ROUTES),
            Bar("routes with a finding", "0", ", ".join(failed) or "0", not failed),
            Bar("workers that died", "0", ", ".join(died) or "0", not died),
        ),
        figures={
            "cases": sum(result.cases for result in results),
            f"routes with fewer than {examples:,} distinct cases": len(few),
            "seconds": round(sum(result.seconds for result in results)),
        },
        mended=(
            "Routes outside of /v1 and /api answered 404 for an unknown `model` without saying so in their "
            "description (`test_a_route_whose_body_names_a_model_may_not_find_it`).",
            "/completion answers several prompts with a list, which its description did not say "
            "(`test_several_prompts_of_llama_servers_route_are_answered_with_a_list`).",
        ),
    )


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        examples=(EXAMPLES, "of each route"),
        seed=(1, "of the cases"),
        checks=("all", "of schemathesis, comma-separated"),
        route=([], "only this one; nothing is recorded"),
        resume=(False, "go on after the routes that passed before"),
    )
    options = parser.parse_args(arguments)
    results = fuzz_routes(options)
    if options.route or options.examples < EXAMPLES:
        return int(not all(result.passed and not result.died for result in results))
    return record(make_evidence(results, options.examples))

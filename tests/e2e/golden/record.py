"""`python -m tests.e2e.golden.record [--diff] [GROUP …]`: record the answers to the cases, or compare."""

from __future__ import annotations

import difflib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.driver.server import Server, make_client, wait_for
from tests.e2e.golden.cases import ADMIN, KEYS, NO_MODEL, ORIGIN, Case
from tests.e2e.golden.groups import FIELDS, GROUPS, VALUES
from tests.e2e.golden.normal import Event, normal, parse, plain

RECORDINGS = Path(__file__).parent / "recordings"
PROGRAM = ("import sys; from cllm.testing import main; sys.exit(main(sys.argv[1:]))", "serve")
# Slow enough that pieces come one by one and not joined.
SETTINGS = ("--step-ms", "4", "--parallel", "4")
_UNTOLD = frozenset({"date", "server", "content-length", "transfer-encoding", "connection", "etag"})
_STREAMS = ("text/event-stream", "application/x-ndjson")
Answer = dict[str, Any]


def scripted_server(log: Path, *arguments: str) -> Server:
    """The whole server on the scripted model."""
    return Server(log, *(arguments or SETTINGS), program=PROGRAM)


def closed_server(folder: Path) -> Server:
    """One with keys, a web origin, a ranking model, state files, one slot, and room for one more request."""
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    limits = ("--step-ms", "4", "--parallel", "1", "--queue-size", "1")
    access = ("--api-keys", str(keys), "--cors-origins", ORIGIN)
    return scripted_server(
        folder / "log", *limits, *access, "--pooling", "rank", "--cache-dir", str(folder / "cache")
    )


def ask(client: httpx.Client, case: Case, last: str = "") -> httpx.Response:
    """The answer to a case, its body not read yet. LAST in the request is the `last` id of an answer."""
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).replace("LAST", last).encode()
    headers = {"content-type": "application/json"} if case.body is not None else {}
    request = client.build_request(
        case.method,
        case.path.replace("LAST", last),
        content=None if case.body is None else body,
        headers={**headers, "accept-encoding": "identity", **case.headers},
    )
    return client.send(request, stream=True)


def ask_all(server: Server, group: str) -> dict[str, str]:
    """The answers to the cases of a group, asked one after another, in their normal form as JSON."""
    if group == "fields":
        return ask_fields(server)
    answers: dict[str, str] = {}
    last = ""
    key = {"Authorization": f"Bearer {ADMIN}"} if group == "closed" else {}
    with make_client(base_url=server.url, headers=key) as client, ExitStack() as held:
        client.post("/admin/cache/clear")
        wait_for(lambda: client.get("/debug/requests").json() == {"requests": []})
        for name, case in GROUPS[group].items():
            response = ask(client, case, last)
            held.callback(response.close)
            answer, raw = read(case, response)
            answers[name] = json.dumps(answer, ensure_ascii=False)
            if not case.hold:
                response.close()
            last = found[1] if (found := re.search(r'"id":\s*"([^"]{12,})"', raw)) else last
    return answers


def ask_fields(server: Server) -> dict[str, str]:
    """The status of each value of each field, and whether the answer names the field: 404 is accepted.

    The model is one that does not exist, which a server sees when all fields are right.
    """

    def ask_field(path: str, field: str) -> str:
        found: dict[str, list[Any]] = {}
        for value in VALUES:
            response = client.post(path, json={**FIELDS[path][0], "model": NO_MODEL, field: value})
            named = response.status_code != 404 and re.search(rf"\b{field}\b", response.text)
            found.setdefault(f"{response.status_code}{', named' if named else ''}", []).append(value)
        return json.dumps(found)

    asked = [(path, field) for path, (_, fields) in FIELDS.items() for field in fields.split()]
    with make_client(base_url=server.url) as client, ThreadPoolExecutor(4) as threads:
        answers = threads.map(ask_field, *zip(*asked, strict=True))
        return {f"{path} {field}": answer for (path, field), answer in zip(asked, answers, strict=True)}


def read(case: Case, response: httpx.Response) -> tuple[Answer, str]:
    """An answer in its normal form, and its body as it came."""
    told = {name: value for name, value in sorted(response.headers.items()) if name not in _UNTOLD}
    answer: Answer = {"status": response.status_code, "headers": plain(told)}
    kind = response.headers.get("content-type", "").partition(";")[0]
    if case.hold:
        lines = response.extensions["lines"] = response.iter_lines()  # kept: their end closes the response
        raw = next(filter(re.compile(case.hold).match, lines))
    elif kind in _STREAMS:
        events = list(parse(response.iter_lines()) if kind == _STREAMS[0] else _lines(response))
        raw = json.dumps(events)
        answer["events"] = normal(events)
    else:
        raw = response.read().decode(errors="replace")
        if case.shows is not None:
            answer["shown"] = case.shows(raw)
        elif kind == "application/json" and raw:
            answer["body"] = plain(json.loads(raw), loose=case.loose)
        elif kind == "text/plain":
            answer["text"] = plain(raw)
    return answer, raw


def _lines(response: httpx.Response) -> Iterator[Event]:
    return ({"data": json.loads(line)} for line in response.iter_lines())


def recorded(group: str) -> dict[str, str]:
    """The recorded answers of a group, by case."""
    written = (RECORDINGS / f"{group}.jsonl").read_text().splitlines()
    return {name: json.dumps(answer, ensure_ascii=False) for name, answer in map(json.loads, written)}


def compare(group: str, old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    """The lines of a diff of all answers that differ."""
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            before, after = (
                json.dumps(json.loads(each.get(name, "null")), indent=1, ensure_ascii=False).splitlines()
                for each in (old, new)
            )
            yield from difflib.unified_diff(before, after, f"{group}: {name}", "now", lineterm="")


def main(arguments: list[str]) -> int:
    groups = [each for each in arguments if each != "--diff"] or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        print(f"no such group: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    differs = False
    RECORDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = stack.enter_context(scripted_server(Path(folder) / "log.open"))
        for group in groups:
            asked = stack.enter_context(closed_server(Path(folder))) if group == "closed" else server
            answers = ask_all(asked, group)
            if "--diff" in arguments:
                for line in compare(group, recorded(group), answers):
                    differs = True
                    print(line)
                continue
            text = "".join(f"[{json.dumps(name)}, {answer}]\n" for name, answer in answers.items())
            (RECORDINGS / f"{group}.jsonl").write_text(text)
            print(f"{group}: {len(answers)} answers")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Pictures: the text alone, under every load and kill; hostile files; each picture encoded once.

crowd: chats with and without pictures on tiny F32 models that decode media rows causally, not causally and in
a grid. All are first asked alone, with the cache off. Then many at once, in too few cells, with RAM and disk
behind them, while engine and media worker are killed in turn; and once more after a restart, from disk.
mutants: mutated picture files beside streams; each answer is 200 or 400, neither server nor engine dies.
once: a picture asked ten times by a conversation and by ten at once, for two tenants.

Where the tokens part, the two likeliest of that step must be as good as even when computed alone. The crowd
fails where nothing was preempted or killed, or RAM or disk was not used: then it proves nothing.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.command import conclude, run_command
from bench.report import Table
from bench.wire import Address
from bench.workloads.text import prose
from cllm.errors import ConfigError
from proof.adapters import EXACT, FAILURES, SETTLE_S, Killer, Pass, find_faults, make_table
from proof.command import make_parser
from proof.shared.answers import TIE, Answer, Client, compare
from tests.driver.media import make_file, make_url
from tests.driver.server import Server, make_client
from tests.tiny_media import MAKERS, MediaModel

CHAT = "/v1/chat/completions"
OUTPUT_TOKENS = 24
PICTURES = 12  # different ones
SIZES = ((32, 32), (48, 32), (64, 96))
SYSTEMS, SYSTEM_WORDS, MESSAGE_WORDS = 6, (10, 40), (4, 16)
CELLS = 1024  # of one request, and of all together where they are crowded
KINDS = ("PNG", "JPEG", "WEBP", "GIF")
# The free cells of a unified KV need not lie together: then a state waits.
EXPECTED = f"{FAILURES}|media worker|available cells in kv cache|failed to restore kv cache"
Message = dict[str, Any]


def make_question(text: str, *files: bytes) -> Message:
    shown = [{"type": "image_url", "image_url": {"url": make_url(data)}} for data in files]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


def make_chats(count: int) -> list[list[Message]]:
    """Chats that begin alike: with no, one or two pictures, some of a second turn."""
    files = [make_file(number, "PNG", *SIZES[number % len(SIZES)]) for number in range(PICTURES)]
    chats = []
    for number in range(count):
        draw = random.Random(f"chat {number}")
        system = random.Random(f"system {draw.randrange(SYSTEMS)}")
        said = prose(f"system {system.random()}", system.randint(*SYSTEM_WORDS))
        text = prose(f"message {draw.randrange(count)}", draw.randint(*MESSAGE_WORDS))
        chat: list[Message] = [{"role": "system", "content": said}]
        chat.append(make_question(text, *draw.sample(files, draw.choice((0, 1, 1, 2)))))
        if draw.random() < 0.4:
            chat.append({"role": "assistant", "content": prose(f"answer {number}", 8)})
            chat.append(make_question("And this one?", draw.choice(files)))
        chats.append(chat)
    return chats


def ask_all(
    server: Server,
    chats: Sequence[list[Message]],
    alone: Sequence[Answer],
    name: str,
    at_once: int,
    kills: bool,
) -> Pass:
    client = Client(Address("127.0.0.1", server.port))
    killer = Killer(server, len(chats) if kills else 0, ("engine", "media"))

    def ask(chat: list[Message]) -> Answer:
        answer = client.chat(chat, OUTPUT_TOKENS)
        killer.count()
        return answer

    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(ask, chats))
    preemptions = int(server.metrics()["cllm_preemptions_total"])
    return Pass(name, answers, compare(alone, answers, TIE), killer.kills, preemptions)


def crowd(files: MediaModel, folder: Path, count: int, at_once: int) -> tuple[list[Answer], list[Pass]]:
    """Ask alone, crowded and after a restart."""
    chats = make_chats(count)
    tight = ("--unified-kv", "--ctx-size", str(CELLS), "--max-request-tokens", str(CELLS))
    disk = ("--cache-disk-mb", "256", "--cache-dir", str(folder / "cache"), "--cache-ram-mb", "64")
    common = (str(files.model), "--mmproj", str(files.mmproj), *EXACT, "--parallel", str(at_once))
    with Server(folder / "alone.log", *common, "--ctx-size", str(CELLS * at_once)) as server:
        client = Client(Address("127.0.0.1", server.port))
        alone = [client.chat(chat, OUTPUT_TOKENS, cache_prompt=False, speculate=False) for chat in chats]
    with Server(folder / "crowded.log", *common, *tight, *disk) as server:
        server.expect_failure(EXPECTED)
        passes = [ask_all(server, chats, alone, f"{at_once} at once, with kills", at_once, True)]
        passes.append(ask_all(server, chats, alone, f"{at_once} at once", at_once, False))
        time.sleep(SETTLE_S)
    with Server(folder / "restarted.log", *common, *tight, *disk) as server:
        passes.append(ask_all(server, chats, alone, "after a restart", at_once, False))
    return alone, passes


def try_crowd(count: int, mutants: int, at_once: int) -> tuple[list[Table], list[str]]:
    tables, faults = [], []
    for kind, make in MAKERS.items():
        with tempfile.TemporaryDirectory() as name:
            alone, passes = crowd(make(Path(name)), Path(name), count, at_once)
        tables.append(make_table(f"{count} chats, {kind}", count, passes))
        faults += [f"{fault} ({kind})" for fault in find_faults(alone, passes)]
    return tables, faults


def mutate(data: bytes, draw: random.Random) -> bytes:
    """A file with bytes changed, cut out, doubled or put in; or another one's end."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 40))):
        at = draw.randrange(max(1, len(changed)))
        length = draw.choice((1, 1, 2, 4, 64))
        kind = draw.randrange(5)
        if kind == 0:
            changed[at : at + length] = draw.randbytes(length)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = changed[at : at + length] * draw.choice((1, 2, 100))
        elif kind == 3:
            changed[at : at + 4] = draw.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"))
        else:
            del changed[at + length :]
    return bytes(changed)


def try_mutants(count: int, mutants: int, at_once: int) -> tuple[list[Table], list[str]]:
    """Send mutated files: the server and its engine are the same afterwards."""
    seeds = [make_file(number, KINDS[number % 4], *SIZES[number % 3]) for number in range(24)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = MAKERS["causal"](folder)
        flags = (str(files.model), "--mmproj", str(files.mmproj), "--parallel", "4", "--ctx-size", "4096")
        with Server(folder / "log", *flags) as server:
            server.expect_failure(EXPECTED)
            engine = server.child("engine")
            with make_client(base_url=server.url) as client, ThreadPoolExecutor(at_once) as pool:

                def send(number: int) -> int:
                    draw = random.Random(f"mutant {number}")
                    question = make_question("What?", mutate(draw.choice(seeds), draw))
                    body = {"messages": [question], "max_tokens": 1, "temperature": 0}
                    return int(client.post(CHAT, json=body).status_code)

                answers = Counter(pool.map(send, range(mutants)))
            same = server.child("engine") == engine
            died = server.log_text.count("media worker died") + server.log_text.count("ended by signal")
    faults = [] if set(answers) <= {200, 400} else [f"FAIL: answers were {dict(answers)}"]
    faults += [] if same else ["FAIL: the engine died"]
    rows = [(f"answers {code}", str(times)) for code, times in sorted(answers.items())]
    rows.append(("deaths of the media worker", str(died)))
    return [Table((f"{mutants} mutated files", ""), rows)], faults


def try_once(count: int, mutants: int, at_once: int) -> tuple[list[Table], list[str]]:
    """Ask about one picture again and again: how often it is encoded, and what second turns compute."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = MAKERS["causal"](folder)
        flags = ("--mmproj", str(files.mmproj), "--parallel", "10", "--ctx-size", "20480", *EXACT)
        with Server(folder / "log", str(files.model), *flags) as server:
            client = Client(Address("127.0.0.1", server.port))

            def encoded() -> int:
                return int(server.metrics().get("cllm_pictures_total{source=encoded}", 0))

            chat = [make_question("What is this?", make_file(1))]
            answers = []
            for _ in range(10):
                answers.append(answer := client.chat(chat, OUTPUT_TOKENS))
                chat += [{"role": "assistant", "content": answer.text}, make_question("And?")]
            conversation = encoded()
            with ThreadPoolExecutor(10) as pool:
                question = [make_question("Ten at once?", make_file(2))]
                list(pool.map(lambda _: client.chat(question, OUTPUT_TOKENS), range(10)))
            crowd = encoded() - conversation
    faults = [] if (conversation, crowd) == (1, 1) else ["FAIL: a picture was encoded more than once"]
    again = [before.prompt_tokens - 1 - after.cached_tokens for before, after in pairwise(answers)]
    if max(again) > 0:
        faults.append("FAIL: a turn computed the prompt of the one before again")
    rows = [
        ("encoded for ten turns of a conversation", str(conversation)),
        ("encoded for ten requests at once", str(crowd)),
        ("prompt tokens of an earlier turn that a turn computed again", str(max(0, *again))),
    ]
    return [Table(("one picture, ten times", ""), rows)], faults


PARTS = {"crowd": try_crowd, "mutants": try_mutants, "once": try_once}


def run_pictures(
    count: int = 500, mutants: int = 10_000, at_once: int = 16, part: str = "", out: Path | None = None
) -> int:
    """Run the parts; print their tables; 0 if the rules hold."""
    if part and part not in PARTS:
        raise ConfigError(f"there is no part {part!r}: choose one of {', '.join(PARTS)}")
    texts, faults, data = [], [], {}
    for name, check in PARTS.items():
        if part in ("", name):
            data[name], found = check(count, mutants, at_once)
            texts += [table.markdown() for table in data[name]]
            faults += found
    return conclude("pictures", "\n\n".join((*texts, *(faults or ["pass"]))), data, out, failed=bool(faults))


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        "--out",
        count=(500, "chats of each kind of model"),
        mutants=(10_000, "mutated files"),
        at_once=(16, "how many at once, and slots"),
        part=("", f"{', '.join(PARTS)}: only this"),
    )
    return run_command(parser, arguments, run_pictures)

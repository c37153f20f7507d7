"""From rounds to bars, tables, a page and pictures; peers as they are spelled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client import BadAnswer, StepTime
from bench.comparison import Comparison, ReferenceRound, Round
from bench.figures import Completion, LoadResult
from bench.peers import ServerSettings, parse_peer
from bench.plots import draw
from bench.report import Spread, Table, write_json
from bench.run import Options, busy_neighbour
from bench.summary import make_report, record
from bench.workloads import BarLine, Definition, Group, built_in, find
from cllm.errors import SetupError

GROUPS = (Group(),)
SPLIT, UNIFIED = "llama-server split", "llama-server unified"


def one(
    workload: str, peer: str, number: int, wall_s: float, condition: str = "", error: str | None = None
) -> Round:
    """A round of three requests with 90 tokens in all."""
    completions = tuple(
        Completion(
            index,
            0.0,
            total_s=wall_s,
            chunks_s=tuple(wall_s * (chunk + 1) / 25 for chunk in range(25)),
            generated_tokens=30,
            error=error,
        )
        for index in range(3)
    )
    load = LoadResult(workload, wall_s, 0.01, completions)
    return Round(peer, peer.split()[0], condition, number, load, None, 1.0, 0.0)


def comparison(bars: tuple[BarLine, ...], rounds: list[Round], name: str = "w", **more: object) -> Comparison:
    definition = Definition(name=name, about="x", groups=GROUPS, bars=bars)
    return Comparison((definition,), tuple(rounds), **more)  # type: ignore[arg-type]


FASTER = BarLine(figure="tokens_per_second", at_least=1.1)


def test_a_bar_counts_the_better_layout_and_pairs_rounds() -> None:
    rounds = [one("w", "cllm", number, 1.0 * number) for number in (1, 2, 3)]
    rounds += [one("w", SPLIT, number, 1.2 * number) for number in (1, 2, 3)]
    rounds += [one("w", UNIFIED, number, 1.5 * number) for number in (1, 2, 3)]
    bar = comparison((FASTER,), rounds).bars()[-1]
    assert SPLIT in bar.what and bar.kept and bar.measured == "1.200 (1.200–1.200) ×"
    assert bar.verdict == "met, 9% to spare"
    shorter = BarLine(figure="wall_s", at_most=0.5)
    bar = comparison((shorter,), rounds).bars()[-1]
    assert SPLIT in bar.what and bar.kept is False and bar.verdict == "MISSED by 67%"


def test_the_parts_of_a_step_are_shown_by_workload() -> None:
    rounds = [replace(one("w", "cllm", 1, 1.0), steps=StepTime(10, 2.0, 1.5, 0.1, 0.3))]
    page = make_report(comparison((), rounds))
    row = next(line for line in page.splitlines() if line.startswith("| w "))
    assert [cell.split()[0] for cell in row.split("|")[2:-1]] == ["10.00", "5.00", "15.00", "200.00"]
    assert "KV transfers, %" in page


def test_another_server_is_shown_but_no_bar() -> None:
    rounds = [one("w", "cllm", 1, 1.0), one("w", "vllm", 1, 9.0)]
    measured = comparison((FASTER,), rounds)
    assert measured.bars()[-1].kept is None and measured.passed
    assert measured.ratio("w", "tokens_per_second", "vllm").median == pytest.approx(9.0)


def test_bars_against_itself_a_limit_and_a_reference() -> None:
    bars = (
        BarLine(figure="tokens_per_second", against="quiet", at_least=0.45),
        BarLine(figure="wall_s", against="limit", at_most=1.5, condition="quiet"),
        BarLine(figure="tokens_per_second", against="llama-bench", at_least=0.95, condition="quiet"),
        BarLine(figure="decode_tokens_per_second", against="plain-build", at_least=2.0),
    )
    rounds = [one("w", "cllm", 1, 1.0, "quiet"), one("w", "cllm", 1, 2.5, "busy")]
    reference = ReferenceRound("w", "llama-bench", 1, {"tokens_per_second": 110.0})
    kept = [bar.kept for bar in comparison(bars, rounds, references=(reference,)).bars()[-4:]]
    assert kept == [False, True, False, None]


def test_an_unanswered_request_fails_even_a_quick_run_and_a_missed_bar_does_not() -> None:
    slow = [one("w", "cllm", 1, 2.0), one("w", SPLIT, 1, 1.0)]
    assert not comparison((FASTER,), slow).passed
    assert comparison((FASTER,), slow, quick=True).passed
    failed = [one("w", "cllm", 1, 2.0, error="died")]
    assert not comparison((), failed, quick=True).passed
    assert not comparison((), [one("w", "cllm", 1, 1.0)], failures=("w: no",)).passed


def test_a_busy_waiting_server_spoils_the_run_but_no_quick_one() -> None:
    """One that takes 0.2 s is too short for CPU time that is counted in steps of 10 ms."""
    busy = Round("cllm", "cllm", "", 1, one("w", "cllm", 1, 1.0).load, None, 1.0, waiting_cpu_s=0.5)
    rounds = [busy, one("w", SPLIT, 1, 1.0)]
    assert not comparison((), rounds).passed and comparison((), rounds, quick=True).passed


def all_workloads() -> Comparison:
    rounds = [
        one(name, peer, number, 1.0 + 0.1 * number, condition)
        for name, definition in built_in().items()
        for condition in definition.conditions()
        for number in (1, 2)
        for peer in ("cllm", SPLIT)
    ]
    return Comparison(tuple(built_in().values()), tuple(rounds), info={"model": "tiny"})


def test_the_whole_report_is_written(tmp_path: Path) -> None:
    measured = all_workloads()
    pictures = draw(measured, tmp_path)
    assert [picture.path for picture in pictures] == [
        f"plots/{name}.png" for name in ("latency", "first-token", "gaps", "throughput")
    ]
    for picture in pictures:
        assert (tmp_path / picture.path).read_bytes().startswith(b"\x89PNG")
    page = make_report(measured, pictures)
    for name in built_in():
        assert f"## {name}\n" in page
    assert "(plots/gaps.png)" in page and page.count("![") == 4
    assert "- model: tiny" in page and "MISSED by" in page
    write_json(tmp_path / "report.json", record(measured))
    assert str(Path(__file__).parents[2]) not in (tmp_path / "report.json").read_text()
    read = json.loads((tmp_path / "report.json").read_text())
    assert len(read["rounds"]) == len(measured.rounds)
    assert read["rounds"][0]["requests"][0]["gaps_ms"] == [44.0] * 24


def test_peers_are_spelled_in_these_ways(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.touch()
    settings = ServerSettings(model=tmp_path / "m.gguf", ctx_size=1024, threads=3)
    both = parse_peer(f"llama-server={server}", settings, both_layouts=True)
    assert [peer.name for peer in both] == [SPLIT, UNIFIED]
    assert "--no-kv-unified" in both[0].command and "--kv-unified" in both[1].command
    (alone,) = parse_peer(str(server), settings, both_layouts=False)
    assert alone == both[0] or alone.command == both[0].command
    assert alone.command[alone.command.index("--threads") + 1] == "3"
    (other,) = parse_peer("cllm=--draft-tokens 0", settings, both_layouts=True)
    assert other.name == "cllm --draft-tokens 0" and other.command[-2:] == ("--draft-tokens", "0")
    (tuned,) = parse_peer(f"llama-server={server} -ub 256 --no-repack", settings, both_layouts=False)
    assert tuned.name == f"{SPLIT} -ub 256 --no-repack" and tuned.family == alone.family
    assert tuned.command == (*alone.command, "-ub", "256", "--no-repack")
    for bad in ("vllm=/usr/bin/vllm", "https://host:1", "x=http://host:1/api", str(tmp_path / "none")):
        with pytest.raises(SetupError):
            parse_peer(bad, settings, both_layouts=False)


def test_flags_of_cllm_follow_those_of_the_workload() -> None:
    options = Options(cllm_flags=("--draft-tokens=0",))
    (server,) = options.servers(find(["agent"])[0])
    assert server.command[-3:] == ("--cache-ram-mb", "16", "--draft-tokens=0")


def test_the_prompt_cache_of_llama_server_is_off_where_no_prompt_comes_again(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.touch()
    for cached in (False, True):
        settings = ServerSettings(model=tmp_path / "m.gguf", prompt_cache=cached)
        (peer,) = parse_peer(str(server), settings, both_layouts=False)
        assert ("--cache-ram" in peer.command) is not cached


def test_the_neighbour_is_there_and_then_gone() -> None:
    with busy_neighbour() as pid:
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    with busy_neighbour(False) as pid:
        assert pid == 0


def test_medians_carry_their_spread() -> None:
    assert Spread.of([1, 9, 2]).show(0) == "2 (1–9)"
    assert Table(("a", "b"), [("1", "x|y")]).markdown().count("\n") == 2


METRICS = """# TYPE cllm_steps_total counter
cllm_steps_total{kind="generate"} 6.0
cllm_steps_total{kind="embed"} 4.0
cllm_steps_interrupted_total 1.0
cllm_step_seconds_total 2.0
cllm_step_compute_seconds_total 1.5
cllm_step_sample_seconds_total 0.1
"""
TRANSFERS = "cllm_kv_transfer_seconds_total 0.3\n"


def test_kv_transfers_are_no_part_of_pythons_share() -> None:
    before, now = StepTime(2, 1.0, 0.9, 0.05), StepTime.read(METRICS + TRANSFERS)
    assert now == StepTime(10, 2.0, 1.5, 0.1, 0.3)
    passed = now.since(before)
    assert (passed.steps, passed.total_s) == (8, 1.0)
    assert passed.sample_share == pytest.approx(0.05)
    assert passed.transfer_share == pytest.approx(0.3) and passed.python_share == pytest.approx(0.1)


def test_a_server_without_a_counter_of_transfers_is_read_too() -> None:
    read = StepTime.read(METRICS)
    assert read.transfer_s == 0 and read.python_share == pytest.approx(0.25)
    with pytest.raises(BadAnswer, match="cllm_step_sample_seconds_total"):
        StepTime.read(METRICS.replace("sample", "other"))

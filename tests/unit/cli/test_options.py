"""Options made from the configuration: help, variables, the TOML file, and what is refused."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cllm.cli import main, serve
from cllm.cli.options import SETTINGS
from cllm.config import Config, EngineConfig, ServerConfig
from cllm.errors import InvalidRequest, SetupError
from cllm.fields import parse_fields
from cllm.server.keys import KeyEntry, add_key
from cllm.types import SamplingParams

MAX_HELP_LINES = 110
KEYS = "keys.toml"


def help_text(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(main.app, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.output


def flags(*structs: type[EngineConfig | ServerConfig]) -> set[str]:
    names = {name for struct in structs for name in struct.__struct_fields__} - {"model"}
    return {f"--{name.replace('_', '-')}" for name in names}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that `cllm serve` would have served."""
    found: list[Config] = []
    monkeypatch.setattr(serve, "run", lambda config, more: found.append(config))
    return found


def test_help_is_grouped_and_fits_the_terminal() -> None:
    text = help_text("serve", "--help")
    lines = text.splitlines()
    assert len(lines) <= MAX_HELP_LINES and max(map(len, lines)) <= 80
    for group in ("Model", "Context", "Cache", "Speculation", "Server", "Security"):
        assert f"─ {group} ─" in text
    assert "--cache-ram-mb" in text and "--poll" not in text and "--help-all" in text
    for default in ("[127.0.0.1]", "[18081]", "[1024]", "[512]", "[30.0]", "[info]", "CLLM_PORT"):
        assert default in text


@pytest.mark.parametrize("columns", [80, 120])
def test_help_all_shows_every_flag_whole(columns: int) -> None:
    words = set(help_text("serve", "--help-all", columns=columns).split())
    assert flags(EngineConfig, ServerConfig) <= words
    assert SETTINGS.keys() == {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    assert {"--no-flash-attention", "--no-share-prefixes-across-tenants"} <= words


COMMANDS = {*main.COMMANDS, *(f"cluster {each}" for each in ("head", "join", "deploy", "status", "down"))}
HELPS = [*(f"{each} --help" for each in COMMANDS), "serve --help-all", "cluster deploy --help-all"]


@pytest.mark.parametrize("command", sorted(HELPS))
def test_help_of_every_command_fits_80_columns(command: str) -> None:
    text = help_text(*command.split())
    assert max(map(len, text.splitlines())) <= 80
    assert not [word for word in text.split() if word.startswith("--") and word.endswith("…")], (
        "no flag is cut"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel", "256"], "configuration: parallel is 256: expected a whole number of at most 255"),
        (
            ["--threads", "x"],
            "Invalid value for '--threads' (env var: 'CLLM_THREADS'): expected a whole number ",
        ),
        (["--drain-s", "1h"], "CLLM_DRAIN_S'): expected a number "),
        (["--wibble"], "--wibble"),
        (
            ["--log-level", "loud"],
            "log_level is 'loud': expected one of debug, info, warning, error",
        ),
        (["--parallel", "-1"], "configuration: parallel is -1: expected a whole number of at least 0"),
        (["--cache-type-k", "nope"], "configuration: cache_type_k is 'nope': expected one of f32, f16,"),
        (["--max-timeout-s", "nan"], "configuration: max_timeout_s is nan: expected a finite number"),
        (["--max-timeout-s", "inf"], "configuration: max_timeout_s is inf: expected a finite number"),
        (["--target-itl-ms", "nan"], "--target-itl-ms"),
        (
            ["--gpu-layers", "some"],
            "gpu_layers is 'some': expected a whole number of at least -1, all",
        ),
        (["--gpu-layers", "-2"], "gpu_layers is -2: expected a whole number of at least -1"),
        (
            ["--tensor-split", "3:1"],
            "tensor_split is '3:1': expected a number for each GPU, as 3,1",
        ),
        (["--rope-scaling", "ntk"], "rope_scaling is 'ntk': expected one of none, linear, yarn"),
        (["--rope-scale", "-2"], "rope_scale is -2.0: expected a number of at least 0"),
        (["--yarn-ext-factor", "2"], "yarn_ext_factor is 2.0: expected a number of at most 1"),
        (["--load-mode", "lazy"], "load_mode is 'lazy': expected one of auto, none, mmap, mlock, mmap+mlock"),
        (["--override-kv", "a=int:x"], "override_kv is ['a=int:x']: expected KEY=TYPE:VALUE with a type of"),
        (
            ["--cache-disk-mb", "-1"],
            "cache_disk_mb is -1: expected a whole number of at least 0",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    settings: list[Config], arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(main.app, ["serve", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2 and message in result.output and not settings
    assert "Traceback" not in result.output


WORDS = re.compile(r"`(int|float|str|bool|array|object|null)\b|regex|\b(got|null)\b|[<>]=")


@pytest.mark.parametrize("struct", [EngineConfig, ServerConfig, KeyEntry, SamplingParams])
def test_no_setting_is_refused_in_a_programs_words(struct: type[msgspec.Struct]) -> None:
    refused = 0
    values: list[Any] = [-(10**12), 10**12, "\0", 0.5, [], {"a": 1}, None, True]
    for field, value in product(msgspec.structs.fields(struct), values):
        try:
            parse_fields({"hash": f"sha256:{'0' * 64}", field.name: value}, struct)
        except InvalidRequest as error:
            refused += 1
            assert not WORDS.search(error.message), error.message
    assert refused > 10


@pytest.mark.parametrize(("typed", "meant"), [("srve", "'serve'"), ("ls", "'list'"), ("keys lst", "'list'")])
def test_an_unknown_command_comes_with_the_one_that_was_meant(typed: str, meant: str) -> None:
    result = CliRunner().invoke(main.app, typed.split(), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2 and "Did you mean" in result.output and meant in result.output


def test_command_line_wins_over_variable_and_file(settings: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "cllm.toml"
    file.write_text("[engine]\npoll = 70\nbatch-tokens = 333\nslots = 9\n")
    arguments = ["serve", "--config", str(file), "--slots", "7"]
    CliRunner().invoke(main.app, arguments, env={"CLLM_BATCH_TOKENS": "444", "CLLM_SLOTS": "8"})
    engine = settings[0].engine
    assert (engine.poll, engine.batch_tokens, engine.slots) == (70, 444, 7)


def test_layers_are_a_number_or_a_word(settings: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "cllm.toml"
    file.write_text("gpu_layers = 7\n")
    for arguments in ([], ["--gpu-layers", "12"], ["--gpu-layers", "-1"], ["--gpu-layers", "all"]):
        CliRunner().invoke(main.app, ["serve", *arguments])
    CliRunner().invoke(main.app, ["serve", "--config", str(file)])
    CliRunner().invoke(main.app, ["serve"], env={"CLLM_GPU_LAYERS": "3"})
    assert [config.engine.gpu_layers for config in settings] == ["auto", 12, -1, "all", 7, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("target_itl_ms = inf", "target_itl_ms is inf: expected a finite number"),
        ("max_timeout_s = nan", "max_timeout_s is nan: expected a finite number"),
        ("drain_s = inf", "drain_s is inf: expected a finite number"),
        ("parallel = ", "Invalid value"),
        ("parallel = 1000", "configuration: parallel is 1000: expected a whole number of at most 255"),
        ("paralel = 2", "unknown setting 'paralel' (did you mean 'parallel'?)"),
    ],
)
def test_a_wrong_line_of_the_file_is_named(
    settings: list[Config], tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "cllm.toml"
    file.write_text(line + "\n")
    result = CliRunner().invoke(main.app, ["serve", "--config", str(file)], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and not settings
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ([], 4096),
        (["--cache-disk-mb", "0"], 0),
        (["--cache-disk-mb", "7"], 7),
        (["--api-key", "secret"], 0),
        (["--api-keys", KEYS], 0),
        (["--api-key", "secret", "--cache-disk-mb", "7"], 7),
    ],
)
def test_with_keys_prompts_go_to_disk_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], size: int
) -> None:
    sizes: list[int | None] = []
    monkeypatch.chdir(tmp_path)
    add_key(Path(KEYS), "alice", admin=False)

    def prepare(*, asked: EngineConfig, **_: object) -> None:
        sizes.append(asked.cache_disk_mb)
        raise SetupError("that is enough")

    monkeypatch.setattr(serve, "PrepareTask", prepare)
    CliRunner().invoke(main.app, ["serve", "--port", "0", *arguments], env={"CLLM_CACHE_DISK_MB": None})
    assert sizes == [size]
    assert EngineConfig().cache_disk_mb is None, "off in the Python API"

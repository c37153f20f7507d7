"""llama-server's arguments: what each becomes, what is skipped, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cllm.cli import main, serve
from cllm.cli.llama_server import FLAGS, Translation
from cllm.config import DEFAULT_CACHE_DISK_MB, MIN_BATCH_TOKENS, Config
from cllm.errors import ConfigError
from cllm.server.app import read_defaults

URL = "https://huggingface.co/a/b/resolve/main/c.gguf"
ENGINE: dict[str, dict[str, Any]] = {
    "-m FILE -a one,two --offline": {"model": "FILE", "alias": "one,two", "offline": True},
    "-a one --tags small,fast": {"alias": "one", "tags": "small,fast"},
    "-b 16": {"batch_tokens": MIN_BATCH_TOKENS},
    "-ub 8": {"batch_tokens": MIN_BATCH_TOKENS},
    "-hf user/repo:Q4_K_M -t 3 --poll 7": {"model": "hf:user/repo:Q4_K_M", "threads": 3, "poll": 7},
    f"-mu {URL} -t -1 -np -1": {"model": URL, "threads": 0, "parallel": 0},
    "--model FILE -np 3": {"model": "FILE", "parallel": 3},
    "-b 64 -fa off": {"batch_tokens": 64, "flash_attention": False},
    "-b 2048 -fa --jinja": {"batch_tokens": 512, "flash_attention": True},
    "-ub 256 --no-repack --kv-unified": {"batch_tokens": 256, "extra_buffers": False, "unified_kv": True},
    "-ctk q8_0 -ctv q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "-ngl 12 -sm row -ts 3/1": {"gpu_layers": 12, "split_mode": "row", "tensor_split": "3,1"},
    "-ngl all -mg 1 -ncmoe 8": {"gpu_layers": -1, "main_gpu": 1, "n_cpu_moe": 8},
    "-ot ffn_up=CPU,ffn_down=CPU": {"override_tensor": ("ffn_up=CPU", "ffn_down=CPU")},
    "-ngl auto --cpu-moe": {"gpu_layers": "auto", "n_cpu_moe": 4096},
    "--rope-scaling yarn --rope-scale 4": {"rope_scaling": "yarn", "rope_scale": 4.0},
    "--rope-freq-scale 0.25 --rope-freq-base 5e5": {"rope_scale": 4.0, "rope_freq_base": 5e5},
    "--rope-freq-scale 0 --yarn-orig-ctx 4096": {"rope_scale": 0.0, "yarn_orig_ctx": 4096},
    "--yarn-ext-factor -1 --yarn-attn-factor 1.5": {"yarn_ext_factor": -1.0, "yarn_attn_factor": 1.5},
    "--yarn-beta-fast 16 --yarn-beta-slow 2": {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
    "-lm dio": {"load_mode": "dio"},
    "--mlock": {"load_mode": "mmap+mlock"},
    "--no-mmap": {"load_mode": "none"},
    "--mmap": {"load_mode": "auto"},
    "--mlock --no-mmap": {"load_mode": "mlock"},
    "--override-kv a=int:1,b=str:x --override-kv c=bool:true": {
        "override_kv": ("a=int:1", "b=str:x", "c=bool:true")
    },
    "--device none -cram 5": {"gpu_layers": 0, "cache_ram_mb": 5},
    "-cram -1 --spec-draft-n-max 4": {"cache_ram_mb": 1 << 20, "draft_tokens": 4},
    "--spec-type none -md DRAFT": {"draft_tokens": 0, "draft_model": "DRAFT"},
    "--pooling cls --chat-template llama3": {"pooling": "cls", "chat_template": "llama3"},
    "--pooling none --chat-template-file T": {"pooling": "none", "chat_template": "T"},
    "--rerank": {"pooling": "rank"},
    "-mm P": {"mmproj": "P"},
    "--no-mmproj": {"no_mmproj": True},
}
SERVER: dict[str, dict[str, Any]] = {
    "--host ::1,127.0.0.1 --port 99": {"host": "::1,127.0.0.1", "port": 99},
    "-to 5 --timeout 6": {"slow_reader_s": 6.0, "body_timeout_s": 6.0},
    "--cors-origins localhost --api-key a,b": {"cors_origins": "localhost", "api_key": "a,b"},
    "--ssl-key-file K --ssl-cert-file C": {"tls_key": "K", "tls_cert": "C"},
    "--metrics --props -v": {"open_routes": "/slots,/metrics,/props", "log_level": "debug"},
    "--no-slots -lv 2": {"open_routes": "-/slots", "log_level": "warning"},
    "--no-slots --slots -lv 5": {"open_routes": "/slots", "log_level": "debug"},
    "--log-disable --sleep-idle-seconds 9": {"log_level": "error", "sleep_idle_s": 9.0},
    "--sleep-idle-seconds -1": {"sleep_idle_s": 0.0},
}
REQUESTS: dict[str, Any] = {
    "-n 7": {"max_tokens": 7, "max_output_tokens": 7},
    "-n -1": {},
    "-v": {"verbose": True},
    "-lv 9": {},
    "-lv 10": {"verbose": True},
    "--seed 3": {"seed": 3},
    "--temp 0.5": {"temperature": 0.5},
    "--dynatemp-range 0.1 --dynatemp-exp 2": {"dynatemp_range": 0.1, "dynatemp_exponent": 2},
    "--top-k 5 --top-p 0.5 --min-p 0.1": {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
    "--top-nsigma 1 --typical 0.5": {"top_n_sigma": 1, "typical_p": 0.5},
    "--xtc-probability 0.5 --xtc-threshold 0.2": {"xtc_probability": 0.5, "xtc_threshold": 0.2},
    "--repeat-last-n 9 --repeat-penalty 1.1": {"penalty_last_n": 9, "repetition_penalty": 1.1},
    "--presence-penalty 1 --frequency-penalty 2": {"presence_penalty": 1, "frequency_penalty": 2},
    "--dry-multiplier 1 --dry-base 2": {"dry_multiplier": 1, "dry_base": 2},
    "--dry-allowed-length 3 --dry-penalty-last-n 4": {"dry_allowed_length": 3, "dry_penalty_last_n": 4},
    r"--dry-sequence-breaker \n --dry-sequence-breaker x": {"dry_sequence_breakers": ["\n", "x"]},
    "--dry-sequence-breaker none": {"dry_sequence_breakers": []},
    "--mirostat 2 --mirostat-lr 0.2 --mirostat-ent 4": {
        "mirostat": 2,
        "mirostat_eta": 0.2,
        "mirostat_tau": 4,
    },
    "--samplers top_k;temperature": {"samplers": ["top_k", "temperature"]},
    "--sampler-seq kt": {"samplers": "kt"},
    "--ignore-eos": {"ignore_eos": True},
    "-l 12+1.5 -l 7-inf": {"logit_bias": {"12": 1.5, "7": -100}},
    "--grammar G": {"grammar": "G"},
    '-j {"type":"object"}': {"json_schema": {"type": "object"}},
    r"-r a\nb -r c": {"stop": ["a\nb", "c"]},
    "--embd-normalize -1": {"embd_normalize": -1},
    "--no-cache-prompt": {"cache_prompt": False},
    '--chat-template-kwargs {"a":1}': {"chat_template_kwargs": {"a": 1}},
    "--reasoning-format none": {"reasoning_format": "none"},
    "--reasoning off": {"reasoning_effort": "none"},
    "--reasoning on": {"chat_template_kwargs": {"enable_thinking": True}},
    "--reasoning auto": {},
    "--reasoning-effort low": {"reasoning_effort": "low"},
    "--reasoning-budget 0": {"reasoning_effort": "none"},
    "--reasoning-budget 64": {"reasoning_budget": 64},
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that would have been served."""
    found: list[Config] = []
    monkeypatch.setattr(serve, "run", lambda config, more: found.append(config))
    return found


def run(served: list[Config], words: str, **variables: str) -> tuple[Config, str]:
    """The configuration of these arguments, and what was printed."""
    done = CliRunner().invoke(main.app, ["llama-server", *words.split()], env=variables)
    assert done.exit_code == 0, done.output
    return served.pop(), done.output


@pytest.mark.parametrize(("words", "fields"), [*ENGINE.items(), *SERVER.items()])
def test_settings(served: list[Config], words: str, fields: dict[str, Any]) -> None:
    config, said = run(served, words)
    found = msgspec.structs.asdict(config.engine) | msgspec.structs.asdict(config.server)
    assert found.items() >= fields.items() and said == ""


@pytest.mark.parametrize("words", REQUESTS)
def test_fields_of_requests(served: list[Config], words: str) -> None:
    assert read_defaults(run(served, words)[0].server.defaults) == REQUESTS[words]


def test_every_argument_that_has_a_meaning_is_tested() -> None:
    tested = {word for words in (*ENGINE, *SERVER, *REQUESTS) for word in words.split()}
    actions = {FLAGS[word].action for word in tested if word in FLAGS}
    elsewhere = {"!key_file", "!save_path", "&grammar_file", "&schema_file", "+ctx_size"}
    elsewhere |= {"!lora", "!lora_scaled", "@lora_off=on"}
    assert {flag.action for flag in FLAGS.values()} - {"", "-", "!download"} - elsewhere <= actions


@pytest.mark.parametrize(
    ("given", "template"),
    [
        ("llama3", "llama3"),
        ("no_such_name", "no_such_name"),  # `cllm serve` refuses it with the list
        ("This is no chat template", "text:This is no chat template"),
        ("{{ messages }}", "text:{{ messages }}"),
        ("/etc/hosts", "text:/etc/hosts"),  # a file has a flag of its own
    ],
)
def test_a_chat_template_is_a_name_or_text(given: str, template: str) -> None:
    found = Translation.of(["--chat-template", given], {})
    assert found.settings["chat_template"] == template


def test_its_own_defaults(served: list[Config]) -> None:
    config, _ = run(served, "")
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert config.server.defaults == ""
    assert run(served, "", CLLM_PORT="77")[0].server.port == 77


@pytest.mark.parametrize(
    ("words", "cells", "parallel", "limit", "unified"),
    [
        ("", 0, 0, 0, False),
        ("-c 8192", 8192, 4, 8192, True),  # any slot may use all of them
        ("-c 8192 -np 2", 8192, 2, 0, False),  # half each
        ("-c 8192 -np 2 --kv-unified", 8192, 2, 8192, True),
        ("-c 8192 --no-kv-unified", 8192, 4, 0, False),
        ("-c 0 -np 2", 0, 2, 0, False),
    ],
)
def test_how_slots_share_the_context(
    served: list[Config], words: str, cells: int, parallel: int, limit: int, unified: bool
) -> None:
    engine = run(served, words)[0].engine
    assert (engine.ctx_size, engine.parallel) == (cells, parallel)
    assert (engine.max_request_tokens, engine.unified_kv) == (limit, unified)


def test_variables_and_the_command_line_over_them(served: list[Config]) -> None:
    variables = {
        "LLAMA_ARG_PORT": "99",
        "LLAMA_ARG_HOST": "::1",
        "LLAMA_ARG_ENDPOINT_SLOTS": "false",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_TEMPERATURE": "0.5",
        "LLAMA_API_KEY": "secret",
    }
    config, _ = run(served, "--port 98", **variables)
    assert (config.server.port, config.server.host, config.server.api_key) == (98, "::1", "secret")
    assert config.server.open_routes == "/metrics,-/slots" or config.server.open_routes == "-/slots,/metrics"
    assert json.loads(config.server.defaults) == {"temperature": 0.5}


def test_an_empty_key_leaves_that_of_the_environment_in_force(served: list[Config]) -> None:
    config, _ = run(served, "--api-key ,", CLLM_API_KEY="secret")
    assert config.server.api_key == "secret"


def test_adapters_are_applied_unless_told_otherwise(served: list[Config]) -> None:
    config, _ = run(served, "--lora a/x.gguf,y.gguf --lora-scaled z.gguf:0.5")
    assert config.engine.adapter == ("x=a/x.gguf:1.0", "y=y.gguf:1.0", "z=z.gguf:0.5")
    assert config.engine.apply_adapters
    assert not run(served, "--lora x.gguf --lora-init-without-apply")[0].engine.apply_adapters


def test_what_has_no_counterpart_is_named_once_and_its_value_skipped(served: list[Config]) -> None:
    words = "--rpc a --port 99 --control-vector-layer-range 1 2 --swa-full --numa x"
    config, said = run(served, words)
    assert config.server.port == 99
    (line,) = said.splitlines()
    for name in ("--rpc", "--control-vector-layer-range", "--swa-full", "--numa"):
        assert name in line
    assert run(served, "--cont-batching --no-warmup")[1] == ""


def test_files_are_read(served: list[Config], tmp_path: Path) -> None:
    keys, grammar, schema = (tmp_path / name for name in ("keys", "grammar", "schema"))
    keys.write_text("# ours\none\n\ntwo\n")
    grammar.write_text('root ::= "a"')
    schema.write_text('{"type": "array"}')
    server = run(served, f"--api-key zero --api-key-file {keys} --slot-save-path {tmp_path}")[0]
    assert server.server.api_key == "zero,one,two"
    assert (server.engine.cache_dir, server.engine.cache_disk_mb) == (str(tmp_path), DEFAULT_CACHE_DISK_MB)
    given = run(served, f"--slot-save-path {tmp_path}", CLLM_CACHE_DISK_MB="7")[0]
    assert given.engine.cache_disk_mb == 7, "what is set stays in force"
    files = run(served, f"--grammar-file {grammar} -jf {schema}")[0].server.defaults
    assert json.loads(files) == {"grammar": 'root ::= "a"', "json_schema": {"type": "array"}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--wibble", "wibble"),
        ("--port", "needs a value"),
        ("--host /tmp/x.sock", "UNIX"),
        ("-dr ai/smollm2", "-hf"),
        ("--gpt-oss-20b-default", "-m"),
        ("-l x", "logit-bias|15043"),
        ("-fa maybe", "on, off"),
        ("--api-key-file /none", "/none"),
        ("--slot-save-path /none", "folder"),
        ("-j [1]", "object"),
        ("--threads x", "threads"),
        ("-b 512 -ub x", "-ub"),
        ("--rope-scaling ntk", "none, linear, yarn"),
        ("--rope-freq-scale x", "--rope-freq-scale x"),
        ("--override-kv a=list:1", "KEY=TYPE:VALUE"),
    ],
)
def test_what_is_refused(served: list[Config], words: str, said: str) -> None:
    done = CliRunner().invoke(main.app, ["llama-server", *words.split()])
    assert done.exit_code == 2 and not served
    assert any(part in done.output for part in said.split("|")), done.output
    assert "Traceback" not in done.output


def test_help_lists_every_argument() -> None:
    done = CliRunner().invoke(main.app, ["llama-server", "--help"])
    assert done.exit_code == 0
    assert set(FLAGS) <= set(done.output.split())


def test_spellings() -> None:
    assert Translation.of(["--n_predict", "3"], {}).defaults == {"max_tokens": 3}
    with pytest.raises(ConfigError, match="did you mean '--n-predict'"):
        Translation.of(["--n-predictt", "3"], {})


def test_a_wrong_default_is_refused_before_anything_is_loaded() -> None:
    for wrong, said in (('{"temperature": 99}', "temperature"), ("[1]", "JSON object")):
        with pytest.raises(ConfigError, match=said):
            read_defaults(wrong)

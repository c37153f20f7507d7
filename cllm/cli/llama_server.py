"""`cllm llama-server`: llama-server's command line and variables, turned into the options of `cllm serve`."""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from cllm import __version__
from cllm.config import DEFAULT_CACHE_DISK_MB, MIN_BATCH_TOKENS, TEMPLATE_TEXT
from cllm.errors import ConfigError
from cllm.fields import describe_unknown

PORT = "8080"
SLOTS = 4  # where neither --parallel nor memory says otherwise
UBATCH = 512  # its own default, tokens
NO_LIMIT_MB = 1 << 20
VERBOSE = 10  # the verbosity from which on answers have `__verbose`
LEVELS = ("error", "error", "warning", "info", "debug")  # by verbosity

_ON, _OFF = ("on", "true", "1", "enabled"), ("off", "false", "0", "disabled")

# Flag, other spellings, `/` and those that switch it off; a dot or the variable (LLAMA_ARG_…, or whole with
# `=`); the number of its values; its meaning:
#   =FIELD   a setting of cllm                  ?FIELD         a setting that is on or off
#   +FIELD   a setting that is not negative     @FIELD=VALUE   a setting with this value
#   :FIELD   a field of requests that lack it   "FIELD         such a field, a text even if it is a number
#   !NAME    settings, by `_SETTINGS`           &NAME          fields of requests, by `_FIELDS`
#   /ROUTE   a route that all clients may use
_FLAGS = """
-m --model                          MODEL               1 =model
-a --alias                          ALIAS               1 =alias
--tags                              TAGS                1 =tags
-t --threads                        THREADS             1 +threads
--poll                              .                   1 =poll
-c --ctx-size                       CTX_SIZE            1 +ctx_size
-np --parallel                      N_PARALLEL          1 +parallel
-kvu --kv-unified / -no-kvu --no-kv-unified KV_UNIFIED  0 ?unified_kv
-b --batch-size                     BATCH               1 +batch_size
-ub --ubatch-size                   UBATCH              1 +batch_tokens
-fa --flash-attn                    FLASH_ATTN          1 !flash
--repack / -nr --no-repack          REPACK              0 ?extra_buffers
-ctk --cache-type-k                 CACHE_TYPE_K        1 =cache_type_k
-ctv --cache-type-v                 CACHE_TYPE_V        1 =cache_type_v
-dev --device                       DEVICE              1 !device
-ngl --gpu-layers --n-gpu-layers    N_GPU_LAYERS        1 !layers
-sm --split-mode                    SPLIT_MODE          1 !split_mode
-ts --tensor-split                  TENSOR_SPLIT        1 !tensor_split
-mg --main-gpu                      MAIN_GPU            1 =main_gpu
-ncmoe --n-cpu-moe                  N_CPU_MOE           1 =n_cpu_moe
-cmoe --cpu-moe                     CPU_MOE             0 @n_cpu_moe=4096
-cram --cache-ram                   CACHE_RAM           1 !cache_ram
--spec-draft-n-max --draft --draft-n --draft-max SPEC_DRAFT_N_MAX 1 =draft_tokens
-md --model-draft --spec-draft-model SPEC_DRAFT_MODEL   1 =draft_model
--spec-type                         SPEC_TYPE           1 !drafts
--lora                              .                   1 !lora
--lora-scaled                       .                   1 !lora_scaled
--lora-init-without-apply           .                   0 @lora_off=on
-mm --mmproj                        MMPROJ              1 =mmproj
--no-mmproj --no-mmproj-auto        .                   0 ?no_mmproj
--pooling                           POOLING             1 =pooling
--rerank --reranking                RERANKING           0 @pooling=rank
--chat-template                     CHAT_TEMPLATE       1 !template
--chat-template-file                CHAT_TEMPLATE_FILE  1 =chat_template
--host                              HOST                1 !host
--port                              PORT                1 =port
-to --timeout                       TIMEOUT             1 !timeout
--cors-origins                      CORS_ORIGINS        1 =cors_origins
--api-key                           =LLAMA_API_KEY      1 !key
--api-key-file                      API_KEY_FILE        1 !key_file
--ssl-key-file                      SSL_KEY_FILE        1 =tls_key
--ssl-cert-file                     SSL_CERT_FILE       1 =tls_cert
--slot-save-path                    .                   1 !save_path
--metrics                           ENDPOINT_METRICS    0 /metrics
--props                             ENDPOINT_PROPS      0 /props
--slots / --no-slots                ENDPOINT_SLOTS      0 ?slots
-v --verbose --log-verbose          .                   0 !verbose
-lv --verbosity --log-verbosity     LOG_VERBOSITY       1 !verbosity
--log-disable                       .                   0 @log_level=error
-n --predict --n-predict            N_PREDICT           1 :max_tokens
-s --seed                           .                   1 :seed
--temp --temperature                TEMPERATURE         1 :temperature
--dynatemp-exp                      .                   1 :dynatemp_exponent
--top-nsigma --top-n-sigma          .                   1 :top_n_sigma
--typical --typical-p               .                   1 :typical_p
--repeat-last-n                     .                   1 :penalty_last_n
--repeat-penalty                    REPEAT_PENALTY      1 :repetition_penalty
--dry-sequence-breaker              .                   1 &breaker
--mirostat-lr                       .                   1 :mirostat_eta
--mirostat-ent                      .                   1 :mirostat_tau
--samplers                          .                   1 &samplers
--sampler-seq --sampling-seq        .                   1 "samplers
--ignore-eos                        .                   0 :ignore_eos
-l --logit-bias                     .                   1 &bias
--grammar                           .                   1 "grammar
--grammar-file                      .                   1 &grammar_file
-j --json-schema                    .                   1 &schema
-jf --json-schema-file              .                   1 &schema_file
-r --reverse-prompt                 .                   1 &stop
--cache-prompt / --no-cache-prompt  CACHE_PROMPT        0 :cache_prompt
--chat-template-kwargs              CHAT_TEMPLATE_KWARGS 1 &template_options
--reasoning-format                  THINK               1 :reasoning_format
-rea --reasoning                    REASONING           1 &reasoning
--reasoning-effort                  REASONING_EFFORT    1 &effort
--reasoning-budget                  THINK_BUDGET        1 &budget
--sleep-idle-seconds                .                   1 +sleep_idle_s
-mu --model-url                     MODEL_URL           1 =model
-hf -hfr --hf-repo                  HF_REPO             1 !repo
--offline                           OFFLINE             0 ?offline
-dr --docker-repo                   DOCKER_REPO         1 !download
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default \
--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default \
--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default . 0 !download
""".replace("\\\n", "")

# Fields of requests with the names of their flags, and of their variables.
_SAME_FIELDS = """
--dynatemp-range --xtc-probability --xtc-threshold --dry-multiplier --dry-base --dry-allowed-length
--dry-penalty-last-n --mirostat --embd-normalize
"""
_SAME_VARIABLES = "--top-k --top-p --min-p --presence-penalty --frequency-penalty"

# cllm does this anyway, or it changes nothing here.
_ALWAYS_SWITCHES = """
--perf --no-perf -e --escape --no-escape -kvo --kv-offload --op-offload --no-log-jsonl --log-prefix
--no-log-prefix --log-timestamps --no-log-timestamps --cache-idle-slots --no-context-shift --warmup
--no-warmup -cb --cont-batching --mmproj-auto --no-cors-credentials
--no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent --ui --webui --no-ui --no-webui --embedding
--embeddings --models-autoload --no-models-autoload --jinja --reasoning-preserve --no-skip-chat-parsing
--prefill-assistant --spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-default
"""
_ALWAYS_VALUES = """
--keep -dt --defrag-thold -fit --fit -fitt --fit-target -fitc --fit-ctx --log-colors --threads-http
"""

# Without a counterpart: they are named in a warning.
_MISSING_SWITCHES = """
-cl --cache-list --completion-bash --list-devices --swa-full -nkvo --no-kv-offload --no-host --check-tensors
--no-op-offload --log-jsonl -bs --backend-sampling --no-cache-idle-slots --context-shift -sp --special
--spm-infill -nocb --no-cont-batching --mmproj-offload --no-mmproj-offload --reuse-port --cors-credentials
--ui-mcp-proxy --webui-mcp-proxy -ag --agent --no-jinja --no-reasoning-preserve --skip-chat-parsing
--no-prefill-assistant --spec-draft-cpu-moe -cmoed --cpu-moe-draft --mlock --mmap
--no-mmap
"""
_MISSING_VALUES = """
-tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio -Cb --cpu-mask-batch -Crb
--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch --rope-scaling --rope-scale --rope-freq-base
--rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --rpc
-lm --load-mode -lzm --lazy-mode --numa -ot --override-tensor -ncffn --n-cpu-ffn --override-kv
--control-vector -hft --hf-token --control-vector-scaled -hff --hf-file --log-file
--spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft
--adaptive-target --adaptive-decay -lcs --lookup-cache-static -lcd --lookup-cache-dynamic
--kv-unified-per-slot -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -mmu
--mmproj-url -mmdev --mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
--video-timestamp-interval --video-ffmpeg-dir --path --cors-methods --cors-headers --api-prefix
--ui-config --webui-config --ui-config-file --webui-config-file --tools --tools-runtime --mcp-servers-config
--mcp-servers-json --sse-ping-interval --cache-reuse --media-path --models-dir --models-preset --models-max
--reasoning-budget-message -sps --slot-prompt-similarity --log-prompts-dir --spec-draft-hf -hfd -hfrd
--hf-repo-draft --spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft
--spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft
--spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft
--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft
--spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft
--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed
--n-cpu-moe-draft --spec-draft-n-min --spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split
--spec-draft-p-min --draft-p-min --spec-draft-device -devd --device-draft --spec-draft-ngl -ngld
--gpu-layers-draft --n-gpu-layers-draft --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n
--spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m
--spec-ngram-map-k4v-min-hits --draft-min --draft-n-min --spec-ngram-size-n --spec-ngram-size-m
--spec-ngram-min-hits
"""


class Flag(NamedTuple):
    """One spelling of an argument."""

    values: int
    action: str = ""  # see above; "" changes nothing, "-" has no counterpart
    on: bool = True  # False for the spelling that switches it off
    variable: str = ""


def _read_flags() -> dict[str, Flag]:
    flags = {name: Flag(0) for name in _ALWAYS_SWITCHES.split()}
    flags |= {name: Flag(1) for name in _ALWAYS_VALUES.split()}
    flags |= {name: Flag(0, "-") for name in _MISSING_SWITCHES.split()}
    flags |= {name: Flag(1, "-") for name in _MISSING_VALUES.split()}
    flags["--control-vector-layer-range"] = Flag(2, "-")
    for line in _FLAGS.strip().splitlines():
        *names, variable, values, action = line.split()
        variable = "" if variable == "." else variable
        variable = variable[1:] if variable.startswith("=") else variable and f"LLAMA_ARG_{variable}"
        on = True
        for name in names:
            if name == "/":
                on = False
            else:
                flags[name] = Flag(int(values), action, on, variable)
    for name in (_SAME_FIELDS + _SAME_VARIABLES).split():
        field = name[2:].replace("-", "_")
        variable = f"LLAMA_ARG_{field.upper()}" if name in _SAME_VARIABLES.split() else ""
        flags[name] = Flag(1, f":{field}", variable=variable)
    return flags


FLAGS = _read_flags()


class Translation:
    """Settings of cllm and fields of requests that an argument list of llama-server stands for."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}  # of request bodies
        self.missing: list[str] = []  # flags without a counterpart
        self._open_routes: list[str] = []

    @classmethod
    def of(cls, arguments: Sequence[str], variables: Mapping[str, str]) -> Translation:
        """Read variables, then arguments, which win. Raises ConfigError."""
        found = cls()
        for name, flag in {flag.variable: (name, flag) for name, flag in FLAGS.items()}.values():
            if flag.variable and (value := variables.get(flag.variable)):
                off = not flag.values and value.lower() in _OFF
                found.take(name, flag, value if flag.values else "off" if off else "on")
        words = list(arguments)
        while words:
            word = words.pop(0)
            name = word.replace("_", "-") if word.startswith("--") else word
            if (known := FLAGS.get(name)) is None:
                raise ConfigError(f"llama-server has no argument {describe_unknown(name, FLAGS)}")
            if name in ("-fa", "--flash-attn") and (not words or words[0].startswith("-")):
                words.insert(0, "on")  # as earlier versions have it
            if len(words) < known.values:
                raise ConfigError(f"{name} needs a value")
            values = [words.pop(0) for _ in range(known.values)]
            found.take(name, known, values[0] if values else "on" if known.on else "off")
        return found

    def take(self, name: str, flag: Flag, value: str) -> None:
        """Apply one argument; that of a switch is "on" or "off". Raises ConfigError."""
        kind, target = flag.action[:1], flag.action[1:]
        try:
            match kind:
                case "-":
                    self.missing.append(name)
                case "=":
                    self.settings[target] = value
                case "?":
                    self.settings[target] = value == "on"
                case "+":
                    self.settings[target] = max(0, _parse_number(value))
                case "@" if value == "on":
                    field, _, fixed = target.partition("=")
                    self.settings[field] = fixed
                case ":":
                    self.defaults[target] = _parse(value) if flag.values else value == "on"
                case "/" if value == "on":
                    self._open_routes.append(flag.action)
                case '"':
                    self.defaults[target] = value
                case "!" if (found := _SETTINGS[target](value)) is not None:
                    _add(self.settings, found)
                case "!":
                    self.missing.append(f"{name} {value}")
                case "&":
                    _add(self.defaults, _FIELDS[target](value))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{name} {value}: {error}") from None

    def serve_arguments(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments of `cllm serve`."""
        settings = self._share_context(dict(self.settings))
        if "batch_size" in settings:
            batch, ubatch = settings.pop("batch_size"), settings.get("batch_tokens", UBATCH)
            settings["batch_tokens"] = min(batch, ubatch)
        if "batch_tokens" in settings:
            settings["batch_tokens"] = max(MIN_BATCH_TOKENS, settings["batch_tokens"])
        if settings.pop("verbose", False):
            self.defaults.setdefault("verbose", True)
        if keys := settings.pop("api_key", None):  # an empty one leaves that of the environment in force
            settings["api_key"] = ",".join(keys)
        lora_off = settings.pop("lora_off", False)
        adapters = settings.pop("adapter", [])
        if adapters and not lora_off:
            settings["apply_adapters"] = True
        if "CLLM_PORT" not in variables:
            settings.setdefault("port", PORT)
        if "cache_dir" in settings and "CLLM_CACHE_DISK_MB" not in variables:
            settings["cache_disk_mb"] = DEFAULT_CACHE_DISK_MB  # with keys, too: it was asked for
        slots = "/slots" if settings.pop("slots", True) else "-/slots"
        settings["open_routes"] = ",".join([slots, *self._open_routes])
        if self.defaults.get("max_tokens", 0) < 0:
            del self.defaults["max_tokens"]
        if self.defaults:
            settings["defaults"] = json.dumps(self.defaults)
        words = [settings.pop("model")] if "model" in settings else []
        for field, value in settings.items():
            flag = field.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
        return words + [word for each in adapters for word in ("--adapter", each)]

    def _share_context(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Slots share the cells: equally where their number is given, else each may use all of them."""
        cells, slots = settings.pop("ctx_size", 0), settings.get("parallel", 0)
        if cells:
            settings |= {"ctx_size": cells, "parallel": slots or SLOTS}
        if settings.get("unified_kv", bool(cells and not slots)):
            settings |= {"unified_kv": True} | ({"max_request_tokens": cells} if cells else {})
        return settings


def _add(known: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add settings or fields to those before; what may be given several times is collected."""
    for field, value in found.items():
        if field in _COLLECTED and field in known:
            value = known[field] + value if isinstance(value, list) else known[field] | value
        known[field] = value


def _parse_number(value: str) -> float:
    """Parse a whole number as int. Raise ValueError for another text than a number."""
    try:
        return int(value)
    except ValueError:
        return float(value)


def _parse(value: str) -> Any:
    """Return a number where it is one, else the text."""
    with suppress(ValueError):
        return _parse_number(value)
    return value


def _parse_switch(value: str) -> bool:
    if value.lower() not in _ON + _OFF:
        raise ValueError("expected on, off or auto")
    return value.lower() in _ON


def _parse_object(value: str) -> dict[str, Any]:
    found = json.loads(value)
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found


def _unescape(text: str) -> str:
    """Text with its escapes (\\n, \\t …) processed, as llama-server does with these arguments."""
    escapes = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[0]), text)


def _checked(found: dict[str, Any], valid: bool, message: str) -> dict[str, Any]:
    if not valid:
        raise ValueError(message)
    return found


def _read_key_file(value: str) -> dict[str, Any]:
    lines = map(str.strip, Path(value).read_text().splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    return _checked({"api_key": keys}, bool(keys), "it holds no key")


def _read_bias(value: str) -> dict[str, Any]:
    if (found := re.fullmatch(r"(\d+)([+-][\d.]+|-inf)", value)) is None:
        raise ValueError("expected a token id and a bias, as 15043+1")
    return {"logit_bias": {found[1]: max(-100.0, min(100.0, float(found[2])))}}


def _read_reasoning(value: str) -> dict[str, Any]:
    if value == "auto":
        return {}
    return {"chat_template_kwargs": {"enable_thinking": True}} if _parse_switch(value) else _NO_REASONING


def _read_budget(value: str) -> dict[str, Any]:
    tokens = int(value)
    return {"reasoning_budget": tokens} if tokens > 0 else {} if tokens else _NO_REASONING


def _read_adapters(value: str, *, scaled: bool) -> dict[str, Any]:
    """Adapters under the names of their files."""
    found = []
    for part in filter(None, value.split(",")):
        file, _, scale = part.rpartition(":") if scaled else (part, "", "1")
        name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(file).stem).lstrip("._-")[:64]
        found.append(f"{name}={file}:{float(scale)}")
    return {"adapter": found}


_COLLECTED = ("adapter", "api_key", "dry_sequence_breakers", "logit_bias", "stop", "chat_template_kwargs")
_NO_REASONING = {"reasoning_effort": "none"}
_DRAFTS = re.compile("ngram|draft-simple")
_LAYERS = {"auto": "auto", "-1": "auto", "all": -1, "-2": -1}
# The settings and fields of requests that follow from a value; None if it has no counterpart.
_SETTINGS: dict[str, Callable[[str], dict[str, Any] | None]] = {
    # A word is the name of a template, or of a file; anything else is the text of one.
    "template": lambda value: {
        "chat_template": value if re.fullmatch(r"[\w.-]*", value) else TEMPLATE_TEXT + value
    },
    "flash": lambda value: {"flash_attention": _parse_switch(value)} if value != "auto" else {},
    "device": lambda value: {"gpu_layers": 0} if value == "none" else None,
    "layers": lambda value: {"gpu_layers": _LAYERS[value] if value in _LAYERS else int(value)},
    "split_mode": lambda value: {"split_mode": value} if value != "tensor" else None,
    "tensor_split": lambda value: {"tensor_split": re.sub("[,/]+", ",", value)},
    "cache_ram": lambda value: {"cache_ram_mb": int(value) if int(value) >= 0 else NO_LIMIT_MB},
    "drafts": lambda value: {"draft_tokens": 0} if value == "none" else {} if _DRAFTS.match(value) else None,
    "host": lambda value: _checked({"host": value}, ".sock" not in value, "no UNIX socket: give an address"),
    "timeout": lambda value: dict.fromkeys(("slow_reader_s", "body_timeout_s"), float(value)),
    "key": lambda value: {"api_key": [key.strip() for key in value.split(",") if key.strip()]},
    "key_file": _read_key_file,
    "save_path": lambda value: _checked({"cache_dir": value}, Path(value).is_dir(), "it is not a folder"),
    "verbose": lambda value: {"log_level": LEVELS[-1], "verbose": True} if value == "on" else {},
    "verbosity": lambda value: {
        "log_level": LEVELS[min(max(0, int(value)), len(LEVELS) - 1)],
        "verbose": int(value) >= VERBOSE,
    },
    "download": lambda value: _checked({}, False, "not downloaded: give -hf REPOSITORY or -m FILE"),
    "repo": lambda value: {"model": f"hf:{value}"},
    "lora": partial(_read_adapters, scaled=False),
    "lora_scaled": partial(_read_adapters, scaled=True),
}
_FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "breaker": lambda value: {"dry_sequence_breakers": [] if value == "none" else [_unescape(value)]},
    "samplers": lambda value: {"samplers": [name for name in value.split(";") if name]},
    "bias": _read_bias,
    "grammar_file": lambda value: {"grammar": Path(value).read_text()},
    "schema": lambda value: {"json_schema": _parse_object(value)},
    "schema_file": lambda value: {"json_schema": _parse_object(Path(value).read_text())},
    "stop": lambda value: {"stop": [_unescape(value)]},
    "template_options": lambda value: {"chat_template_kwargs": _parse_object(value)},
    "reasoning": _read_reasoning,
    "effort": lambda value: {"reasoning_effort": value} if value != "default" else {},
    "budget": _read_budget,
}


def llama_server_command(context: typer.Context) -> None:
    """Serve as llama-server does: its arguments, its variables, its port; --help lists them."""
    from cllm.cli.main import app

    if {"-h", "--help", "--usage"} & set(context.args):
        typer.echo(describe_flags())
        raise typer.Exit
    if "--version" in context.args:
        typer.echo(f"version: cllm {__version__}")
        raise typer.Exit
    found = Translation.of(context.args, os.environ)
    if found.missing:
        typer.echo(f"cllm: without a counterpart here, so ignored: {', '.join(found.missing)}", err=True)
    app(["serve", *found.serve_arguments(os.environ)], prog_name="cllm llama-server")


def describe_flags() -> str:
    """Describe the arguments by their meaning."""

    def names(wanted: Callable[[str], bool]) -> str:
        found = [name for name, flag in FLAGS.items() if wanted(flag.action)]
        width = shutil.get_terminal_size().columns
        return textwrap.fill(" ".join(found), width, break_on_hyphens=False, break_long_words=False)

    return (
        "cllm llama-server ARGS…: llama-server's arguments and variables, on cllm.\n\n"
        f"Taken:\n{names(lambda action: action not in ('', '-', '!download'))}\n\n"
        f"Taken, and so in any case:\n{names(lambda action: not action)}\n\n"
        f"Without a counterpart (named in a warning):\n{names(lambda action: action == '-')}\n\n"
        f"Refused (these models are not downloaded):\n{names(lambda action: action == '!download')}"
    )

"""The arguments of llama-server: which there are, how many values each takes, and what it means for cllm."""

from __future__ import annotations

from typing import NamedTuple

# Flag, other spellings, `/` and those that switch it off; a dot or the variable (LLAMA_ARG_…, or whole with
# `=`); how many values it takes; what becomes of it:
#   =FIELD   a setting of cllm                  ?FIELD   a setting that is on or off
#   :FIELD   a field of requests that lack it   !NAME    a method of `Translation`
_FLAGS = """
-m --model                          MODEL               1 =model
-a --alias                          ALIAS               1 !alias
-t --threads                        THREADS             1 !threads
--poll                              .                   1 =poll
-c --ctx-size                       CTX_SIZE            1 !context
-np --parallel                      N_PARALLEL          1 !parallel
-kvu --kv-unified / -no-kvu --no-kv-unified KV_UNIFIED  0 !unified
-b --batch-size                     BATCH               1 !batch
-ub --ubatch-size                   UBATCH              1 !ubatch
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
-cmoe --cpu-moe                     CPU_MOE             0 !cpu_moe
-cram --cache-ram                   CACHE_RAM           1 !cache_ram
--spec-draft-n-max --draft --draft-n --draft-max SPEC_DRAFT_N_MAX 1 =draft_tokens
-md --model-draft --spec-draft-model SPEC_DRAFT_MODEL   1 =draft_model
--spec-type                         SPEC_TYPE           1 !drafts
--pooling                           POOLING             1 =pooling
--rerank --reranking                RERANKING           0 !rerank
--chat-template                     CHAT_TEMPLATE       1 =chat_template
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
--metrics                           ENDPOINT_METRICS    0 !metrics
--props                             ENDPOINT_PROPS      0 !props
--slots / --no-slots                ENDPOINT_SLOTS      0 !slots
-v --verbose --log-verbose          .                   0 !verbose
-lv --verbosity --log-verbosity     LOG_VERBOSITY       1 !verbosity
--log-disable                       .                   0 !quiet
-n --predict --n-predict            N_PREDICT           1 :max_tokens
-s --seed                           .                   1 :seed
--temp --temperature                TEMPERATURE         1 :temperature
--dynatemp-range                    .                   1 :dynatemp_range
--dynatemp-exp                      .                   1 :dynatemp_exponent
--top-k                             TOP_K               1 :top_k
--top-p                             TOP_P               1 :top_p
--min-p                             MIN_P               1 :min_p
--top-nsigma --top-n-sigma          .                   1 :top_n_sigma
--typical --typical-p               .                   1 :typical_p
--xtc-probability                   .                   1 :xtc_probability
--xtc-threshold                     .                   1 :xtc_threshold
--repeat-last-n                     .                   1 :penalty_last_n
--repeat-penalty                    REPEAT_PENALTY      1 :repetition_penalty
--presence-penalty                  PRESENCE_PENALTY    1 :presence_penalty
--frequency-penalty                 FREQUENCY_PENALTY   1 :frequency_penalty
--dry-multiplier                    .                   1 :dry_multiplier
--dry-base                          .                   1 :dry_base
--dry-allowed-length                .                   1 :dry_allowed_length
--dry-penalty-last-n                .                   1 :dry_penalty_last_n
--dry-sequence-breaker              .                   1 !breaker
--mirostat                          .                   1 :mirostat
--mirostat-lr                       .                   1 :mirostat_eta
--mirostat-ent                      .                   1 :mirostat_tau
--samplers                          .                   1 !samplers
--sampler-seq --sampling-seq        .                   1 !sampler_letters
--ignore-eos                        .                   0 :ignore_eos
-l --logit-bias                     .                   1 !bias
--grammar                           .                   1 !grammar
--grammar-file                      .                   1 !grammar_file
-j --json-schema                    .                   1 !schema
-jf --json-schema-file              .                   1 !schema_file
-r --reverse-prompt                 .                   1 !stop
--embd-normalize                    .                   1 :embd_normalize
--cache-prompt / --no-cache-prompt  CACHE_PROMPT        0 :cache_prompt
--chat-template-kwargs              CHAT_TEMPLATE_KWARGS 1 !template_options
--reasoning-format                  THINK               1 :reasoning_format
-rea --reasoning                    REASONING           1 !reasoning
--reasoning-effort                  REASONING_EFFORT    1 !effort
--reasoning-budget                  THINK_BUDGET        1 !budget
--sleep-idle-seconds                .                   1 !sleep
-mu --model-url                     MODEL_URL           1 =model
-hf -hfr --hf-repo                  HF_REPO             1 !repo
--offline                           OFFLINE             0 ?offline
-dr --docker-repo                   DOCKER_REPO         1 !download
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default \
--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default \
--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default . 0 !download
""".replace("\\\n", "")

# cllm does this anyway, or it changes nothing here.
_ALWAYS_SWITCHES = """
--perf --no-perf -e --escape --no-escape -kvo --kv-offload --op-offload --no-log-jsonl --log-prefix
--no-log-prefix --log-timestamps --no-log-timestamps --cache-idle-slots --no-context-shift --warmup
--no-warmup -cb --cont-batching --mmproj-auto --no-mmproj --no-mmproj-auto --no-cors-credentials
--no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent --ui --webui --no-ui --no-webui --embedding
--embeddings --models-autoload --no-models-autoload --jinja --reasoning-preserve --no-skip-chat-parsing
--prefill-assistant --spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-default
"""
_ALWAYS_VALUES = """
--keep -dt --defrag-thold -fit --fit -fitt --fit-target -fitc --fit-ctx --log-colors
--threads-http
"""

# Without a counterpart: they are named in a warning.
_MISSING_SWITCHES = """
-cl --cache-list --completion-bash --list-devices --swa-full -nkvo --no-kv-offload --no-host --check-tensors
--no-op-offload --log-jsonl -bs --backend-sampling --no-cache-idle-slots --context-shift -sp
--special --spm-infill -nocb --no-cont-batching --mmproj-offload --no-mmproj-offload --reuse-port
--cors-credentials --ui-mcp-proxy --webui-mcp-proxy -ag --agent --no-jinja --no-reasoning-preserve
--skip-chat-parsing --no-prefill-assistant --lora-init-without-apply --spec-draft-cpu-moe -cmoed
--cpu-moe-draft --mlock --mmap --no-mmap
"""
_MISSING_VALUES = """
-tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio -Cb --cpu-mask-batch -Crb
--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch --rope-scaling --rope-scale --rope-freq-base
--rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --rpc
-lm --load-mode -lzm --lazy-mode --numa -ot --override-tensor -ncffn --n-cpu-ffn --override-kv --lora
--lora-scaled --control-vector -hft --hf-token
--control-vector-scaled -hff --hf-file --log-file --spec-draft-type-k -ctkd --cache-type-k-draft
--spec-draft-type-v -ctvd --cache-type-v-draft --adaptive-target --adaptive-decay -lcs --lookup-cache-static
-lcd --lookup-cache-dynamic --kv-unified-per-slot -ctxcp --ctx-checkpoints --swa-checkpoints -cms
--checkpoint-min-step -mm --mmproj -mmu --mmproj-url -mmdev --mmproj-device --image-min-tokens
--image-max-tokens --mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir --tags
--path --cors-methods --cors-headers --api-prefix --ui-config --webui-config --ui-config-file
--webui-config-file --tools --tools-runtime --mcp-servers-config --mcp-servers-json --sse-ping-interval
--cache-reuse --media-path --models-dir --models-preset --models-max --reasoning-budget-message -sps
--slot-prompt-similarity --log-prompts-dir --spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads -td
--threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd
--cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft
--spec-draft-prio --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd
--cpu-mask-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch
--prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --spec-draft-override-tensor -otd
--override-tensor-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-n-min
--spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min
--spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m
--spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m
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
    return flags


FLAGS = _read_flags()

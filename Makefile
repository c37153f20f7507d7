# Everything is made by the first target that needs it: .venv, the packages, the native library, the model.
PYTHON ?= python3
ARGS ?=
# Two tests at a time, those of a file one after another; ARGS="-n 0" for one at a time.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
# Workers of the servers under test are new interpreters: without bytecode, each of them compiles cllm anew.
test test-cpus unit failure-modes option-matrix: export PYTHONDONTWRITEBYTECODE =
BUILD_INPUTS := pyproject.toml scripts/setup.sh $(addprefix cllm/build/,build.py gpus.py module.py options.py sampling.c sampling.py toolchain.py)

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

serve: .venv/ready ## serve the bundled model, or ARGS="model.gguf --port 18081"
	.venv/bin/cllm serve $(ARGS)

test: .venv/ready-test ## all tests, under ten minutes on two cores; ARGS go to pytest
	.venv/bin/python -m pytest $(WORKERS) $(ARGS)

unit: .venv/ready-test ## the fast tier: tests of the source tree without a server, under 45 seconds
	.venv/bin/python -m pytest tests/unit $(WORKERS) $(ARGS)

failure-modes: .venv/ready-test ## survive every failure mode of docs/failure-modes.md; ARGS="-k engine-killed"
	.venv/bin/python -m pytest tests/failure_modes $(WORKERS) $(ARGS)

faults: failure-modes # its old name

option-matrix: .venv/ready-test ## a server with each option of `cllm serve`: started, asked, stopped, no worker dies; ARGS="-k draft"
	.venv/bin/python -m pytest -n 2 tests/soak/option_matrix.py $(ARGS)

test-cpus: .venv/ready-test ## tests that load a model, on other CPUs (built once, minutes), threads and model: 30 minutes; ARGS="--row gemma"
	.venv/bin/python -m tests.proof.cpus $(ARGS) -- $(WORKERS)

check: .venv/ready-test ## ruff, strict mypy, and the direction of imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m pytest tests/unit/test_architecture.py

stats: .venv/ready ## the code's size beside its bars; ARGS="--list", "--json", "--static"
	.venv/bin/python scripts/stats.py $(ARGS)

bench: .venv/ready-bench ## all workloads beside llama-server (built the first time, ten minutes); ARGS=--quick: a look
	.venv/bin/cllm build --with-server
	.venv/bin/python -m bench --out build/bench $(ARGS)

fuzz: .venv/ready-test ## 1,000 valid and invalid requests for every route, from its description; ARGS="--resume", "--route /generate"
	.venv/bin/python -m tests.e2e.fuzz $(ARGS)

load: .venv/ready build/tiny.gguf ## 100,000 requests of all kinds at 1.5 times what the server computes: each ends once
	.venv/bin/python -m tests.proof.load --tiny build/tiny.gguf $(ARGS)

aborts: .venv/ready build/tiny.gguf ## 10,000 clients leave at random moments: how soon their slots are free
	.venv/bin/python -m tests.proof.aborts --tiny build/tiny.gguf $(ARGS)

endurance: .venv/ready ## 40 minutes of mixed load, a fault a minute, two models: memory flat, no drift, counters exact
	.venv/bin/python -m tests.proof.endurance $(ARGS)

kills: .venv/ready build/tiny.gguf ## 200 times kill -9 of a child process under load: every answer as undisturbed
	.venv/bin/python -m tests.proof.kills --tiny build/tiny.gguf $(ARGS)

terminations: .venv/ready build/tiny.gguf ## 100 times SIGTERM under load: exit 0 in time, and the disk cache readable after it
	.venv/bin/python -m tests.proof.terminations --tiny build/tiny.gguf $(ARGS)

canary: .venv/ready ## 5,000 marked prompts of two tenants with everything on: the text as alone, no marker elsewhere
	.venv/bin/python -m tests.proof.canary $(ARGS)

outsider: .venv/ready-test ## no key, other tenants' ids, foreign hosts, path tricks, bombs: each attempt gets nothing
	.venv/bin/python -m tests.proof.outsider

fuzz-http: .venv/ready-test ## 100,000 mutated HTTP requests over bare sockets: no server error, no death; ARGS="--seed 2"
	.venv/bin/python -m tests.proof.raw_http $(ARGS)

fuzz-parsers: .venv/ready-test ## atheris on all that reads hostile bytes, ten minutes each; ARGS="--only calls --seconds 60"
	.venv/bin/python -m tests.proof.fuzz_parsers $(ARGS)

timing: .venv/ready build/tiny.gguf ## one tenant cannot tell by time what another has cached: 1,000 tries of each, a t-test
	.venv/bin/python -m tests.proof.timing --tiny build/tiny.gguf $(ARGS)

reliability: .venv/ready-bench ## docs/reliability.md, from what the commands of the proof have recorded
	.venv/bin/python -m tests.proof.evidence

mutants: .venv/ready-test ## 600 small changes of the core, each noticed by a unit test or not; ARGS=--again: the survivors
	.venv/bin/python -m tests.proof.mutants $(ARGS)

sanitize: .venv/ready-test ## llama.cpp under AddressSanitizer (built once, minutes): the contract tests, and what grows with requests
	.venv/bin/python -m tests.proof.sanitizer $(ARGS)

life-cycle: .venv/ready-test ## every order of events in small worlds of requests, slots and cells; each native call fails once; ARGS="--depth 6"
	.venv/bin/python -m tests.proof.life_cycle $(ARGS)
	TEST_PROFILE=random .venv/bin/python -m pytest $(WORKERS) -k every_native_call tests/unit/core/test_scheduler_invariants.py tests/unit/core/test_spec_decode_invariants.py

seeds: .venv/ready build/tiny.gguf ## the earlier server's failing cases, as a table
	.venv/bin/python -m tests.soak.seeds --tiny build/tiny.gguf $(ARGS)

soak: .venv/ready build/tiny.gguf ## thousands of requests: memory, threads and files stay flat; ARGS=--evictions
	.venv/bin/python -m tests.soak.soak --tiny build/tiny.gguf $(ARGS)

conversations: .venv/ready ## text with the KV cache on is the text with it off; ARGS="--kind hybrid --count 500", "--model FILE --control"
	.venv/bin/python -m tests.soak.conversations $(if $(findstring --model,$(ARGS)),,--kind dense) $(ARGS)

second-turns: .venv/ready ## 16 users with one system prompt: second turns compute only their own new tokens
	.venv/bin/python -m tests.soak.second_turns $(ARGS)

stripped: .venv/ready ## thoughts stripped from history, on each kind of memory: what the next turn computes again
	.venv/bin/python -m tests.soak.stripped $(ARGS)

density: .venv/ready ## 200 conversations on 16 slots: ubatches of a decode-only step
	.venv/bin/python -m tests.soak.density $(ARGS)

restart: .venv/ready ## the first token after a restart, with a known prefix of 4,000 tokens, against cold
	.venv/bin/python -m tests.soak.restart $(ARGS)

oversized: .venv/ready ## 16 prompts of 7.8 MB at once, and a hello beside them: how long each takes
	.venv/bin/python -m tests.soak.oversized $(ARGS)

first-bytes: .venv/ready ## how soon a stream begins on every route while prompts of 4,000 tokens are read
	.venv/bin/python -m tests.soak.first_bytes $(ARGS)

pressure: .venv/ready build/tiny.gguf ## 500 requests on a quarter of the KV they need: preempted, answered, the right text
	.venv/bin/python -m tests.soak.pressure --tiny build/tiny.gguf $(ARGS)

stopped: .venv/ready ## workers are stopped under load for a minute: /health answers at once, they are replaced
	.venv/bin/python -m tests.soak.stopped $(ARGS)

resume: .venv/ready ## the engine is killed at every token position of eight answers: each is as undisturbed; ARGS="--model tiny --every 8"
	.venv/bin/python -m tests.soak.resume $(ARGS)

neighbours: .venv/ready ## a plain stream beside seven costly requests of each kind: its longest gap and its speed
	.venv/bin/python -m tests.soak.neighbours $(ARGS)

simulate: .venv/ready-bench ## ways to place requests on 100 simulated replicas, by a public trace; ARGS="--out docs", "--calibrate"
	.venv/bin/python -m bench.cluster $(ARGS)

cluster-test: .venv/ready .venv-cluster/ready ## a cluster on Ray, here: costs, kills of everything, scaling, updates (20 minutes); ARGS="--only kills", "--long", "--resume"
	.venv/bin/python -m tests.soak.cluster --python .venv-cluster/bin/python $(ARGS)

waiting: .venv/ready ## 50,000 requests wait: what submitting and cancelling cost
	.venv/bin/python -m tests.soak.waiting $(ARGS)

schemas: .venv/ready-test ## 200 random JSON schemas: every answer validates; and what constraints cost
	.venv/bin/python -m tests.soak.schemas $(ARGS)

vocabularies: .venv/ready-test ## every constraint on every vocabulary in llama.cpp's source: none refused, all fit
	.venv/bin/python -m tests.soak.vocabularies $(ARGS)

templates: .venv/ready-test ## 70 published chat templates × 12 shapes of conversations, against Transformers (installed for it)
	.venv/bin/python -m tests.soak.templates $(ARGS)

formats: .venv/ready-test ## 71 chat templates: 200 turns and 200 answers of calls of each are read back; ARGS="--resume --seconds 600"
	.venv/bin/python -m tests.soak.formats $(ARGS)

features: .venv/ready ## greedy text with every feature on is the text with all of them off
	.venv/bin/python -m tests.soak.features $(ARGS)

llama-server: .venv/ready ## the same requests for llama-server and for `cllm llama-server`: keys, kinds, status codes
	.venv/bin/cllm build --with-server
	.venv/bin/python -m tests.soak.llama_server --templates $(ARGS)

exits: .venv/ready ## 200 interpreters that end with an open model: none hangs or shows a traceback; ARGS="--count 24"
	.venv/bin/python -m tests.soak.exits $(ARGS)

models: .venv/ready ## four models, memory for two, 1,000 requests: all answered, LRU, memory; prefixes after a swap; two at once; ARGS="--only turns"
	.venv/bin/python -m tests.soak.models $(ARGS)

pull: .venv/ready ## 1 GB from a hub on loopback, killed 20 times; its speed beside curl's
	.venv/bin/python -m tests.soak.pull $(ARGS)

clients: .venv/ready-test ## langchain-tests, LiteLLM, openai-agents, Instructor, LlamaIndex in an environment of their own; ARGS="--suite litellm"
	.venv/bin/python -m tests.soak.clients --install $(ARGS)

agents: .venv/ready-test ## Claude Code, Codex, opencode, Cline, aider … from npm and PyPI, against a scripted model; ARGS="--program cline"
	.venv/bin/python -m tests.soak.agents --install $(ARGS)

page-test: .venv/ready-test ## the page in Chromium for minutes: KV map, figures, cost, on the embedded model too; ARGS="-k cost"
	.venv/bin/python -m pytest -n 0 tests/soak/page.py $(ARGS)

screenshots: .venv/ready-test ## the images of the page in docs/images, by Chromium
	.venv/bin/python scripts/screenshots.py $(ARGS)

gpu-kit: .venv/ready-test ## all that a GPU machine without a network needs to build and to measure, in build/gpu-kit
	.venv/bin/python -m bench.gpu.kit build/gpu-kit $(ARGS)

gpu-test: .venv/ready-test ## a second backend: builds the Vulkan module (minutes, once), runs it on a GPU or on Mesa's software device
	.venv/bin/cllm build --gpu vulkan
	GGML_VK_VISIBLE_DEVICES=$${GGML_VK_VISIBLE_DEVICES-0} .venv/bin/python -m pytest -n 0 tests/soak/gpu.py tests/soak/gpu_placement.py $(ARGS)

wheel: .venv/ready ## dist/: the wheels cllm and cllm-native, the second for every CPU of this architecture (minutes, once)
	.venv/bin/python scripts/wheel.py $(ARGS)

wheel-test: .venv/ready-test ## the wheels of `make wheel` in a clean environment without a compiler; ARGS=--qemu: on other CPUs
	.venv/bin/python -m tests.soak.wheel $(ARGS)

docs: .venv/ready-docs ## the documents as a site in build/docs, its reference written anew from the code
	.venv/bin/python scripts/reference.py
	.venv/bin/zensical build --strict --config-file mkdocs.yml

doctor: .venv/ready ## what cllm finds on this machine
	.venv/bin/cllm doctor $(ARGS)

firsttoken: ## from a fresh clone to its first token, tuning included, and a second start (minutes; its own cache)
	scripts/first_token.sh

clean: ## remove .venv and what the tools leave here (the built library stays in the cache)
	rm -rf .venv .venv-cluster .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis build dist *.egg-info

build/tiny.gguf: .venv/ready tests/tiny_models.py
	@mkdir -p build
	.venv/bin/python -c "from pathlib import Path; from tests.tiny_models import make_dense; make_dense(Path('$@'))"

.venv/ready: $(BUILD_INPUTS)
	PYTHON="$(PYTHON)" scripts/setup.sh
	@touch $@

# Ray is not for the environment of the tests: it is an extra, and large.
.venv-cluster/ready: pyproject.toml
	$(PYTHON) -m venv .venv-cluster
	.venv-cluster/bin/python -m pip install --disable-pip-version-check -q -e '.[cluster]'
	@touch $@

.venv/ready-bench: .venv/ready
	scripts/setup.sh bench
	@touch $@

.venv/ready-docs: .venv/ready
	scripts/setup.sh docs
	@touch $@

.venv/ready-test: .venv/ready
	scripts/setup.sh test
	@touch $@

# Every target without a slash or a dot is a command, not a file.
.PHONY: $(shell awk -F: '/^[a-z][a-z-]*:/ {print $$1}' $(firstword $(MAKEFILE_LIST)))

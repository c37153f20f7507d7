# Everything is made by the first target that needs it: .venv, the packages, the native library, the model.
PYTHON ?= python3
ARGS ?=
# Two tests at a time, those of a file one after another; ARGS="-n 0" for one at a time.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
# Workers of the servers under test are new interpreters: without bytecode, each of them compiles cllm anew.
test unit failure-modes proof: export PYTHONDONTWRITEBYTECODE =
BUILD_INPUTS := pyproject.toml scripts/setup.sh $(addprefix cllm/build/,attention.cpp build.py gpus.py kernels.cpp kernels.hpp members.cpp module.py old_vulkan.hpp options.py options.toml products.cpp random.c sampling.c toolchain.py)

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

proof: .venv/ready-test build/tiny.gguf ## what runs long: the names; ARGS="NAME [its arguments]" runs one
	.venv/bin/python -m proof $(ARGS)

simulate: .venv/ready-bench ## ways to place requests on 100 simulated replicas, by a public trace; ARGS="--out docs", "--calibrate"
	.venv/bin/python -m bench.cluster $(ARGS)

screenshots: .venv/ready-test ## the images of the page in docs/images, by Chromium
	.venv/bin/python scripts/screenshots.py $(ARGS)

gpu-kit: .venv/ready-test ## all that a GPU machine without a network needs to build and to measure, in build/gpu-kit
	.venv/bin/python -m bench.gpu.kit build/gpu-kit $(ARGS)

wheel: .venv/ready ## dist/: the wheels cllm and cllm-native, the second for every CPU of this architecture (minutes, once)
	.venv/bin/python scripts/wheel.py $(ARGS)

docs: .venv/ready-docs ## the documents as a site in build/docs, its reference written anew from the code
	.venv/bin/python scripts/reference.py
	.venv/bin/zensical build --strict --config-file mkdocs.yml

doctor: .venv/ready ## what cllm finds on this machine
	.venv/bin/cllm doctor $(ARGS)

clean: ## remove .venv and what the tools leave here (the built library stays in the cache)
	rm -rf .venv .venv-cluster .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis build dist *.egg-info

build/tiny.gguf: .venv/ready tests/tiny_models.py
	@mkdir -p build
	.venv/bin/python -c "from pathlib import Path; from tests.tiny_models import make_dense; make_dense(Path('$@'))"

.venv/ready: $(BUILD_INPUTS)
	PYTHON="$(PYTHON)" scripts/setup.sh
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

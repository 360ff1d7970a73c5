.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRAS ?= backend,tokenizer,dev

comma := ,
BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup-$(subst $(comma),-,$(EXTRAS))

# With the root on sys.path our `kernels` link would hide the Hugging Face package of that name.
export PYTHONSAFEPATH := 1
# Ranks and test workers share few cores; Megatron's fusers would compile at first call.
export OMP_NUM_THREADS := 1
export TORCHDYNAMO_DISABLE := 1

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: help setup demo test test-fast bench fmt lint type imports check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: PYTHON=python3.12  EXTRAS=backend,gpu,tokenizer,dev  (gpu adds Triton)"

setup: $(STAMP) ## Create .venv and install psRL into it

# torch comes first, so that the extras find it and do not choose a version of their own.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) \
		else "psRL needs Python 3.11 or newer, but $(PYTHON) is " + v + ". Try: make setup PYTHON=python3.12")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP) ## From a trace to a report, on a CPU
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: test-fast ## All tests, the fast ones first
	$(PYTEST) -m "slow or gpu"

test-fast: $(STAMP) ## Tests without a GPU that take seconds
	$(PYTEST) -m "not slow and not gpu"

# Benchmarks are not installed, so they run from the root, which must then be on sys.path.
bench: $(STAMP) ## Measured figures beside their bars; NAME=traces for one
	PYTHONSAFEPATH= $(BIN)/python -m benchmarks.run $(NAME)

fmt: $(STAMP) ## Format the code and sort the imports
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

lint: $(STAMP) ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

type: $(STAMP) ## Check types
	$(BIN)/mypy

imports: $(STAMP) ## Check that imports point down
	$(BIN)/lint-imports

check: lint type imports test ## Everything that CI runs

clean: ## Remove the environment, caches and build outputs; keep runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find psrl tests -name __pycache__ -type d -prune -exec rm -rf {} +

.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRAS ?= backend,gpu,tokenizer,dev

comma := ,
BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup-$(subst $(comma),-,$(EXTRAS))

NEXT       := .venv-megatron-next
NEXT_STAMP := $(NEXT)/.setup
VERL       := .venv-verl
VERL_STAMP := $(VERL)/.setup

# With the root on sys.path our `kernels` link would hide the Hugging Face package of that name.
export PYTHONSAFEPATH := 1
# Ranks and test workers share few cores; Megatron's fusers would compile at first call.
export OMP_NUM_THREADS := 1
export TORCHDYNAMO_DISABLE := 1

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: help setup demo readme test test-fast test-megatron-next test-verl bench fmt lint type imports check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: PYTHON=python3.12  EXTRAS=backend,tokenizer,dev  (without the 600 MB of Triton)"

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

readme: $(STAMP) ## The tables and pictures of README.md, computed again
	$(BIN)/python examples/readme_table.py --write

test: test-fast ## All tests, the fast ones first
	$(PYTEST) -m "slow or gpu"

test-fast: $(STAMP) ## Tests that take less than half a second each
	$(PYTEST) -m "not slow and not gpu"

# megatron-core 0.19.2 asks for Python 3.12 but runs on 3.11. The flag that permits it would apply to
# its dependencies too, so it comes alone, after them.
$(NEXT_STAMP): pyproject.toml
	test -x $(NEXT)/bin/pip || $(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet "$(TORCH)"
	$(NEXT)/bin/python -m pip install --quiet --editable ".[gpu,dev]" "packaging>=24.2" "psutil>=6"
	$(NEXT)/bin/python -m pip install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2
	@touch $@

# Without the long tables and the executions of all policies: Megatron does nothing else in them.
test-megatron-next: $(NEXT_STAMP) ## Tests of the backend with the newer megatron-core
	$(NEXT)/bin/python -m pytest -q -n 2 --dist loadfile tests/backend -m "not gpu" \
		-k "not exactness_table and not baselines and not many"

$(VERL_STAMP): pyproject.toml
	test -x $(VERL)/bin/pip || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet "$(TORCH)"
	$(VERL)/bin/python -m pip install --quiet --editable ".[verl,dev]"
	@touch $@

# veRL brings 2 GB of packages, Ray among them, so it has an environment of its own.
test-verl: $(VERL_STAMP) ## Tests of the veRL adapter against veRL's own engine
	$(VERL)/bin/python -m pytest -q tests/integrations tests/planner/test_verl_package.py -m verl

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

check: lint type imports test test-verl test-megatron-next ## Everything that CI runs

clean: ## Remove the environments, caches and build outputs; keep runs/
	rm -rf $(VENV) $(NEXT) $(VERL) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find psrl tests -name __pycache__ -type d -prune -exec rm -rf {} +

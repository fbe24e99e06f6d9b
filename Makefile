PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-engine bench lint format clean
.DELETE_ON_ERROR:

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-engine: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 triton==3.7.1 numpy==2.4.6 transformers==5.6.0
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/ddtree-deploy demo $(DEMO)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto -m 'not torch' $(TESTS)

test-engine: $(VENV)/.installed-engine
	$(BIN)/python -m pytest -n auto -m torch $(TESTS)

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ansible>=12'
	@touch $@

# Needs ssh, sshd, git and rsync; ansible goes into the virtual environment.
bench: $(VENV)/.installed-bench
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.bench $(BENCH)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --target=3.8- --violations $(filter-out %/bundle.py,$(wildcard ddtree_deploy/agent/*.py))

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

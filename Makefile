# Everything a newcomer needs: `make demo` runs the library, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The development environment has one torch; the package itself accepts 2.10 and newer.
TORCH := torch==2.13.0
INSTALLED := $(VENV)/.installed

.PHONY: demo test venv lint types unit mutants format clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(BIN)/mlakit demo

test: lint types unit

venv: $(INSTALLED)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	$(BIN)/pytest -n auto

# breaks the CPU kernels one line at a time; every break must be noticed
mutants: $(INSTALLED)
	$(BIN)/python scripts/mutate.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache dist

# torch goes first so that no later requirement may choose another build of it
$(INSTALLED): pyproject.toml Makefile mlakit/_version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --editable ".[dev]"
	touch $@

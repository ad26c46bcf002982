PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test check lint types reproduce bench clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Expected Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Files are given to the workers as they are collected: the README, the longest of them, first.
# The slow tests run where CI is set, and with `make test SLOW=1`.
test: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(CI)$(SLOW),,-m "not slow")

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

check: lint types test

reproduce: setup
	$(BIN)/ddnf reproduce all --profile quick --out reproduced

bench: setup
	$(BIN)/python benchmarks/flow.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache build dist

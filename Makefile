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

# The peers have an environment of their own, PyTorch among them. `make bench QUICK=1` takes three minutes.
.venv-bench/.installed: pyproject.toml constraints.txt benchmarks/constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --constraint constraints.txt --constraint benchmarks/constraints.txt \
		--requirement benchmarks/requirements.txt --editable '.[paper]'
	touch $@

bench: .venv-bench/.installed
	.venv-bench/bin/python -m benchmarks $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf .venv .venv-bench .pytest_cache .ruff_cache build dist

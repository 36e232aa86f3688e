# What to type:  make demo | make test | make help
# Everything is installed into .venv; nothing else on the machine is touched
# (but for Debian's python3-venv, if it is missing and you are root).

# The Python that .venv was made with, so that PYTHON=… has to be said only once.
PYTHON ?= $(or $(wildcard $(shell sed -n 's/^executable = //p' .venv/pyvenv.cfg 2>/dev/null)),python3)
ARGS ?=
BIN := .venv/bin
UV = $(firstword $(wildcard $(BIN)/uv) uv)
COMPILE = $(UV) pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links $(ARGS) pyproject.toml

# Tests start Python a thousand times: without bytecode, each start compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-spark java-classes storm lowest newest between mutants bench lint types house pages manifests picture site release release-check lock clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 19
	@echo '  ARGS="…" is passed on:  make test ARGS="-k embedded"'

venv:  ## make .venv or bring it up to date; nothing to do the second time
	@command -v $(PYTHON) >/dev/null || { echo 'penstock needs Python 3.11 or newer.  Type: apt-get install python3' >&2; exit 1; }
	@$(PYTHON) .ci/setup

demo: venv  ## watch records flow, break things, see them healed
	@$(BIN)/penstock demo $(ARGS)

test: venv  ## the tests, on real servers that they start themselves
	@$(BIN)/python -m pytest -n 3 $(ARGS)

test-spark: java-classes  ## those that start Spark or are slow: its engine, its sources, reconciling on it; make test has the rest
	@$(BIN)/python -m pytest -n 2 -m "(jvm or spark and slow) and not chaos and not storm" $(ARGS)

java-classes: venv
	@PYTHONPATH=tests $(BIN)/python -m fixtures.java_classes

storm: venv  ## the longest tests: kills and faults under load (one of them takes STORM_FAULTS)
	@$(BIN)/python -m pytest -m storm $(ARGS)

lowest: venv  ## a part of the tests, on the oldest dependencies and servers that are allowed
	@.ci/versions lowest $(ARGS)

newest: venv  ## the same part, on the newest Python and servers
	@.ci/versions newest $(ARGS)

between: venv  ## statements and README on servers between the oldest and the newest
	@.ci/versions between $(ARGS)

mutants: venv  ## make mistakes in the code, and see which the tests catch; by hand
	@$(UV) pip install --quiet --no-config --python $(BIN)/python --group mutants
	@PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

bench: venv  ## measure Penstock beside its limits and its peers
	@$(BIN)/python -m benchmarks $(ARGS)

lint: venv  ## formatter, linter, types, who may import whom, dead code, spelling, the pages and the house
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line types house

types:
	$(BIN)/mypy

house:
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/codespell
	$(BIN)/python -m pytest --quiet --noconftest tests/documents/check_*.py
	$(BIN)/python docs/site.py

pages: venv  ## write the pages of commands, settings and metrics from the code
	$(BIN)/python docs/reference/command_line.py

manifests:  ## write deploy/kubernetes from the chart in deploy/helm
	.ci/programs helm-4.1
	for name in init streamer consumer nightly console monitoring scaling; do \
		/var/tmp/penstock-programs-$$(id -u)/helm-4.1/bin/helm template penstock deploy/helm/penstock \
			--values deploy/helm/kustomize-values.yaml --show-only templates/$$name.yaml >deploy/kubernetes/$$name.yaml || exit; \
	done

picture: venv  ## write the console's picture, of the demo at work; needs chromium
	$(BIN)/python docs/picture.py

site: venv  ## build the documentation as a site, in site/, with the API's pages; a dead link fails
	$(BIN)/python docs/site.py

release:  ## write VERSION=0.2.0: its changelog and its upgrade page
	@.ci/release cut $(VERSION)

release-check: venv  ## build HEAD twice into dist/, and check what a user would install
	@.ci/release check

lock:  ## pin the dependencies anew; ARGS=--upgrade takes newer ones
	$(COMPILE) --extra demo --group dev --output-file requirements.lock
	$(COMPILE) --extra console --extra prometheus --extra zstd --constraint requirements.lock --output-file requirements-image.lock
	$(COMPILE) --extra java --constraint requirements.lock --output-file requirements-java.lock

clean:  ## remove .venv, caches, and the data of the demo
	@if [ -L .penstock/postgres/data ]; then rm -rf "$$(dirname "$$(readlink .penstock/postgres/data)")"; fi
	rm -rf .venv .penstock .mutants site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist spark-warehouse

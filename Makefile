# `make demo` and `make test` need Python 3.10+ and make, nothing else. Each target makes its own environment in
# .venv if there is none. Everything runs against the built wheel, never against the working tree.
#
#   make demo     train a small model and show what was recorded
#   make test     the tests               (make test ARGS="-k schedule")
#   make lint     ruff, mypy, import rules, bandit, documentation
#   make docs     the documentation, as HTML in build/docs
#   make bench    what recording costs, beside its peers, and how cost grows (an hour; make bench ARGS=--quick)
#   make torture  every fault at every moment of a training (half an hour; make torture ARGS=--quick)
#   make power-cut    a crash between any two file operations of a training    (some minutes)
#   make soak         20,000 steps with a window every 100         (some ten minutes)
#   make compatibility  versions, strategies and kinds of training that were tried   (half an hour)
#   make test-gpu       the tests that need a GPU; says so where there is none
#   make fuzz     the readers of traces, snapshots and run directories, ten minutes each   (make fuzz ARGS=--quick)
#   make audit    known vulnerabilities in what constraints.txt pins; NOT AUDITED is error 3 (0 with ARGS=--allow-unaudited)
#   make clean    remove what was built, the environment included

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEELS := build/wheel
ARGS ?=

# Every pip below, those that build dependencies in isolation included, keeps to the versions that the tests ran with. Without
# this an unconstrained step could fetch another PyTorch, which is gigabytes.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A PYTHONPATH could put the working tree before the wheel.
unexport PYTHONPATH

# Directories too: their time changes when a file goes.
SOURCES := $(shell find lightning_memprof \( -name __pycache__ -o -name '.*' \) -prune -o -print)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint docs bench torture power-cut soak fuzz audit clean compatibility test-gpu

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/run.stamp
	$(BIN)/lightning-memprof demo $(ARGS)

# The script and not `python -m pytest`, which would put the working tree first on the path. A file's tests stay in one
# process: they share what is slow to make. One process more than cores: many tests wait for a program of their own.
test: $(VENV)/test.stamp
	$(BIN)/pytest --numprocesses $$($(BIN)/python -c 'import os; print(os.cpu_count() + 1)') --dist loadfile $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit -q -c pyproject.toml -r lightning_memprof
	$(BIN)/sphinx-build -n -W -q -b html docs build/docs

docs: $(VENV)/dev.stamp
	$(BIN)/sphinx-build -n -W -q -b html docs build/docs
	@echo build/docs/index.html

bench: $(VENV)/bench.stamp $(VENV)/peers.stamp
	$(BIN)/python tests/benchmarks/run.py $(ARGS)

torture: $(VENV)/test.stamp
	$(BIN)/python tests/torture/run.py $(ARGS)

power-cut: $(VENV)/test.stamp
	$(BIN)/python tests/torture/power_cut.py $(ARGS)

soak: $(VENV)/test.stamp
	$(BIN)/python tests/torture/soak.py $(ARGS)

compatibility: $(VENV)/test.stamp
	$(BIN)/python tests/compatibility/run.py $(ARGS)

test-gpu: $(VENV)/test.stamp
	$(BIN)/python tests/compatibility/gpu.py $(ARGS)

fuzz: $(VENV)/fuzz.stamp
	$(BIN)/python tests/fuzz/fuzz.py $(ARGS)

audit: $(VENV)/dev.stamp
	$(BIN)/python tests/fuzz/audit.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# A half-made environment has no pyvenv.cfg: the file goes when its recipe fails.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; name one: make PYTHON=python3.12 ...")'
	@echo "Making $(VENV); the first time takes some minutes, PyTorch is large."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q hatchling

# What the benchmarks compare with. A peer that cannot be had stops nothing; it is tried again the next time.
$(VENV)/peers.stamp: tests/benchmarks/peers.txt tests/benchmarks/make_peers.py | $(VENV)/test.stamp
	@$(BIN)/python tests/benchmarks/make_peers.py $(VENV)/peers && touch $@ || echo 'Going on without what is missing of $(VENV)/peers.' >&2

# Without isolation: a build for each change of the sources should neither ask the index nor take ten seconds.
$(VENV)/wheel.stamp: pyproject.toml README.md LICENSE constraints.txt $(SOURCES) | $(VENV)/pyvenv.cfg
	rm -rf $(WHEELS)
	$(BIN)/pip wheel -q --no-deps --no-build-isolation --wheel-dir $(WHEELS) .
	$(BIN)/pip install -q --no-deps --force-reinstall $(WHEELS)/*.whl
	@touch $@

# What the wheel needs, by extra. The wheel itself is there already, so that a change of the sources costs no resolving.
$(VENV)/run.stamp: EXTRAS :=
$(VENV)/test.stamp: EXTRAS := [test]
$(VENV)/dev.stamp: EXTRAS := [test,docs,dev]
$(VENV)/fuzz.stamp: EXTRAS := [test,fuzz]
$(VENV)/bench.stamp: EXTRAS := [test,bench]
$(VENV)/run.stamp $(VENV)/test.stamp $(VENV)/dev.stamp $(VENV)/fuzz.stamp $(VENV)/bench.stamp: $(VENV)/wheel.stamp
	@if [ ! -e $@ ] || [ pyproject.toml -nt $@ ] || [ constraints.txt -nt $@ ]; then \
		set -e; wheel=$$(echo $(WHEELS)/*.whl); \
		echo "$(BIN)/pip install $$wheel$(EXTRAS)"; $(BIN)/pip install -q "$$wheel$(EXTRAS)"; \
	fi
	@touch $@

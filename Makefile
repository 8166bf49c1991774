# Every target works alone on a fresh machine with python3 (3.11 or newer) and make: it sets up .venv first.
#
# Variables:
#   PYTHON=python3.12       the interpreter to make .venv from, when there is none yet
#   TORCH=torch==2.12.1     the torch to install. Left out: the one of a python3 that sees a GPU, else torch==2.13.0.
#                           Whether that is a CPU or a CUDA build depends on the index that pip is configured for;
#                           a CUDA build is several gigabytes
#   WORKERS=2               test processes; left out: as many as there are cores, at most 8
#   SEED=0 SECONDS_EACH=60  for `make fuzz`

VENV ?= .venv
WORKERS ?= logical
SECONDS_EACH ?= 60
SEED ?= 0
export VENV

BIN := $(VENV)/bin
FUZZ_TARGETS := kvproof sglang==0.5.23

.DEFAULT_GOAL := help
.PHONY: help setup fuzz test test-gpu coverage lint format bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## make .venv and install everything into it
	@.ci/setup

# Both runs always happen. Exit status 4 of kvproof means that only known findings (corpus/known.json) were seen.
fuzz: setup ## fuzz our own allocators, then the newest supported SGLang, a minute each
	@failed=0; summary=; \
	for target in $(FUZZ_TARGETS); do \
	    echo "== $$target"; status=0; \
	    $(BIN)/kvproof fuzz --target $$target --allocator all --seed $(SEED) --seconds $(SECONDS_EACH) || status=$$?; \
	    case $$status in \
	        0) said="clean" ;; \
	        4) said="nothing new, known findings only" ;; \
	        *) said="FAILED"; failed=1 ;; \
	    esac; \
	    summary="$$summary$$target: $$said (exit status $$status)\n"; \
	done; \
	printf "== result\n$$summary"; exit $$failed

test: setup ## run the tests; those that need a GPU are skipped, visibly, where there is none
	@$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8

test-gpu: setup ## run the GPU tests; fails where there is no GPU or nothing ran
	@$(BIN)/python -m pytest -n 0 -m gpu --require-gpu

coverage: setup ## run the tests and report what they do not reach
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --maxprocesses 8
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

lint: setup ## ruff and mypy
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m mypy

format: setup ## let ruff mend and format the sources
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

bench: setup ## measure the harness itself
	@$(BIN)/kvproof bench harness

clean: ## back to a fresh checkout: everything that make built goes
	@rm -rf $(VENV) build dist htmlcov kvproof.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

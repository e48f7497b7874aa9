# Every target first makes .venv, or sees in a moment that it is up to date. Settings: the head of scripts/install.sh.
SHELL := /bin/bash
# horovodrun and its ranks look for mpirun and python on PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Two at a time, since ranks mostly wait while they start; the long files first.
TEST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install train test test-all test-exhaustive test-faults test-trackers test-cluster lint format docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: ## everything the project needs, in .venv; compiles Horovod the first time (minutes)
	@scripts/install.sh

train: install data/digits/dataset.json ## train a small convnet on handwritten digits, on two ranks
	python -m horovod_train.main launch -np 2 -- --config configs/digits_convnet.yaml

data/digits/dataset.json: | install
	python -m horovod_train.main prepare digits --out data/digits

test: install ## a test of each promise, in minutes
	$(TEST) -m "not long and not exhaustive"

test-all: install ## and those that are one more of a kind
	$(TEST) -m "not exhaustive"

test-exhaustive: install ## and every one of a kind, for hours
	$(TEST)

test-faults: install ## kill ranks at random moments, ROUNDS times, at 2 and at 3 ranks; the result must not change
	ROUNDS=$(or $(ROUNDS),25) python -m pytest -rP -o faulthandler_timeout=7200 tests/distributed/ends/test_leaving.py -k killed

test-trackers: install ## with a real MLflow server and W&B offline, which it installs in build/trackers
	tests/install_trackers.sh
	python -m pytest tests/distributed/output/test_tracked_runs.py

test-cluster: install ## every way to start, requeues and losses, on virtual hosts with a real SLURM; needs root, Debian
	@tests/cluster/install_packages.sh
	rm -f build/cluster.md
	python -m pytest $(PYTEST_WORDS) tests/cluster; code=$$?; [ ! -f build/cluster.md ] || cat build/cluster.md; exit $$code

lint: install ## style and types, changing nothing
	ruff check .
	ruff format --check .
	mypy

format: install ## put the code in the project's style
	ruff check --fix-only --quiet .
	ruff format .

docs: install ## the site, in build/site; a dead link is an error
	mkdocs build

clean: ## remove .venv and everything made from it; not data, not runs
	rm -rf .venv .cache install.log build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

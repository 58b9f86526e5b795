# Each verb stands alone: on a fresh clone it makes .venv first, later it finds it made.
# `make train ARGS="--depth 4"` passes options on; `make PYTHON=python3.12 test` picks the Python.

.DEFAULT_GOAL := help
SHELL := /bin/sh
PY := .venv/bin/python
export PYTHON

# Two test processes with one thread each: the suite is made of many small tests, and two processes
# with all threads each are slower than one. Programs that the tests start inherit the limit, and the
# bytecode of this package: a hundred processes import it. Dynamo collects no garbage at each function.
PYTEST := TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONDONTWRITEBYTECODE= \
          $(PY) -m pytest -n 2 --dist worksteal

GPU_TESTS := tests/hopper/test_gpu.py tests/triton/test_gpu.py tests/blocks/test_gpu.py \
             tests/integrations/test_gpu.py tests/inference/test_gpu.py tests/distributed/test_gpu.py

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make .venv with PyTorch, this package and its tools
	@scripts/setup.sh

.PHONY: train
train: setup ## train a small language model on text that every Python brings
	@.venv/bin/headway train $(ARGS)

.PHONY: test
test: setup ## run the tests
	@$(PYTEST) $(ARGS)

PART ?= tests $(wildcard tests/long/[a-z]*.py)
.PHONY: test-long
test-long: setup ## run every case, and whole tables and long sweeps: hours; PART=tests/long/hopper.py
	@$(PYTEST) -m "" $(PART) $(ARGS)

.PHONY: fuzz
fuzz: setup ## random calls against float64; ARGS="--cases 20000", ARGS="--seed 7" for one alone
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m fuzz $(ARGS)

.PHONY: gpu-test
gpu-test: setup ## run the table of cases on the GPU
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 14 --dist worksteal $(GPU_TESTS) $(ARGS)

.PHONY: gpu-fuzz
gpu-fuzz: setup ## the same on the GPU, 1000 calls of each backend; ARGS="--out file" keeps the summary
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m fuzz --backend triton hopper --cases 1000 $(ARGS)

.PHONY: gpu-sanitize
gpu-sanitize: setup ## the Triton backend's odd shapes under compute-sanitizer: memory, races
	@for tool in memcheck racecheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --report-api-errors no \
	    --error-exitcode 1 $(PY) tests/tools/odd_shapes.py || exit 1; \
	done

.PHONY: test-matrix
test-matrix: setup ## compile and test GPU kernels with the oldest and newest PyTorch and Triton
	@PYTHON=$(PY) scripts/test_matrix.sh $(ARGS)

.PHONY: aot
aot: setup ## compile every GPU kernel with no GPU, and print registers and spills
	@OMP_NUM_THREADS=1 $(PY) tests/tools/compile_table.py $(ARGS)

.PHONY: ptx
BASE ?= HEAD
ptx: setup ## prove that GPU kernels compile to the PTX that they do at BASE=commit; no GPU, minutes
	@$(PY) tests/tools/ptx_gate.py $(BASE) $(ARGS)

.PHONY: check
check: setup ## formatting, lint, types, who may import whom, and what makes source hard to read
	@$(PY) -m ruff format --check
	@$(PY) -m ruff check
	@.venv/bin/pyrefly check --summary=none
	@.venv/bin/lint-imports --no-logo
	@$(PY) scripts/structure.py

.PHONY: format
format: setup ## format the code and sort its imports
	@$(PY) -m ruff check --quiet --fix-only
	@$(PY) -m ruff format

.PHONY: docs
docs: setup ## build the documentation into site/, to be read with no network: site/index.html
	@OMP_NUM_THREADS=1 $(PY) scripts/docs/draw.py
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "site/index.html"

.PHONY: bench
bench: setup ## time forward and backward against what else you could use
	@.venv/bin/headway bench --output bench/results $(ARGS)

.PHONY: gpu-bench
gpu-bench: setup ## the same on the GPU, against FlexAttention, cuDNN and FlashAttention-4
	@.venv/bin/headway bench --device cuda --output bench/results $(ARGS)

.PHONY: picture
SPEEDS = bench/results/h200/bench-rows-2026-11-28.csv

picture: setup ## draw the pictures of speed on a GPU anew, from bench/results
	@$(PY) -m headway_lab.bench.figures picture $(SPEEDS) docs/pictures/speed.svg
	@$(PY) -m headway_lab.bench.figures curve $(SPEEDS) docs/pictures/speed-by-length.svg

.PHONY: package
package: setup ## build the wheel and the sdist in dist
	@$(PY) -m hatchling build

.PHONY: newcomer
newcomer: setup ## time the way from nothing to a first training step; ARGS go to pip
	@$(PY) scripts/newcomer.py $(ARGS)

.PHONY: hub
hub: setup ## lay the package out as a kernel of the Hugging Face Hub, in dist/hub
	@$(PY) scripts/hub_kernel.py dist/hub

.PHONY: golden
golden: setup ## write the generated kernels that the tests compare with; read the diff
	@$(PYTEST) --accept-golden $(ARGS)

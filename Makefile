# Needs Python 3.10 or later, with its venv module, and make; every target makes what it needs.
#
#   make demo            train a small model on two processes
#   make test            run the tests; PYTEST_ARGS="-k mesh" narrows them, "-m nightly" runs the long ones
#   make check           lint, types and architecture: what takes seconds
#   make conformance     run the suite that a backend must pass on all that is here, side by side; COLUMNS="cpu npu"
#   make one-device      what one device can show, in minutes; DEVICE=cuda
#   make npu-contract    compare what we use of torch_npu with its wheel, which is not installed
#   make bench           measure the cost on the host; BENCH names another script of benchmarks/
#
#   make test TORCH=2.11.0                                        another torch, in its own environment
#   make test TORCH_INDEX=URL                                     torch from another index, such as a CPU-only one

PYTHON ?= python3
TORCH ?= 2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH ?= host_overhead
BENCH_ARGS ?=
DEVICE ?= cuda
COLUMNS ?=
NPU_VERSION ?= $(TORCH)
NPU_WHEEL ?=

PINNED_TORCH := 2.13.0
VENV := $(if $(filter $(PINNED_TORCH),$(TORCH)),.venv,.venv-torch$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
RECIPE := setup.py pyproject.toml constraints.txt Makefile
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# Several processes share the machine in the demo and in the tests: one thread each.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types architecture check format conformance one-device npu-contract bench clean distclean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,/^Several/p' | sed '$$d'

venv: $(INSTALLED)

# torch goes first, by itself, because its index may be another one.
$(INSTALLED): $(RECIPE)
	@echo "installing torch $(TORCH) and the package into $(VENV)"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	grep -vE '^torch==$(if $(filter $(PINNED_TORCH),$(TORCH)),,|^setuptools==)' constraints.txt > $(VENV)/constraints.txt
	echo 'torch==$(TORCH)' >> $(VENV)/constraints.txt
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$(TORCH)'
	$(PIP) --constraint $(VENV)/constraints.txt --editable '.[test,demo]'
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) --constraint $(VENV)/constraints.txt --editable '.[dev,demo]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/torchrun --nproc-per-node 2 examples/train_tp.py $(DEMO_ARGS)

test: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/docstrings.py --quiet hyper_parallel backends
	$(BIN)/codespell

types: $(INSTALLED_DEV)
	$(BIN)/pyright --pythonpath $(BIN)/python

architecture: $(INSTALLED)
	$(BIN)/pytest tests/architecture

check: lint types architecture

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

conformance: $(INSTALLED)
	$(BIN)/python tests/support/conformance_table.py $(COLUMNS)

# Simulated ranks share the one device.
one-device: $(INSTALLED)
	$(BIN)/python -m hyper_parallel doctor --backend $(DEVICE) --conformance --ranks 1
	$(BIN)/python -m hyper_parallel doctor --backend $(DEVICE) --conformance --world simulated --ranks 4 --no-bandwidth
	$(BIN)/torchrun --nproc-per-node 1 examples/train_tp.py --device $(DEVICE) --plot '' $(DEMO_ARGS)
	$(BIN)/python benchmarks/loss.py --device $(DEVICE)
	$(BIN)/pytest -q --device $(DEVICE) tests/sim/parallel $(PYTEST_ARGS)

npu-contract: $(INSTALLED)
	test -n "$(NPU_WHEEL)" || $(BIN)/python -m pip --disable-pip-version-check download --quiet \
		--no-deps --dest build/torch_npu 'torch_npu==$(NPU_VERSION)'
	NPU_WHEEL="$(or $(NPU_WHEEL),$$(ls build/torch_npu/torch_npu-$(NPU_VERSION)-*.whl))" \
		$(BIN)/pytest tests/architecture/test_torch_npu.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/$(BENCH).py $(BENCH_ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-torch*

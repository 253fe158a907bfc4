# make tune    the main job: on a GPU a short Llama-2-7B LoRA study, without one tiny-llama on the CPU
# make test    everything that CI runs
# make setup   .venv alone
# make test-gpu    what a CPU cannot show, on one GPU
# PYTHON=python3 takes that interpreter as it is and builds nothing

ifeq ($(origin PYTHON),command line)
READY :=
else
override PYTHON := .venv/bin/python
READY := .venv/ready
endif

HAS_GPU = $(PYTHON) -c 'import pynvml; pynvml.nvmlInit(); raise SystemExit(not pynvml.nvmlDeviceGetCount())' 2>/dev/null
GPU_STUDY = --model llama2-7b --seq-len 512 --budget 9m
CPU_STUDY = --model tiny-llama --search-space quick --seq-len 128 --budget 3m

# so that no worker is left with a slow file while the others have nothing to do
SLOWEST_FIRST = tests/acceptance tests/isolation tests/contract tests/unit

.PHONY: setup tune test test-gpu lint

setup: $(READY)

.venv/ready: pyproject.toml constraints.txt
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

tune: $(READY)
	if $(HAS_GPU); then $(PYTHON) -m autocompile tune $(GPU_STUDY); else $(PYTHON) -m autocompile tune $(CPU_STUDY); fi

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test: lint
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --no-loadscope-reorder $(SLOWEST_FIRST)

test-gpu: $(READY)
	$(PYTHON) -m pytest -n 0 -v -s tests/gpu

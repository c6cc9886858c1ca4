# `make train` and `make test` work on a clean machine: they create what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# The environment of `make test-xla`.
XLA_VENV ?= .venv-xla
BIN := $(VENV)/bin
# Where torch comes from: empty is the default index of pip; set it to an index of CPU-only wheels to avoid CUDA
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# Tests that run at a time; many of them wait for processes that they start.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
# Processes of `make train`; empty lets fullshard choose: 2 on a CPU, one per device otherwise.
NPROC ?=
ARGS ?=

.PHONY: help venv train test test-full test-slice test-gpu test-versions test-xla test-web mutants lint format docs dist bench bench-more bench-gpu bench-rehearsal clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its wheel decides between CPU and CUDA, and nothing after it may change that choice.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run

# Only what training needs; a development environment has it already.
$(VENV)/.run: $(VENV)/.torch
	$(PIP_INSTALL) --editable '.[hf,plots]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	DS_BUILD_OPS=0 $(PIP_INSTALL) --editable '.[bench]'
	@touch $@

venv: $(VENV)/.dev  ## create .venv with everything for development

train: $(VENV)/.run  ## train the default model on 2 processes (options: ARGS="--steps 50 ...")
	$(BIN)/fullshard train $(if $(NPROC),--nproc $(NPROC)) $(ARGS)

test: $(VENV)/.dev  ## run the default tests
	$(PYTEST) -m 'not full and not gpu and not xla' $(ARGS)

test-full: $(VENV)/.dev  ## run the default and the slow tests
	$(PYTEST) -m 'not gpu and not xla' --hypothesis-profile drawn $(ARGS)

# Which fifth comes next, and what was run when, is in tests/slices.log.
test-slice: $(VENV)/.dev  ## run a fifth of the slow tests, and of other environments, in 50 minutes (options: SLICE=2)
	$(BIN)/python -m tests.slices --workers $(WORKERS) $(if $(SLICE),--slice $(SLICE)) $(ARGS)

test-gpu: $(VENV)/.dev  ## run the tests that need an accelerator
	$(BIN)/python -m pytest -m gpu $(ARGS)

# With another torch than the constraints say: make test-versions TORCH=2.11 PYTHON=python3.12
TORCH ?= 2.11
VERSIONS_VENV ?= .venv-torch-$(TORCH)-$(notdir $(PYTHON))
VERSIONS_PIP_INSTALL := $(VERSIONS_VENV)/bin/python -m pip install --quiet

$(VERSIONS_VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERSIONS_VENV)
	$(VERSIONS_PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$(TORCH).*'
	grep -v '^torch' constraints.txt > $(VERSIONS_VENV)/constraints.txt
	$(VERSIONS_PIP_INSTALL) --constraint $(VERSIONS_VENV)/constraints.txt --editable '.[dev]' 'torch==$(TORCH).*'
	@touch $@

test-versions: $(VERSIONS_VENV)/.dev  ## run the tests that another torch could fail (options: TORCH=2.11 PYTHON=python3.12)
	$(VERSIONS_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal \
		-m 'not full and not gpu and not xla' $(foreach name,\
		torch_private sharded_tensor torch_checkpoint traps_forward traps_backward traps_modes traps_compile fsdp_module \
		torch_tools plain_tensors step_in_backward extended deferred pipeline tensor_parallel checkpoint_ranks launch \
		accelerator_ranks lora preemption,$(shell find tests -name test_$(name).py)) $(ARGS)

# Of its own, because torch_xla needs a torch that is too old for the engine; so without the constraints, and fullshard
# without its torch. That of the default index brings CUDA's libraries with it, 6 GB in all; an index of CPU-only wheels
# does not.
XLA_PIP_INSTALL := $(XLA_VENV)/bin/python -m pip install --quiet
XLA_NEEDS := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	needs = [*project["dependencies"], *project["optional-dependencies"]["xla"]]; \
	print(*(need for need in needs if not need.startswith("torch>")), sep="\n")

$(XLA_VENV)/.xla: pyproject.toml
	$(PYTHON) -m venv $(XLA_VENV)
	$(XLA_PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.9.*'
	$(XLA_VENV)/bin/python -c '$(XLA_NEEDS)' > $(XLA_VENV)/needs.txt
	$(XLA_PIP_INSTALL) --requirement $(XLA_VENV)/needs.txt 'torch==2.9.*' \
		pytest pytest-timeout 'transformers==4.57.*' accelerate
	$(XLA_PIP_INSTALL) --no-deps --editable .
	@touch $@

test-xla: $(XLA_VENV)/.xla $(VENV)/.dev  ## run the tests of PyTorch/XLA, on 4 virtual devices of the CPU
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2 \
		PYTHONPATH=src:. ENGINE_PYTHON=$(BIN)/python \
		$(XLA_VENV)/bin/python -m pytest --noconftest -o filterwarnings= -m xla tests/xla $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.slices --note-xla)

# Of its own, because Gradio brings a web server with it; torch is not needed. The browser is the system's Chromium.
WEB_VENV ?= .venv-web
WEB_PIP_INSTALL := $(WEB_VENV)/bin/python -m pip install --quiet
WEB_NEEDS := $(subst ["xla"],["web"],$(XLA_NEEDS))

$(WEB_VENV)/.web: pyproject.toml
	$(PYTHON) -m venv $(WEB_VENV)
	$(WEB_VENV)/bin/python -c '$(WEB_NEEDS)' | grep -v accelerate > $(WEB_VENV)/needs.txt
	$(WEB_PIP_INSTALL) --requirement $(WEB_VENV)/needs.txt pytest pytest-timeout playwright
	$(WEB_PIP_INSTALL) --no-deps --editable .
	@touch $@

test-web: $(WEB_VENV)/.web  ## run the tests of the planner's page in a browser
	PYTHONPATH=src:. $(WEB_VENV)/bin/python -m pytest --noconftest -o filterwarnings= tests/cli/test_plan_page.py $(ARGS)

mutants: $(VENV)/.dev  ## change critical code, one place at a time, and see whether the default tests notice
	$(BIN)/python -m tests.mutants --measure
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(VENV)/.dev  ## check style, types, layers and budgets
	$(BIN)/python -m tests.budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files '*.py' '*.md' | xargs $(BIN)/codespell
	git ls-files '*.md' | xargs $(BIN)/proselint check --config proselint.json

format: $(VENV)/.dev  ## rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## build the documentation of this version into build/site, beside those of others
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)

DIST_VENV ?= .venv-dist

$(DIST_VENV)/.dist:
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install --quiet build twine cyclonedx-bom
	@touch $@

dist: $(DIST_VENV)/.dist  ## build and check the wheel and the sdist in dist/, and the tested versions as build/sbom.json
	rm -rf dist
	$(DIST_VENV)/bin/python -m build
	$(DIST_VENV)/bin/twine check --strict dist/*
	mkdir -p build
	$(DIST_VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-file build/sbom.json constraints.txt

bench: $(VENV)/.bench  ## compare with the other engines on 2 processes (options: ARGS="--quick")
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-more: $(VENV)/.bench  ## what `bench` leaves out: 4 ranks, two hosts (as root), host time, checkpoints, loading
	$(BIN)/python -m benchmarks.run --ranks 4 --rows '124m-fp32-1x128'
	$(BIN)/python -m benchmarks.run --rows '124m-fp32-1x128' --name cpu-2ranks-less-memory \
		--engines fsdp2 fullshard fullshard-in-backward fullshard-offload
	$(BIN)/python -m benchmarks.hosts
	$(BIN)/python -m benchmarks.host_time
	$(BIN)/python -m benchmarks.timeline --svg docs/performance.svg
	$(BIN)/python -m benchmarks.checkpoint --dir build/bench --repeats 5
	$(BIN)/python -m benchmarks.checkpoint --dir build/bench --millions 1000 --without-async --checksum-repeats 0
	$(BIN)/python -m benchmarks.muon
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.loading --form nf4
	$(BIN)/python -m benchmarks.quantized_step
	$(BIN)/python -m benchmarks.pages

bench-gpu: $(VENV)/.bench  ## compare on one GPU: one rank, compiled, two ranks that share it (options: ARGS="--quick")
	$(BIN)/python -m benchmarks.run --device cuda --ranks 1 --repeats 3 $(ARGS)
	$(BIN)/python -m benchmarks.run --device cuda --ranks 1 --repeats 3 --compile $(ARGS)
	$(BIN)/python -m benchmarks.run --device cuda --ranks 1 --repeats 3 --name cuda-1ranks-less-memory \
		--rows '1b-bf16-*' --engines fsdp2 fsdp2-offload fullshard fullshard-offload fullshard-in-backward $(ARGS)
	$(BIN)/python -m benchmarks.run --device cuda --ranks 2 --repeats 1 --engines fsdp2 fullshard --rows 'tiny-*' $(ARGS)
	$(BIN)/python -m benchmarks.overlap

bench-rehearsal: $(VENV)/.bench  ## both engines as one rank of many on one GPU; repeat until nothing is left
	$(BIN)/python -m benchmarks.rehearsal --seconds 450 $(ARGS)

clean:  ## remove caches and the default output of `make train`; .venv stays
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

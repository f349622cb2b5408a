# Every target sets up .venv by itself. PYTHON picks the interpreter (3.10 or later), PIP_ARGS goes to
# pip: on a machine without a GPU, PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# takes the small build of torch.
PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
TARGETS := sm_80 sm_86 sm_90 sm_100 gfx942
STAMP := $(VENV)/.installed
# the import package is put together from four folders; type checkers see it through links
TYPED := build/typecheck
MYPY := $(abspath $(BIN))/mypy --cache-dir $(abspath .mypy_cache) --config-file $(abspath pyproject.toml)

.PHONY: demo test lint format test-gpu test-gpu-dry compile-all machine-code fuzz mutants digits clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python -m linalg_dsl demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

# random recurrences from end to end: MINUTES long, seeds printed, failures in build/fuzz
MINUTES ?= 60
SEED ?=
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m linalg_dsl.testing.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# the property kit against typical faults of kernels, half an hour of one core: docs/mutants.md
mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/testing/mutants.py --jobs $(JOBS) --write docs/mutants.md

# the table of docs/precision.md: every entry of the catalogue at every nasty end, a quarter of an hour of one core
digits: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m linalg_dsl.testing.digits --jobs $(JOBS)

test-gpu: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m gpu -n $(JOBS)

# tests and scripts of a GPU walked where there is none, an hour of one core: CONTRIBUTING.md
DRY := $(BIN)/python tests/stand_in/run.py tests/gpu
DRY_BENCH := build/dry-bench
test-gpu-dry: $(STAMP)
	OMP_NUM_THREADS=1 LINALG_DSL_GPU_DRY=1 $(BIN)/python -m pytest -q -m gpu -n $(JOBS) tests/gpu
	-$(DRY)/measure.py check --jobs $(JOBS) --sizes small  # its errors are no numbers, so it says that it failed
	$(DRY)/measure.py kernels
	-$(DRY)/measure_decode.py
	$(DRY)/measure_packed.py
	-$(DRY)/measure_levels.py
	$(DRY)/measure_steps.py
	$(DRY)/measure_layer.py --sizes 2 130 128 2
	$(DRY)/first_call.py kda
	-$(DRY)/run_benchmarks.py --jobs $(JOBS) --out $(DRY_BENCH)
	$(DRY)/write_benchmarks.py $(DRY_BENCH)/rows.json > $(DRY_BENCH)/BENCHMARKS.md
	$(DRY)/fit_model.py $(DRY_BENCH)/rows.json

# what machine code for sm_90 would touch beside its tensors, half an hour of one core: docs/testing.md
machine-code: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/machine_code.py sm_90 linear_attention,gla,gated_delta_rule 256,64 64,256 100,60 16,128

# an hour of one core: JOBS targets at a time
compile-all: $(STAMP)
	$(MAKE) --output-sync=target --keep-going -j $(JOBS) $(TARGETS:%=compile-for-%)

compile-for-%: $(STAMP)
	$(BIN)/python -m linalg_dsl compile --all --target $*

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED)
	mkdir -p $(TYPED)/linalg_dsl
	for path in linalg_dsl/* codegen ops templates; do ln -s "$(CURDIR)/$$path" $(TYPED)/linalg_dsl/; done
	ln -s "$(CURDIR)/tests" $(TYPED)/tests
	cd $(TYPED) && $(MYPY) -p linalg_dsl
	cd $(TYPED) && $(MYPY) tests

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[triton,test,dev]'
	touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

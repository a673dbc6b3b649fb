# `make chat` and `make test` do all the set-up themselves.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# The CUDA extra is chosen by the driver that is there: "12" or "13", empty without one.
# Drivers from 610 on say "CUDA UMD Version".
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA \(UMD \)\{0,1\}Version: \([0-9]*\).*/\2/p' | sed 's/^1[4-9]$$/13/')
EXTRA := $(if $(filter 12 13,$(CUDA)),cuda$(CUDA))
comma := ,

# llvmlite takes hours to build, and needs LLVM's sources: only its wheels are of use.
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check --only-binary llvmlite --editable

.DEFAULT_GOAL := help
.PHONY: help chat serve ray test test-all style lint bench quality gpu-test gpu-bench gpu-first compile-all soak readme clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

# $(call install,EXTRAS) installs polarlm with the extra 'cpu', where that can be had, and these.
define install
@test -x $(PY) || $(PYTHON) -m venv $(VENV)
@echo "Installing polarlm into $(VENV), with the extras $(subst $(comma),$(comma) ,cpu,$(1)$(if $(EXTRA),$(comma)$(EXTRA)))"
@$(INSTALL) '.[cpu,$(1)$(if $(EXTRA),$(comma)$(EXTRA))]' || { \
    echo "The extra 'cpu' cannot be installed here: the CPU will compute with NumPy alone." >&2; \
    $(INSTALL) '.[$(1)$(if $(EXTRA),$(comma)$(EXTRA))]'; }
endef

$(VENV)/.installed: pyproject.toml
	$(call install,hub)
	@touch $@

# One run of pip installs all of it: each run prepares the package anew, which takes seconds.
$(VENV)/.installed-dev: pyproject.toml
	$(call install,hub$(comma)dev$(comma)bench$(comma)serve)
	@touch $(VENV)/.installed $@

chat: $(VENV)/.installed  ## chat with the demonstration model (PROMPT="…" answers once, ARGS="…" adds flags)
	@$(PY) -m polarlm chat $(if $(PROMPT),--single-turn --prompt "$$PROMPT") $(ARGS) $(if $(PROMPT),< /dev/null)
chat: export PROMPT := $(PROMPT)

$(VENV)/.installed-serve: $(VENV)/.installed
	@echo "Installing the server's packages into $(VENV)"
	@$(INSTALL) '.[serve$(if $(EXTRA),$(comma)$(EXTRA))]'
	@touch $@

serve: $(VENV)/.installed-serve  ## serve an HTTP API (ARGS="…" adds flags)
	@$(PY) -m polarlm serve $(ARGS)

$(VENV)/.installed-ray: $(VENV)/.installed
	@echo "Installing Ray Serve and the server's packages into $(VENV)"
	@$(INSTALL) '.[serve,ray$(if $(EXTRA),$(comma)$(EXTRA))]'
	@touch $@

# Ray's controller looks once a second whether all is well, not ten times: the replicas have the same cores.
ray: export RAY_SERVE_CONTROL_LOOP_INTERVAL_S ?= 1
ray: $(VENV)/.installed-ray  ## serve two replicas with Ray Serve (CONFIG=FILE takes another configuration)
	@$(if $(CONFIG),,$(PY) -m scripts.fetch_demo)
	@$(PY) -m ray.serve.scripts run "$(or $(CONFIG),examples/ray_serve/replicas.yaml)"

# One process for each core (tests/conftest.py), with one BLAS thread: two threads each on two cores are many times slower
# than one.
test: export OMP_NUM_THREADS = 1
test: export OPENBLAS_NUM_THREADS = 1
# Also where Python is told to write no bytecode: without that of the tests, each process compiles their assertions anew.
test: export PYTHONDONTWRITEBYTECODE =
# Types are checked while the tests run, which leave a core idle now and then: before them that would take most of a minute
# the first time. They are told at the end.
test: $(VENV)/.installed-dev style  ## run the checks that take minutes: style, types, tests
	@$(PY) -m mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	$(PY) -m pytest -n auto --maxprocesses 8 -m "not slow" $(ARGS); tests=$$?; \
	wait $$types || types=wrong; cat $(VENV)/types.txt; test $$tests = 0 && test $$types != wrong

test-all: export OMP_NUM_THREADS = 1
test-all: export OPENBLAS_NUM_THREADS = 1
test-all: test  ## the same, then the slow tests
	@$(PY) -m pytest -n auto --maxprocesses 8 -m slow $(ARGS)

style: $(VENV)/.installed-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .

lint: style  ## ruff and mypy
	@$(PY) -m mypy

bench: $(VENV)/.installed-dev  ## speed on this machine (ARGS="…" adds flags)
	@$(PY) -m polarlm speed $(ARGS)

quality: $(VENV)/.installed-dev  ## what each cache type costs on a text (TEXT=FILE, ARGS="…" adds flags)
	@$(PY) -m polarlm quality $(if $(TEXT),"$(TEXT)") $(ARGS)

# On a machine whose own Python has all that is needed: make gpu-test PY=python3
READY := $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.installed-dev)

gpu-test: $(READY)  ## run the kernels' tests on the GPU that is there (ARGS="…" adds flags, and those of pytest)
	@$(PY) -m scripts.gpu_test $(ARGS)

gpu-bench: $(READY)  ## a model's requests and the kernels on the GPU that is there (WEIGHTS=…, ARGS="--llama-cpp FOLDER …")
	@$(PY) -m polarlm.bench.lab.gpu $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(ARGS)

gpu-first: $(READY)  ## tests, families and speed of a GPU that is new to this code, within nine minutes, from nothing
	@$(PY) -m scripts.gpu_first $(ARGS)

compile-all: $(VENV)/.installed-dev  ## compile every kernel for every architecture; needs no GPU
	@$(PY) -m scripts.compile_all

soak: $(VENV)/.installed-dev  ## a server of several models with all clients, unloadings and kills (ARGS="--minutes 60")
	@$(PY) -m scripts.soak $(ARGS)

readme: $(VENV)/.installed  ## write the generated parts of the documents anew
	@$(PY) -m scripts.docs
	@$(PY) -m polarlm.bench.lab.tables

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

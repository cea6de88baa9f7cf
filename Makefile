# Every target sets up .venv by itself, from requirements.lock. `make help` lists them.
# TORCH= overrides the torch requirement, e.g. make test TORCH=torch==2.12.0

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= $(shell grep '^torch==' requirements.lock)
VENV   ?= .venv
RUN    := $(VENV)/bin/
PIP    := $(RUN)python -m pip --disable-pip-version-check --quiet
# Another torch requirement is another stamp, so that changing TORCH installs it.
READY  := $(VENV)/.ready-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
PEERS  := $(VENV)/.peers
GOLDEN_SPECS := dlrm llm_vocab mixed
GOLDEN_TRAINED := dlrm:rowwise_adagrad llm_vocab:adam mixed:sgd+l2

.PHONY: help setup shell demo test soak baseline baseline-write seeded coverage bench footprint oracle lanes lint format golden wheel lock clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

setup: $(READY) ## .venv from the lock, embforge editable in it

shell: $(READY) ## a shell in which `python` and `embforge` are those of .venv
	@echo 'python and embforge are those of $(VENV); `exit` leaves this shell'
	@VIRTUAL_ENV='$(abspath $(VENV))' PATH="$(abspath $(VENV))/bin:$$PATH" "$${SHELL:-/bin/sh}"

demo: $(READY) ## everything once: kernels for this CPU and eight GPU generations, checked and timed (3 minutes)
	$(RUN)embforge demo

test: $(READY) ## all tests (10 minutes at most)
	$(RUN)python -m pytest -n 2 --dist worksteal -m "not soak"

soak: $(READY) ## kills, fuzzing (EMBFORGE_FUZZ_MINUTES, by default 10) and long runs
	HYPOTHESIS_PROFILE=soak $(RUN)python -m pytest -m "soak or hypothesis"

baseline: $(READY) ## are results and machine code those of tests/baseline/digests.json? (5 minutes)
	PYTHONPATH=tests $(RUN)python -m baseline check

baseline-write: $(READY) ## write these digests again, after a change that is meant to alter them
	PYTHONPATH=tests $(RUN)python -m baseline write

seeded: $(READY) ## do tests see each bug of tests/seeded/bugs.toml? ONLY=TEXT takes some (11 minutes)
	PYTHONPATH=tests $(RUN)python -m seeded $(if $(ONLY),'$(ONLY)')

coverage: $(READY) ## which lines of product code and which templates does `make test` reach? (20 minutes)
	$(PIP) install 'coverage>=7.10'
	PYTHONPATH=tests $(RUN)python -m covered

bench: $(READY) $(PEERS) ## lookups and training steps on this CPU, compared with torch, FBGEMM, TorchRec (35 minutes); writes dated JSON
	$(RUN)python -m benchmarks.build_times
	status=0; for part in "run forward" "run training" linear sharded; do \
	    $(RUN)python -m benchmarks.$$part || status=1; done; exit $$status

footprint: $(READY) ## bytes of a CPU-only install in a new environment, in addition to torch's own (2 minutes)
	$(RUN)python -m benchmarks.footprint

oracle: $(READY) ## ten runs of the tuner, compared with completely measured spaces (40 minutes); rewrites docs/tuning.md
	$(RUN)python -m benchmarks.oracle tries --write

lanes: $(READY) ## what the lanes of a GPU would do, counted by the emulated one; rewrites docs/emulated_gpu.md
	$(RUN)python -m benchmarks.lanes --write

lint: $(READY) ## ruff, format, types, who imports whom, plain English
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	PYTHONPATH=src $(RUN)lint-imports --no-cache --no-logo
	PYTHONPATH=tests $(RUN)python -m words

format: $(READY) ## let ruff rewrite what it can
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

golden: $(READY) ## regenerate generated/ from examples/specs
	rm -rf $(addprefix generated/,$(GOLDEN_SPECS))
	set -e; for spec in $(GOLDEN_SPECS); do \
	    $(RUN)embforge gen $$spec --target cuda --arch sm_90 --arch sm_100 --sources-only --out generated/$$spec; \
	    $(RUN)embforge gen $$spec --target cpu --arch avx512 --arch avx2 --arch neon --sources-only --out generated/$$spec; \
	done; for pair in $(GOLDEN_TRAINED); do \
	    spec=$${pair%%:*}; words="--train $${pair#*:} --sources-only --out generated/$$spec"; \
	    $(RUN)embforge gen $$spec --target cuda --arch sm_90 $$words; \
	    $(RUN)embforge gen $$spec --target cpu --arch avx512 $$words; \
	done

wheel: $(READY) ## dist/embforge-*.whl
	$(RUN)python -m build --wheel --no-isolation --outdir dist .

lock: $(READY) ## write what .venv holds into requirements.lock (after a pip install into it)
	$(PIP) freeze --all --exclude pip --exclude-editable | sed -E -e 's/\+cpu$$//' \
	    -e "s/^((cuda|nvidia)-.*)$$/\1; sys_platform != 'darwin'/" > requirements.lock

clean: ## remove everything that make made
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first and alone: its wheels pin CUDA packages of their own. The lock is complete, so nothing after it
# is resolved (--no-deps) and nothing can pull another torch.
$(READY): requirements.lock pyproject.toml
	@test -x $(RUN)python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'embforge needs Python 3.11 or later; found: $(or $(PYTHON),none). Name one by make PYTHON=...' >&2; exit 1; }
	test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	$(PIP) install '$(TORCH)'
	grep -v '^torch==' requirements.lock > $(VENV)/without-torch.txt
	$(PIP) install --no-deps -r $(VENV)/without-torch.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

$(PEERS): requirements-peers.lock $(READY)
	$(PIP) install --no-deps -r requirements-peers.lock
	touch $@

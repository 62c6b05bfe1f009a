#!/bin/bash
# A GPU for each rank, and cores beside it. First every rank says where it is, then training begins, on the GPUs if
# torch can use them.
#
#   sbatch jobscripts/gpu.sh
#   sbatch --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=7 jobscripts/gpu.sh
#
# There are two ways to hand out GPUs. In both a rank takes GPU (local rank) modulo (GPUs that it sees):
#
#   --gpus-per-node=4    every rank sees all GPUs of its node. Taken here: ranks of a node can read each other's
#                        memory (CUDA IPC, NVLink) only if they see each other's GPUs
#   --gpus-per-task=1    every rank sees one, its own, and no mistake in a program can take another's. Write it in
#                        the place of --gpus-per-node below
#
# A rank's cores should be of the NUMA domain that its GPU hangs on (`nvidia-smi topo -m` shows which), or all that it
# copies to the GPU crosses the socket. Where GPU 0 is on the first domain, and so on, consecutive cores fit:
# --cpus-per-task = cores of a node / ranks, --cpu-bind=cores below. Where they are numbered otherwise (LUMI, Frontier:
# GPU 4 is on domain 0), name the cores of each rank: srun --cpu-bind=mask_cpu:…, or let Slurm choose GPUs by cores:
# --gpu-bind=closest (which, like --gpus-per-task, hides the others).
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# --- site: the same in every script (README.md) -------------------------------------------------------
##SBATCH --account=project
##SBATCH --partition=standard
# module load hpcpar              # or whatever has Python and MPI at your site
# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
# ------------------------------------------------------------------------------------------------------
set -euo pipefail

configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# Each rank on its own cores, for all steps of this job.
export SLURM_CPU_BIND=cores

# shellcheck disable=SC2016    # the variables are those of the ranks
srun --kill-on-bad-exit=1 bash -c 'echo "rank $SLURM_PROCID on $SLURMD_NODENAME: local rank $SLURM_LOCALID, \
GPUs seen: ${CUDA_VISIBLE_DEVICES:-${ROCR_VISIBLE_DEVICES:-none}}, cores: $(taskset -cp $$ | sed "s/.*: //")"' | sort -V

device=$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
[ "$device" = cuda ] || echo "WARNING: torch sees no GPU (a CPU build, no driver, or none allocated): training on CPUs" >&2

hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    train.device="$device" \
    output.directory="runs/gpu-$SLURM_JOB_ID" "$@"

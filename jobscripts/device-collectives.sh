#!/bin/bash
# How fast are collectives on the memory of GPUs here: by each way that hpcpar has (reading it where it lies, over a
# CUDA-aware MPI, through the host), beside copies within a GPU, the MPI library's own, gloo and NCCL. One rank for each
# GPU. Run it once on the nodes that you train on, and after a change of MPI or driver. JSON lines are in runs/.
#
#   sbatch jobscripts/device-collectives.sh
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 jobscripts/device-collectives.sh --max-bytes 1G
#
# All words are options of benchmarks/device_collectives.py. Each rank must see all GPUs of its node
# (--gpus-per-node, not --gpus-per-task): only then can ranks read each other's memory.
# Submit from the directory that has .venv and benchmarks; nodes, tasks and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-device-collectives
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

# --- site: the same in every script (README.md) -------------------------------------------------------
##SBATCH --account=project
##SBATCH --partition=standard
# module load hpcpar              # or whatever has Python and MPI at your site
# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
# ------------------------------------------------------------------------------------------------------
set -euo pipefail

mkdir -p runs

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
hpcpar run -n "$SLURM_NTASKS" -- benchmarks/device_collectives.py \
    --json "runs/device-collectives-$SLURM_JOB_ID.jsonl" "$@"

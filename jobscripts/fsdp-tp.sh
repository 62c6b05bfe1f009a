#!/bin/bash
# ZeRO stage 3 (FSDP) between nodes, tensor and sequence parallelism within them: the ranks of a node compute each
# layer together, so that activations and the layers in use are divided, too. For sequences that are too long for a
# rank, and for more ranks than sequences. mesh.tp must divide the tasks on a node and the model's heads.
#
#   sbatch jobscripts/fsdp-tp.sh examples/tiny.toml train.steps=200
#   sbatch jobscripts/fsdp-tp.sh examples/tiny.toml mesh.tp=2 train.recompute=selective
#
# To see what the degree does to speed and memory, see examples/fsdp_tp.py.
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-fsdp-tp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
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
# `hpcpar run` starts a rank for each task through srun, in the language of the MPI library that is there.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    optimizer.zero_stage=3 \
    mesh.tp=4 tensor_parallel.sequence_parallel=true \
    train.precision=bfloat16 optimizer.prefetch=1 \
    output.directory="runs/fsdp-tp-$SLURM_JOB_ID" "$@"

#!/bin/bash
# ZeRO stage 3 (FSDP): parameters are spread over the ranks like gradients and the optimizer's state, and a layer is
# gathered when it is used: 16/p bytes for each parameter on p ranks, and the layers in use. It sends half as much
# again as stages 0 to 2 (many-nodes.sh), and in every microbatch: for fast networks, and for what does not fit
# otherwise. If a single sequence's activations do not fit either, take fsdp-tp.sh.
#
#   sbatch jobscripts/zero-3.sh examples/tiny.toml train.steps=200
#   sbatch jobscripts/zero-3.sh examples/tiny.toml optimizer.prefetch=2
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-zero-3
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
    train.precision=bfloat16 optimizer.prefetch=1 \
    output.directory="runs/zero-3-$SLURM_JOB_ID" "$@"

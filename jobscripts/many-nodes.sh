#!/bin/bash
# Data parallelism on many nodes: gradients are averaged over all ranks while backward still runs, and the optimizer's
# state is spread over them (ZeRO stage 1, which is free). For models of which parameters and gradients fit into a
# rank's memory: with Adam in float32 8 + 8/p bytes for each parameter on p ranks.
#
#   sbatch jobscripts/many-nodes.sh
#   sbatch --nodes=16 jobscripts/many-nodes.sh examples/tiny.toml train.global_batch=256
#   sbatch jobscripts/many-nodes.sh examples/tiny.toml train.precision=bfloat16      4 + 12/p bytes for each parameter
#   sbatch jobscripts/many-nodes.sh examples/tiny.toml optimizer.zero_stage=2        gradients spread, too
#   sbatch jobscripts/many-nodes.sh examples/tiny.toml optimizer.zero_stage=0        nothing spread
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-many-nodes
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
    optimizer.zero_stage=1 \
    output.directory="runs/many-nodes-$SLURM_JOB_ID" "$@"

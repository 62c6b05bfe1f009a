#!/bin/bash
#SBATCH --job-name=hpcpar-zero1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# ZeRO stage 1: optimizer state is spread over the ranks; what is sent stays the same, 2 values for each parameter
# and step. Free, so the stage to begin with: in bfloat16 a rank keeps 4 + 12/p bytes for each parameter.
#
#   sbatch jobscripts/zero-1.sh examples/tiny.toml train.steps=200
#
# The first word is the configuration (default: examples/tiny.toml); all others override its keys. Submit from the
# directory that holds .venv, or load your site's modules here; nodes, tasks and cores are options of sbatch, too.
set -euo pipefail

[ -f .venv/bin/activate ] && . .venv/bin/activate
configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

# `hpcpar run` starts one rank for each task through srun, in the language of the loaded MPI library.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    optimizer.zero_stage=1 \
    train.precision=bfloat16 \
    output.directory="runs/zero1-$SLURM_JOB_ID" "$@"

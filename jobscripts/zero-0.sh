#!/bin/bash
#SBATCH --job-name=hpcpar-zero0
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# ZeRO stage 0: every rank holds parameters, gradients and optimizer state whole, and gradients are all-reduced.
# For models that fit: with Adam in float32, 16 bytes for each parameter on every rank.
#
#   sbatch jobscripts/zero-0.sh examples/tiny.toml train.steps=200
#
# The first word is the configuration (default: examples/tiny.toml); all others override its keys. Submit from the
# directory that holds .venv, or load your site's modules here; nodes, tasks and cores are options of sbatch, too.
set -euo pipefail

[ -f .venv/bin/activate ] && . .venv/bin/activate
configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

# `hpcpar run` starts one rank for each task through srun, in the language of the loaded MPI library.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    optimizer.zero_stage=0 \
    output.directory="runs/zero0-$SLURM_JOB_ID" "$@"

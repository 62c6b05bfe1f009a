#!/bin/bash
#SBATCH --job-name=hpcpar-zero3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# ZeRO stage 3: parameters are spread, too: 16/p bytes for each, and the layers in use. Sends half as much again as
# stages 1 and 2, and in every microbatch: for fast networks, and for what does not fit otherwise.
#
#   sbatch jobscripts/zero-3.sh examples/tiny.toml train.steps=200
#
# The first word is the configuration (default: examples/tiny.toml); all others override its keys. Submit from the
# directory that holds .venv, or load your site's modules here; nodes, tasks and cores are options of sbatch, too.
set -euo pipefail

[ -f .venv/bin/activate ] && . .venv/bin/activate
configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

# `hpcpar run` starts one rank for each task through srun, in the language of the loaded MPI library.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    optimizer.zero_stage=3 \
    train.precision=bfloat16 optimizer.prefetch=1 \
    output.directory="runs/zero3-$SLURM_JOB_ID" "$@"

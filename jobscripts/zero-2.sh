#!/bin/bash
#SBATCH --job-name=hpcpar-zero2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# ZeRO stage 2: gradients are spread, too: 2 + 14/p bytes for each parameter in bfloat16. Without accumulation as
# free as stage 1; each further microbatch sends 1 value more for each parameter.
#
#   sbatch jobscripts/zero-2.sh examples/tiny.toml train.steps=200
#
# The first word is the configuration (default: examples/tiny.toml); all others override its keys. Submit from the
# directory that holds .venv, or load your site's modules here; nodes, tasks and cores are options of sbatch, too.
set -euo pipefail

[ -f .venv/bin/activate ] && . .venv/bin/activate
configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

# `hpcpar run` starts one rank for each task through srun, in the language of the loaded MPI library.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    optimizer.zero_stage=2 \
    train.precision=bfloat16 \
    output.directory="runs/zero2-$SLURM_JOB_ID" "$@"

#!/bin/bash
#SBATCH --job-name=hpcpar-fsdp-tp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# ZeRO stage 3 (FSDP) between nodes, tensor and sequence parallelism within them: the ranks of a node compute each
# layer together, so that activations and the layers in use are divided, too. For sequences that are too long for a
# rank, and for more ranks than sequences. mesh.tp must divide the tasks on a node and the model's heads.
#
#   sbatch jobscripts/fsdp-tp.sh examples/tiny.toml train.steps=200
#   sbatch jobscripts/fsdp-tp.sh examples/tiny.toml mesh.tp=2 train.recompute=selective
#
# The first word is the configuration (default: examples/tiny.toml); all others override its keys. Submit from the
# directory that holds .venv, or load your site's modules here; nodes, tasks and cores are options of sbatch, too.
# To see what the degree does to speed and memory, see examples/fsdp_tp.py.
set -euo pipefail

[ -f .venv/bin/activate ] && . .venv/bin/activate
configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

# `hpcpar run` starts one rank for each task through srun, in the language of the loaded MPI library.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    optimizer.zero_stage=3 \
    mesh.tp=4 tensor_parallel.sequence_parallel=true \
    train.precision=bfloat16 optimizer.prefetch=1 \
    output.directory="runs/fsdp-tp-$SLURM_JOB_ID" "$@"

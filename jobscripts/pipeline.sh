#!/bin/bash
#SBATCH --job-name=hpcpar-pipeline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# A pipeline across nodes, tensor parallelism within them, and replicas of both if there are more nodes: only
# activations of a few microbatches cross the network. mesh.pp counts the nodes that share the layers; mesh.tp must
# divide the tasks on a node. More microbatches (global_batch over microbatch and mesh.dp) make the bubble smaller:
#
#   sbatch jobscripts/pipeline.sh examples/tiny.toml train.global_batch=32
#   sbatch jobscripts/pipeline.sh examples/tiny.toml pipeline.schedule=zb-h1
#   sbatch --nodes=4 jobscripts/pipeline.sh examples/tiny.toml optimizer.zero_stage=1
#
# The first word is the configuration (default: examples/tiny.toml); all others override its keys. Submit from the
# directory that holds .venv, or load your site's modules here; nodes, tasks and cores are options of sbatch, too.
# `hpcpar draw pipeline` lists the schedules, and draws what each of them does.
set -euo pipefail

[ -f .venv/bin/activate ] && . .venv/bin/activate
configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

# `hpcpar run` starts one rank for each task through srun, in the language of the loaded MPI library.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    mesh.pp=2 mesh.tp=2 train.microbatch=2 \
    pipeline.schedule=1f1b optimizer.zero_stage=1 \
    output.directory="runs/pipeline-$SLURM_JOB_ID" "$@"

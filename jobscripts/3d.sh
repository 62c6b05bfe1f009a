#!/bin/bash
# All three axes: a pipeline across nodes, tensor parallelism within them, and replicas of both (data parallelism).
# Only activations of a few microbatches cross the network within a replica, and gradients between replicas. For
# models of which a node cannot hold the layers. mesh.pp counts the nodes that share the layers, mesh.tp must divide
# the tasks on a node, and what remains of the ranks is dp:
#
#     node1   pp0:  dp0 [tp0 tp1]  dp1 [tp0 tp1]        first half of the layers
#     node2   pp1:  dp0 [tp0 tp1]  dp1 [tp0 tp1]        second half
#
# More microbatches (global_batch over microbatch and dp) make the bubble smaller, and schedules differ in it:
# `hpcpar draw pipeline` lists and draws them.
#
#   sbatch jobscripts/3d.sh examples/tiny.toml train.global_batch=32
#   sbatch jobscripts/3d.sh examples/tiny.toml pipeline.schedule=zb-h1
#   sbatch --nodes=4 jobscripts/3d.sh examples/tiny.toml mesh.pp=4
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-3d
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
    mesh.pp=2 mesh.tp=2 train.microbatch=2 \
    pipeline.schedule=1f1b optimizer.zero_stage=1 \
    output.directory="runs/3d-$SLURM_JOB_ID" "$@"

#!/bin/bash
# Expert parallelism: the ranks of a node divide the experts of every mixture among themselves, and tokens travel to
# theirs and home within the node. Nodes are replicas, over which optimizer state is divided (ZeRO 1): that of experts
# over the ranks with copies of them. mesh.ep must divide the tasks of the job, and needs not divide the experts.
#
#   sbatch jobscripts/experts.sh examples/mixture.toml
#   sbatch jobscripts/experts.sh examples/mixture.toml model.preset=mixtral-8x7b train.sequence=4096 mesh.ep=8
#
# The last has experts on both nodes: a token then goes once to a node, and there to its experts. How experts are
# balanced, and what travels: docs/expert-parallel.md.
# The first word is the configuration (default: examples/mixture.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-experts
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

configuration=${1:-examples/mixture.toml}
[ $# -gt 0 ] && shift

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# `hpcpar run` starts a rank for each task through srun, in the language of the MPI library that is there.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    mesh.ep=4 optimizer.zero_stage=1 \
    output.directory="runs/experts-$SLURM_JOB_ID" "$@"

#!/bin/bash
# Context parallelism: all ranks of a node share each sequence, and nodes are replicas over which optimizer state is
# divided (ZeRO 1). For sequences whose activations do not fit into a rank; unlike with tensor parallelism, neither
# heads nor sequence need divide by the ranks. mesh.cp must divide the tasks of the job.
#
#   sbatch jobscripts/context.sh examples/tiny.toml train.sequence=1024
#   sbatch jobscripts/context.sh examples/tiny.toml data.pack_documents=true
#   sbatch jobscripts/context.sh examples/tiny.toml mesh.cp=8 context_parallel.method=ulysses+exchange
#
# The last has sequences on both nodes: heads are exchanged within a node, keys and values between nodes. The methods,
# and when to take which: docs/context-parallel.md.
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-context
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
    mesh.cp=4 optimizer.zero_stage=1 \
    output.directory="runs/context-$SLURM_JOB_ID" "$@"

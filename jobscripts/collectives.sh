#!/bin/bash
# How fast are collectives here: ours by size, beside those of the MPI library. Run it once on the nodes and with the
# ranks that you train on, and after a change of MPI or of its settings. JSON lines and a picture are in runs/.
#
#   sbatch jobscripts/collectives.sh
#   sbatch --nodes=8 jobscripts/collectives.sh --max-bytes 256M --candidates chosen,mpi
#
# All words are options of `hpcpar bench collectives`. `hpcpar bench fit FILE` makes of the lines what `hpcpar bench
# simulate` prices any number of ranks with, and `hpcpar bench tune` lets jobs choose by measurement.
# Submit from the directory that has .venv; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-collectives
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

mkdir -p runs

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar bench collectives \
    --collective allreduce --collective reduce_scatter --collective allgather --collective alltoall \
    --candidates chosen,native,mpi \
    --json "runs/collectives-$SLURM_JOB_ID.jsonl" --output "runs/collectives-$SLURM_JOB_ID.png" "$@"

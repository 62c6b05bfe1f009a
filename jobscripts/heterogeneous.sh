#!/bin/bash
# Nodes of two kinds in one training run: a heterogeneous job, whose components together form one MPI world. All ranks
# do the same share of the work, so a larger node gets more of them. (With ranks on GPUs in one component and on CPUs
# in the other the slower ones would set the pace.)
#
#   component 0    one large node     2 ranks
#   component 1    two small nodes    1 rank each
#
#   sbatch jobscripts/heterogeneous.sh
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples. Options of sbatch are for component 0; those of 1 are below, after hetjob.
#SBATCH --job-name=hpcpar-heterogeneous
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1

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

export OMP_NUM_THREADS=1

# --het-group names the components that a step is in; without it a step is in the first one alone. `hpcpar run` is for
# jobs of one component.
srun --het-group=0,1 --kill-on-bad-exit=1 python -m hpcpar train "$configuration" \
    optimizer.zero_stage=1 \
    output.directory="runs/heterogeneous-$SLURM_JOB_ID" "$@"

#!/bin/bash
# An unchanged Horovod program: `import horovod.torch as hvd` in it, and in its children, means hpcpar's.
#
#   sbatch jobscripts/horovod.sh
#   sbatch --nodes=4 jobscripts/horovod.sh train.py --lr 0.1
#
# The first word is the program (default: examples/horovod_digits.py), all others are the program's own. Submit from
# the directory that has .venv; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-horovod
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
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

program=${1:-examples/horovod_digits.py}
[ $# -gt 0 ] && shift

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# Of horovodrun's habits that have a meaning here `hpcpar run --help` tells. By hand:
# srun python -m hpcpar.horovod train.py
hpcpar run -n "$SLURM_NTASKS" --as-horovod "$program" "$@"

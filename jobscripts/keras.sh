#!/bin/bash
# A Keras program by Horovod's API: hvd.init(), hvd.DistributedOptimizer, model.compile, model.fit; no launcher but srun.
#
#   sbatch jobscripts/keras.sh
#   sbatch --nodes=4 jobscripts/keras.sh examples/keras_two_inputs.py
#   sbatch jobscripts/keras.sh train.py --lr 0.1
#
# The first word is the program (default: examples/keras_digits.py), all others are the program's own. Submit from the
# directory that has .venv; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-keras
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

program=${1:-examples/keras_digits.py}
[ $# -gt 0 ] && shift

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
unset SLURM_EXPORT_ENV    # after `sbatch --export=NONE` ranks would not see what is set here
# With Open MPI: srun --mpi=pmix. A program that says `import horovod.keras as hvd`, unchanged:
# hpcpar run -n "$SLURM_NTASKS" --as-horovod train.py
srun python "$program" "$@"

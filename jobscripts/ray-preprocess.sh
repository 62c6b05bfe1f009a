#!/bin/bash
# Ray cleans the text on all nodes, and then the same nodes train on it, in one job: Ray deals out tasks of any length
# to whichever core is free, which MPI does not, and MPI trains, which Ray leaves to others. `pip install '.[ray]'`.
#
#   sbatch jobscripts/ray-preprocess.sh examples/tiny.toml train.steps=200
#   SOURCE=/data/text sbatch --nodes=8 jobscripts/ray-preprocess.sh examples/tiny.toml
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-ray-preprocess
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

configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift
text=runs/ray-$SLURM_JOB_ID/text

# shellcheck source=jobscripts/ray-cluster.sh
. jobscripts/ray-cluster.sh
python examples/ray_preprocess.py --output "$text" ${SOURCE:+--source "$SOURCE"}
stop_ray    # its cores are for training now

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    data.paths="['$text']" data.cache="runs/ray-$SLURM_JOB_ID/cache" \
    output.directory="runs/ray-$SLURM_JOB_ID/training" "$@"

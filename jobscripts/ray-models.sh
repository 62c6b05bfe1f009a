#!/bin/bash
# Several models are trained at once, each on some cores of a node, by one Ray program: Ray deals the trainings out
# to the nodes, and MPI trains within each. `pip install '.[ray]'`.
#
#   sbatch jobscripts/ray-models.sh
#   sbatch --nodes=4 jobscripts/ray-models.sh --ranks 4 --steps 1000 /data/text/*/
#
# The words are those of examples/ray_models.py; weights go into runs/ray-models-JOB. Submit from the directory that
# has .venv and examples; nodes, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-ray-models
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
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

# shellcheck source=jobscripts/ray-cluster.sh
. jobscripts/ray-cluster.sh
python examples/ray_models.py --output "runs/ray-models-$SLURM_JOB_ID" "$@"

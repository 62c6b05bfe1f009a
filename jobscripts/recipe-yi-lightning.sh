#!/bin/bash
# A mixture of fine-grained experts as Yi-Lightning is: 16 ranks divide the experts, 128 ranks have ZeRO-1.
#
#   sbatch jobscripts/recipe-yi-lightning.sh data.paths=/data/text data.tokenizer=/data/tokenizer.json
#   hpcpar train --recipe yi-lightning --full --dry-run                  # memory and bytes, on a login node
#   hpcpar run -n 8 -- -m hpcpar train --recipe yi-lightning             # scaled to 8 ranks on two cores
#
# All words override keys of the recipe. Submitted again a job goes on from the last one's checkpoint; one that its time
# limit stops ends with status 75. Submit from the directory that has .venv; nodes, tasks, cores and time are options of
# sbatch, too.
#SBATCH --job-name=hpcpar-yi-lightning
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
# Five minutes before the time limit each rank is told, and a checkpoint is saved.
#SBATCH --signal=USR1@300

# --- site: the same in every script (README.md) -------------------------------------------------------
##SBATCH --account=project
##SBATCH --partition=standard
# module load hpcpar              # or whatever has Python and MPI at your site
# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
# ------------------------------------------------------------------------------------------------------
set -euo pipefail

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# `hpcpar run` starts a rank for each task through srun, in the language of the MPI library that is there.
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train --recipe yi-lightning --full --resume \
    output.directory="runs/yi-lightning" "$@"

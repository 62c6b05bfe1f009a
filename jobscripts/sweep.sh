#!/bin/bash
# A sweep as a job array: task n trains with the overrides in row n of a table, in a directory of its own, and as many
# tasks run at a time as there are nodes for. The dependent job shows which row was best:
#
#   job=$(sbatch --parsable jobscripts/sweep.sh)
#   sbatch --dependency=afterany:$job jobscripts/sweep-summary.sh runs/sweep-$job
#
#   sbatch --array=1-20%4 jobscripts/sweep.sh examples/tiny.toml my-table.txt train.steps=200
#
# The words are the configuration (default: examples/tiny.toml), the table (default: jobscripts/sweep.txt, learning
# rates), and overrides for all tasks. --array=1-N: rows; %M: at most M at a time. Submit from the directory that has
# .venv and examples.
#SBATCH --job-name=hpcpar-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --array=1-4
#SBATCH --output=%x-%A-%a.out

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
table=${1:-jobscripts/sweep.txt}
[ $# -gt 0 ] && shift

read -ra row <<< "$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$table")"
if [ ${#row[@]} -eq 0 ]; then
    echo "$table has no row $SLURM_ARRAY_TASK_ID: submit with --array=1-$(grep -c . "$table")" >&2
    exit 2
fi
echo "row $SLURM_ARRAY_TASK_ID: ${row[*]}"
# Before it trains: the summary is to name a task that comes to nothing, too.
mkdir -p "runs/sweep-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID"
echo "${row[*]}" > "runs/sweep-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID/row.txt"

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    output.directory="runs/sweep-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID" "$@" "${row[@]}"

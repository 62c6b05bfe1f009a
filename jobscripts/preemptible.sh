#!/bin/bash
# Training that outlives its time limit and preemption: two minutes before the end Slurm sends SIGUSR1, the ranks agree
# on a step, save it and end with status 75, and the job goes back into the queue under its own number. Started again
# (SLURM_RESTART_COUNT > 0) it goes on from there, with the same losses as if nothing had happened.
#
#   sbatch jobscripts/preemptible.sh examples/tiny.toml train.steps=20000
#   sbatch --time=00:30:00 --signal=USR1@300 jobscripts/preemptible.sh      five minutes before the end
#   scancel --signal=USR1 JOB      stop now, and on again when there is room
#   scancel JOB                    stop now, saved within KillWait (30 s as a rule): sbatch again with --resume
#   scontrol requeue JOB           the same, and on again when there is room
#
# What the seconds before the end must suffice for is two steps and a checkpoint. A node that is lost costs what came
# after the newest checkpoint: output.checkpoint_every. A second SIGUSR1, more than 5 s after the first, ends at once.
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-preemptible
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH --requeue
#SBATCH --open-mode=append
# To the ranks themselves. B:USR1@120 would reach this shell alone, and take a trap and a `wait` to be handed on.
#SBATCH --signal=USR1@120

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
most_restarts=100 # should each start come to nothing, the job ends here

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# `scancel --full` signals this shell, too, which is to live on. It asks the ranks, and so there is nothing to do.
trap : USR1
status=0
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    train.preemptible=true output.checkpoint_every=200 \
    output.directory="runs/preemptible-$SLURM_JOB_ID" "$@" || status=$?

restarts=${SLURM_RESTART_COUNT:-0}
if [ "$status" -eq 75 ] && [ "$restarts" -lt "$most_restarts" ]; then
    echo "preemptible.sh: stopped in good order, start $((restarts + 1)); back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

#!/bin/bash
# single-node.sh for PBS: data parallelism on one node.
#
#   qsub jobscripts/pbs-single-node.sh
#   qsub -v CONFIGURATION=examples/tiny.toml,OVERRIDES="train.steps=200 train.seed=1" jobscripts/pbs-single-node.sh
#
# CONFIGURATION and OVERRIDES stand for the words that the Slurm scripts take, as qsub has none for a script. Submit
# from the directory that has .venv and examples.
#PBS -N hpcpar-single-node
#PBS -l select=1:ncpus=4:mpiprocs=4
#PBS -l walltime=01:00:00
#PBS -j oe

[ -z "${PBS_O_WORKDIR:-}" ] || cd "$PBS_O_WORKDIR"    # PBS starts in the home directory

# --- site: the same in every script (README.md) -------------------------------------------------------
##PBS -A project
##PBS -q standard
# module load hpcpar              # or whatever has Python and MPI at your site
# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
# ------------------------------------------------------------------------------------------------------
set -euo pipefail

configuration=${CONFIGURATION:-examples/tiny.toml}
read -ra overrides <<< "${OVERRIDES:-}"
job=${PBS_JOBID%%.*}
ranks=$(wc -l < "$PBS_NODEFILE")    # has a line for each rank
export OMP_NUM_THREADS=1

mpiexec -n "$ranks" python -m hpcpar train "$configuration" \
    output.directory="runs/single-node-$job" "${overrides[@]}"

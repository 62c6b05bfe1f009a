#!/bin/bash
# many-nodes.sh for PBS, with PALS (the mpiexec of HPE Cray machines): data parallelism with ZeRO stage 1.
#
#   qsub jobscripts/pbs-many-nodes.sh
#   qsub -l select=16:ncpus=4:mpiprocs=4 -v OVERRIDES="optimizer.zero_stage=3" jobscripts/pbs-many-nodes.sh
#
# CONFIGURATION and OVERRIDES stand for the words that the Slurm scripts take, as qsub has none for a script. Submit
# from the directory that has .venv and examples.
#PBS -N hpcpar-many-nodes
#PBS -l select=2:ncpus=4:mpiprocs=4
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

# --ppn places the ranks, --depth and --cpu-bind keep each on its cores. Other mpiexecs have other words for it: MPICH's
# -ppn alone, Open MPI's --map-by ppr:4:node.
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
mpiexec -n "$ranks" --ppn $((ranks / nodes)) --depth "$OMP_NUM_THREADS" --cpu-bind depth \
    python -m hpcpar train "$configuration" \
    optimizer.zero_stage=1 \
    output.directory="runs/many-nodes-$job" "${overrides[@]}"

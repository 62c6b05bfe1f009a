#!/bin/bash
# In a container: Python, torch and hpcpar come from one file, which a parallel file system likes better than the
# thousands of an environment, and which is the same everywhere. Slurm and Apptainer are all that the nodes need.
#
#   apptainer build hpcpar.sif jobscripts/hpcpar.def              once, from this directory
#   sbatch jobscripts/container.sh
#   IMAGE=/project/hpcpar.sif sbatch --nodes=8 jobscripts/container.sh examples/tiny.toml train.steps=200
#
# srun is outside and starts a container for each rank. The ranks find each other by hpcpar's own wire-up, from Slurm's
# variables, which Apptainer lets through (not with --cleanenv): no MPI of the host is needed. The MPICH in the image
# speaks TCP, InfiniBand and shared memory. For other networks (Slingshot) lend it the host's MPI, which has to have
# MPICH's ABI, as Cray's, Intel's and MVAPICH's have:
#
#   HOST_MPI=/opt/cray/pe/mpich/default/ofi/gnu/12.3/lib-abi-mpich sbatch jobscripts/container.sh
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-container
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
image=${IMAGE:-hpcpar.sif}
if [ ! -e "$image" ]; then
    echo "container.sh: there is no $image: apptainer build $image jobscripts/hpcpar.def, or set IMAGE" >&2
    exit 2
fi

# The working directory for configuration, data and output; /dev/shm is the host's, so ranks of a node share memory.
words=(exec --bind "$PWD" --pwd "$PWD")
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then words+=(--nv); fi    # --rocm for AMD's
if [ -n "${HOST_MPI:-}" ]; then
    # Libraries that the host's MPI itself needs (libfabric, libpmi) may want more of --bind and LD_LIBRARY_PATH.
    words+=(--bind "$HOST_MPI" --env "MPI4PY_LIBMPI=$HOST_MPI/libmpi.so.12" --env "LD_LIBRARY_PATH=$HOST_MPI")
fi

# Without root's help Apptainer gives each rank a user namespace of its own, and the kernel then refuses it another's
# memory and open files; MPICH and UCX would end the job for that. hpcpar finds out by itself. (From Apptainer 1.3 on,
# `exec --sharens` puts the ranks of a node into one namespace, and this line can go.)
export MPIR_CVAR_CH4_CMA_ENABLE=0 UCX_TLS=^cma UCX_POSIX_USE_PROC_LINK=n

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 apptainer "${words[@]}" "$image" python -m hpcpar train "$configuration" \
    optimizer.zero_stage=1 \
    output.directory="runs/container-$SLURM_JOB_ID" "$@"

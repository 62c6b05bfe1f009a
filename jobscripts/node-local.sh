#!/bin/bash
# Many nodes whose ranks import Python packages from the node's own disk. Each rank looks up some 18,700 paths to import
# torch and hpcpar; from a shared file system, 1,000 ranks at once wait long for that. Here one file is read from it:
# the environment as a tar, which sbcast sends from node to node.
#
#   sbatch jobscripts/node-local.sh
#   SLURM_TMPDIR=/local/scratch sbatch --nodes=64 jobscripts/node-local.sh examples/tiny.toml train.global_batch=256
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of sbatch, too.
#SBATCH --job-name=hpcpar-node-local
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
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

archive=$PWD/hpcpar-environment-$SLURM_JOB_ID.tar
copy=${SLURM_TMPDIR:-/tmp}/hpcpar-environment-$SLURM_JOB_ID
on_each_node=(srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
# At the end of the job; where it is cancelled, the site's epilog has to empty the nodes' disks.
trap 'rm -f "$archive"; "${on_each_node[@]}" rm -rf "$copy" "$copy.tar"' EXIT
tar -cf "$archive" -C "$VIRTUAL_ENV" .
sbcast "$archive" "$copy.tar"
"${on_each_node[@]}" bash -c "mkdir -m 700 '$copy' && tar -xf '$copy.tar' -C '$copy' && rm '$copy.tar'"
export PATH=$copy/bin:$PATH VIRTUAL_ENV=$copy

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# Not the `hpcpar` command: its first line names the Python that the environment was made with.
python -m hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train "$configuration" \
    optimizer.zero_stage=1 \
    output.directory="runs/node-local-$SLURM_JOB_ID" "$@"

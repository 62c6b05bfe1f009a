#!/bin/bash
# many-nodes.sh for Flux: data parallelism with ZeRO stage 1.
#
#   flux batch jobscripts/flux-many-nodes.sh examples/tiny.toml train.steps=200
#   flux batch --nodes=16 --nslots=64 jobscripts/flux-many-nodes.sh examples/tiny.toml optimizer.zero_stage=3
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of `flux batch`, too.
# flux: --job-name=hpcpar-many-nodes
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=1
# flux: --time-limit=1h
# flux: --output=hpcpar-many-nodes-{{id}}.out

# --- site: the same in every script (README.md) -------------------------------------------------------
# site flux: --bank=project
# site flux: --queue=standard
# module load hpcpar              # or whatever has Python and MPI at your site
# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
# ------------------------------------------------------------------------------------------------------
set -euo pipefail

configuration=${1:-examples/tiny.toml}
[ $# -gt 0 ] && shift

export OMP_NUM_THREADS=1
job=$(flux getattr jobid)
# Flux speaks MPICH's way of finding each other (PMI-1); for Open MPI add -o pmi=pmix where the site has the plugin.
nodes=$(flux getattr size)
flux run --nodes="$nodes" --tasks-per-node=4 --cores-per-task=1 \
    python -m hpcpar train "$configuration" \
    optimizer.zero_stage=1 \
    output.directory="runs/many-nodes-$job" "$@"

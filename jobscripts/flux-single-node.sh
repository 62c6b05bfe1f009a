#!/bin/bash
# single-node.sh for Flux: data parallelism on one node.
#
#   flux batch jobscripts/flux-single-node.sh examples/tiny.toml train.steps=200
#
# The first word is the configuration (default: examples/tiny.toml), all others override its keys. Submit from the
# directory that has .venv and examples; nodes, tasks, cores and time are options of `flux batch`, too.
# flux: --job-name=hpcpar-single-node
# flux: --nodes=1
# flux: --nslots=4
# flux: --cores-per-slot=1
# flux: --time-limit=1h
# flux: --output=hpcpar-single-node-{{id}}.out

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
flux run --ntasks=4 --cores-per-task=1 python -m hpcpar train "$configuration" \
    output.directory="runs/single-node-$job" "$@"

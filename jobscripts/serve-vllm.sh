#!/bin/bash
# Serve a trained model with vLLM, on the GPUs of all nodes: layers divided within a node (tensor parallelism), and
# over the nodes (a pipeline), which Ray starts for it. The server speaks OpenAI's API until the job ends.
#
#   sbatch jobscripts/serve-vllm.sh runs/tiny                     what `hpcpar train` left there
#   sbatch jobscripts/serve-vllm.sh models/llama --max-model-len 4096
#   sbatch jobscripts/serve-vllm.sh --dry-run runs/tiny           export and Ray for real, vLLM's command only shown
#
#   curl http://NODE:8000/v1/completions -H 'Content-Type: application/json' \
#       -d '{"model": "tiny", "prompt": "def main(", "max_tokens": 50}'          from within the cluster
#   ssh -L 8000:NODE:8000 login-node                                             from without: then localhost:8000
#
# The first word is a run, or a model in Hugging Face's format; all others are options of `vllm serve`. Submit from the
# directory that has .venv. vLLM (`pip install vllm`) brings its own torch: it may need an environment of its own,
# with Ray and hpcpar in it.
#SBATCH --job-name=hpcpar-serve-vllm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
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

dry_run=false
if [ "${1:-}" = --dry-run ]; then
    dry_run=true
    shift
fi
model=${1:?a run of hpcpar train, or a model directory}
shift
port=${PORT:-8000}

if ! $dry_run && ! command -v vllm > /dev/null; then
    echo "serve-vllm.sh: there is no vllm on the PATH: pip install vllm, or see what would run with --dry-run" >&2
    exit 2
fi

name=$(basename "$model")
if [ ! -f "$model/config.json" ]; then
    hpcpar export "$model" "runs/export-$SLURM_JOB_ID"
    model=runs/export-$SLURM_JOB_ID
fi

# shellcheck source=jobscripts/ray-cluster.sh
. jobscripts/ray-cluster.sh

serve=(
    vllm serve "$model" --served-model-name "$name" --host 0.0.0.0 --port "$port"
    --distributed-executor-backend ray
    --tensor-parallel-size "$SLURM_GPUS_ON_NODE" --pipeline-parallel-size "$SLURM_JOB_NUM_NODES"
    "$@"
)
echo "on $(hostname): ${serve[*]}"
if ! $dry_run; then
    VLLM_HOST_IP=$ray_ip "${serve[@]}"
fi

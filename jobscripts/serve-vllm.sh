#!/bin/bash
# Serve a trained model with vLLM, until the job ends; the server speaks OpenAI's API. On GPUs layers are divided
# within a node (tensor parallelism), and over the nodes (a pipeline), which Ray starts for it. On CPUs: one node.
#
#   sbatch jobscripts/serve-vllm.sh runs/tiny                     what `hpcpar train` left there, on GPUs
#   sbatch jobscripts/serve-vllm.sh models/llama --max-model-len 4096
#   sbatch --nodes=1 --gpus-per-node=0 jobscripts/serve-vllm.sh runs/tiny --tp 2      on a node's cores
#   sbatch jobscripts/serve-vllm.sh runs/tiny --dry-run           export and checks; vLLM's command is only shown
#
# The job's output says "ready" and how to ask, once the model has answered; vLLM's log is there, too. Within the
# cluster that is http://NODE:8000; from without `ssh -L 8000:NODE:8000 login-node`, then http://localhost:8000.
# Several servers on a node need a port each: --port 8001. Whoever reaches the port may ask, unless there is
# a key in VLLM_API_KEY. `scancel JOB` ends it.
#
# The first word is a run, or a model in Hugging Face's format; all others are options of `hpcpar serve` and of
# vLLM. Submit from the directory that has .venv. For CPUs `make install-serve` installs vLLM into .venv-serve; for
# GPUs activate an environment that has vLLM, Ray and hpcpar (`pip install vllm ray`), or name it by --python.
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

model=${1:?a run of hpcpar train, or a model directory}
gpus=${SLURM_GPUS_ON_NODE:-0}
serve=(hpcpar serve "$model" --host 0.0.0.0)

if [ "$gpus" -eq 0 ]; then
    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
        echo "serve-vllm.sh: $SLURM_JOB_NUM_NODES nodes without GPUs, but vLLM on CPUs serves within one:" \
            "submit with --nodes=1, or for GPUs with --gpus-per-node" >&2
        exit 2
    fi
    exec "${serve[@]}" "${@:2}"
fi

serve+=(
    --tp "$gpus" --pp "$SLURM_JOB_NUM_NODES" "${@:2}" --distributed-executor-backend ray
)
"${serve[@]}" --dry-run    # what cannot work is known before Ray starts
case " ${*:2} " in *" --dry-run "*) exit ;; esac

# shellcheck source=jobscripts/ray-cluster.sh
. jobscripts/ray-cluster.sh

VLLM_HOST_IP=$ray_ip "${serve[@]}"

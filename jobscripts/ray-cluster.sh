# shellcheck shell=bash
# Ray on all nodes of a Slurm job: ray-preprocess.sh, ray-models.sh and serve-vllm.sh say `. jobscripts/ray-cluster.sh`.
#
#   before   a batch script, on the first node of its job, with `ray` on the PATH
#   after    a head on that node and a worker on each other one, all alive; RAY_ADDRESS names the head for whatever
#            connects, and logs are in runs/ray-JOB-*.log. stop_ray ends them, and so does the script's own end
#
# Ray has many ports on each node, and a directory for its sockets. All are this job's own, for a node may be shared,
# and what Ray takes otherwise (6379, 10002 to 19999, /tmp/ray) be taken.

ray_nodes=$SLURM_JOB_NUM_NODES
ray_head=$SLURMD_NODENAME    # Slurm's name for this node: the host may call itself by a longer one
ray_directory=/tmp/ray-$SLURM_JOB_ID
ray_log=runs/ray-$SLURM_JOB_ID
ray_steps=()

# An address under which the other nodes reach this one, and a free port.
read -r ray_ip ray_port < <(python - <<'END'
import socket

with socket.socket() as probe:
    probe.bind(("", 0))
    print(socket.gethostbyname(socket.gethostname()), probe.getsockname()[1])
END
)
export RAY_ADDRESS="$ray_ip:$ray_port"

# Whoever reaches the port could run programs as you: a secret of this job, which Slurm hands to its steps.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

start_ray() { # role, number of nodes, which of them, options of `ray start`
    local role=$1 nodes=$2 which=$3
    shift 3
    # --overlap: training and engines start beside it, in steps of their own.
    # shellcheck disable=SC2016    # the address of the node where it runs, not of this one
    srun --job-name="ray-$role" --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "$which" --overlap \
        --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 --mpi=none --label \
        bash -c 'ip=$(python -c "import socket as s; print(s.gethostbyname(s.gethostname()))")
                 exec ray start --node-ip-address="$ip" "$@"' ray \
        "$@" --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" \
        --object-store-memory="${RAY_OBJECT_STORE_BYTES:-1000000000}" --min-worker-port=0 --max-worker-port=0 \
        --disable-usage-stats --log-color=false --block > "$ray_log-$role.log" 2>&1 &
    ray_steps+=($!)
}

stop_ray() {
    [ ${#ray_steps[@]} -gt 0 ] || return 0
    kill "${ray_steps[@]}" 2> /dev/null || true
    wait "${ray_steps[@]}" || true
    ray_steps=()
    srun --nodes="$ray_nodes" --ntasks="$ray_nodes" --ntasks-per-node=1 --overlap --mpi=none \
        rm -rf "$ray_directory" || true
}

mkdir -p runs
trap stop_ray EXIT

start_ray head 1 "--nodelist=$ray_head" \
    --head --port="$ray_port" --temp-dir="$ray_directory" --include-dashboard=false
until (: < "/dev/tcp/$ray_ip/$ray_port") 2> /dev/null; do
    kill -0 "${ray_steps[0]}" 2> /dev/null || { cat "$ray_log-head.log" >&2 && exit 1; }
    sleep 0.2
done
[ "$ray_nodes" -eq 1 ] || start_ray worker $((ray_nodes - 1)) "--exclude=$ray_head" --address="$RAY_ADDRESS"

timeout 120 python - "$ray_nodes" <<'END' || { cat "$ray_log"-*.log >&2 && exit 1; }
import sys
import time

import ray

ray.init(logging_level="error")
while len(alive := [node for node in ray.nodes() if node["Alive"]]) < int(sys.argv[1]):
    time.sleep(0.2)
resources = ray.cluster_resources()
print(f"Ray is on {len(alive)} nodes: {resources['CPU']:g} cores, {resources.get('GPU', 0):g} GPUs", flush=True)
END

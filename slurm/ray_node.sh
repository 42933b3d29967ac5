#!/bin/bash
# One node's Ray, from start to the last process gone. train.sbatch runs it on every node, as an srun task:
#
#     ray_node.sh HEAD_NODE HEAD_ADDRESS PORT TMP_ROOT LOG_DIR TIMEOUT_S
#
# The node named HEAD_NODE becomes the head, the others join it. Ray runs until stdin ends (see contain.py).
set -uo pipefail
head_node=$1 head_address=$2 port=$3 tmp_root=$4 log_dir=$5 timeout_s=$6
here=$(dirname "$0")
# srun numbers and names tasks by Slurm's node names, which need not be host names.
node=$SLURMD_NODENAME

# Another Ray that happens to be on the PATH would join with other packages.
if [[ ! -x $SLIPSTREAM_SCRIPTS/ray ]]; then
    echo "$node: no $SLIPSTREAM_SCRIPTS/ray on this node" >&2
    exit 1
fi

# scancel sends SIGTERM to every step at once. Ray has to outlive it: the run is about to save its state.
trap '' TERM INT

# Ray opens thousands of sockets on a large run.
if [[ $(ulimit -n) != unlimited && $(ulimit -n) -lt 65536 ]]; then
    ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
fi

if [[ $node == "$head_node" ]]; then
    address=$head_address
    role=(--head --port="$port" --include-dashboard=false)
    # Where grpc is installed, the head serves Ray Client as well, on a fixed port, and cannot be told not to.
    if python3 -c 'import importlib.util as util, sys; sys.exit(util.find_spec("grpc") is None)'; then
        role+=(--ray-client-server-port="$((port + 1))")
    fi
else
    address=$(python3 "$here/own_address.py" "$head_address" --port "$port" --timeout-s "$timeout_s") || exit 1
    role=(--address="$head_address:$port")
fi
cpus=${SLIPSTREAM_CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}
gpus=${SLIPSTREAM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}} # the first where Slurm does not count GPUs
store=()
if [[ -n ${SLIPSTREAM_OBJECT_STORE:-} ]]; then
    store=(--object-store-memory="$SLIPSTREAM_OBJECT_STORE")
fi
echo "$node: Ray at $address with $cpus CPUs and $gpus GPUs"

# Ray opens its folder to every user of the node, so it goes into one that only this user may enter. As in
# rollout/system/temporary.py, a folder whose lock is free was left by a job that was killed.
# Every user's jobs on this node use $tmp_root, so the first of them opens it to all, as /tmp is.
[[ -d $tmp_root ]] || (umask 022 && mkdir -p -m 1777 "$tmp_root")
umask 077
for left in "$tmp_root"/slipstream.*; do
    [[ -d $left && ! -L $left && -O $left ]] && flock --nonblock "$left" rm -rf "$left"
done
until [[ -n ${lock:-} && -d $tmp_dir ]]; do # another job may have taken it for a leftover
    tmp_dir=$(mktemp -d "$tmp_root/slipstream.$SLURM_JOB_ID.XXXXXX") || exit 1
    exec {lock}<"$tmp_dir"
    flock "$lock"
done
# Nobody moves work away from a node that stops; draining would only spend time that scancel limits.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# No port: the autoscaler would tell everybody who asks how busy the cluster is, and on every interface.
export AUTOSCALER_METRIC_PORT=-1
# As in rollout/system/heaps.py: memory that threads have freed is used again by others.
export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-2}
# Ports other than the head's are left to the kernel (0): jobs that share a node cannot ask for the same one.
python3 "$here/contain.py" --until-stdin-closes -- ray start "${role[@]}" --block --disable-usage-stats \
    --node-ip-address="$address" --num-cpus="$cpus" --num-gpus="$gpus" "${store[@]}" \
    --resources="{\"slurm_node:$node\": 1}" --temp-dir="$tmp_dir/r" \
    --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0
code=$?

# Node-local disks are out of reach once the job is over: bring Ray's own logs home, and leave nothing.
for session in "$tmp_dir"/r/session_2*; do
    if [[ -d $session/logs ]]; then
        mkdir -p "$log_dir/ray-$node" && cp -r "$session/logs/." "$log_dir/ray-$node/"
    fi
done
rm -rf "$tmp_dir"
exit "$code"

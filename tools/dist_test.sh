#!/usr/bin/env bash
# bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]
# Environment: NNODES, NODE_RANK, MASTER_ADDR, PORT; PYTHON for another interpreter. Without a GPU the
# processes talk over gloo.
set -e
if [ $# -lt 3 ]; then
    sed -n 2,4p "$0" >&2
    exit 2
fi
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$3" \
    "$ROOT/tools/test.py" "$1" "$2" --launcher pytorch "${@:4}"

#!/usr/bin/env bash
# bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of train.py]
# Environment: GPUS (8), GPUS_PER_NODE (8), CPUS_PER_TASK (5), SRUN_ARGS; PYTHON for another interpreter.
set -e
if [ $# -lt 4 ]; then
    sed -n 2,3p "$0" >&2
    exit 2
fi
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
# SRUN_ARGS holds several words.
# shellcheck disable=SC2086
exec srun -p "$1" \
    --job-name="$2" \
    --gres=gpu:"$GPUS_PER_NODE" \
    --ntasks="$GPUS" \
    --ntasks-per-node="$GPUS_PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    $SRUN_ARGS \
    "${PYTHON:-python}" -u "$ROOT/tools/train.py" "$3" --work-dir "$4" --launcher slurm "${@:5}"

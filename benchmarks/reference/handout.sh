#!/usr/bin/env bash
# The way of the lab handout, to be compared with: look whether the nodes see the packages, send both
# archives with sbcast, unpack them on every node, import everything once, start torchrun.
#
#     handout.sh NODES RANKS
#
# HANDOUT_PYTHON, HANDOUT_PKGS and HANDOUT_PROJECT name the interpreter and the two tar.gz files,
# HANDOUT_PROGRAM the script in the project, HANDOUT_IMPORTS the modules. The archives are there
# already: making them counts as building.
set -euo pipefail
nodes=$1 ranks=$2
if [ -z "${SLURM_JOB_ID:-}" ]; then
    exec salloc --quiet --nodes="$nodes" --ntasks-per-node=1 --cpus-per-task=4 --time=00:30:00 \
        bash "$0" "$@"
fi

began=$(date +%s.%N)
phase() { printf 'PHASE %s %s\n' "$1" "$(date +%s.%N | awk -v b="$began" '{print $1 - b}')"; }
each() { srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=4 "$@"; }

export HANDOUT_ROOT=/tmp/handout HANDOUT_RANKS=$ranks HANDOUT_NODES=$nodes
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((61000 + SLURM_JOB_ID % 4536))
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1

# shellcheck disable=SC2016 # expanded on the nodes
each bash -c '[ -d "$HANDOUT_ROOT/pkgs" ] && echo "$(hostname) pkgs=ok" ||
    echo "$(hostname) pkgs=missing"'
phase preflight
sbcast --force "$HANDOUT_PROJECT" /tmp/handout-project.tar.gz
sbcast --force "$HANDOUT_PKGS" /tmp/handout-pkgs.tar.gz
phase sbcast
# shellcheck disable=SC2016
each bash -c 'mkdir -p "$HANDOUT_ROOT/pkgs" "$HANDOUT_ROOT/project" &&
    tar xzf /tmp/handout-project.tar.gz -C "$HANDOUT_ROOT/project" &&
    tar xzf /tmp/handout-pkgs.tar.gz -C "$HANDOUT_ROOT/pkgs"'
phase unpack
export PYTHONPATH=$HANDOUT_ROOT/pkgs:$HANDOUT_ROOT/project
# shellcheck disable=SC2016
each bash -c '"$HANDOUT_PYTHON" -c "import $HANDOUT_IMPORTS" && echo "NODE $(hostname) OK"'
phase probe
# shellcheck disable=SC2016
each bash -c 'cd "$HANDOUT_ROOT/project" && exec "$HANDOUT_PYTHON" -m torch.distributed.run \
    --nnodes="$HANDOUT_NODES" --nproc_per_node="$HANDOUT_RANKS" --node_rank="$SLURM_NODEID" \
    --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv_id="$SLURM_JOB_ID" \
    "$HANDOUT_PROGRAM"'
phase launch

#!/usr/bin/env bash
# One machine, several processes, one GPU each: examples/many_gpus.sh [PROCESSES [OPTIONS]]
# Without GPUs the processes run on the CPU. The batch size counts all processes, so the recipe stays the same.
set -euo pipefail

torchrun --standalone --nproc-per-node "${1:-2}" -m tokamix train --model columnar_tiny_sima --data digits \
    --recipe digits --epochs 1 --output runs/many_gpus "${@:2}"
# Evaluate in the same way: torchrun --standalone --nproc-per-node 2 -m tokamix eval runs/many_gpus --data digits

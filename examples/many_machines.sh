#!/usr/bin/env bash
# Train on several machines with SLURM: sbatch examples/many_machines.sh
# Every machine must see the data and the output folder. After a preemption SLURM starts the job again, and it resumes.
# Two minutes before a time limit it saves and stops; submit it again to continue.
#SBATCH --job-name=tokamix
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:29500" \
    -m tokamix train --recipe atmnet_tiny --data path/to/imagenet --output runs/atmnet --workers 7

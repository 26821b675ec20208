#!/bin/bash
# A mixture of experts on four nodes.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=4
NODE_RANK=${SLURM_NODEID}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))

TP=${TP:-4}
PP=2
CHECKPOINT=$1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr ${MASTER_ADDR:-localhost}
)

MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size ${TP}
	--pipeline-model-parallel-size $PP   # stages
	--context-parallel-size 1
	--expert-model-parallel-size 4
	--expert-tensor-parallel-size 1
	--sequence-parallel
)

OTHER_ARGS="
    --num-layers 32 \
    --hidden-size 4096 \
    --save $CHECKPOINT
"

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_PARALLEL_ARGS[@]} \
    $OTHER_ARGS

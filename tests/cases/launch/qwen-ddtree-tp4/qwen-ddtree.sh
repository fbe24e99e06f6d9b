#!/bin/sh
# Rendered by ddtree-deploy: service qwen-ddtree, sglang 0.5.11, tp 4. Change the inventory, then render again.
set -eu
cd /
export PATH=/opt/sglang/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export CUDA_HOME=/usr/local/cuda
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=0,1,2,3
export NCCL_IB_DISABLE=1
export NCCL_P2P_LEVEL=SYS
export OMP_NUM_THREADS=8
export SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1
export SGLANG_ENABLE_JIT_DEEPGEMM=0
export HF_HUB_OFFLINE=1
exec /opt/sglang/venv/bin/python -m sglang.launch_server \
    --model-path /models/Qwen3.6-27B \
    --served-model-name qwen3.6-27b \
    --trust-remote-code \
    --host 127.0.0.1 \
    --port 30000 \
    --tp-size 4 \
    --disable-custom-all-reduce \
    --speculative-algorithm DDTREE \
    --speculative-draft-model-path /models/Qwen3.6-27B-DFlash \
    --speculative-dflash-block-size 16 \
    --speculative-draft-attention-backend flashinfer \
    --speculative-ddtree-budget 15 \
    --speculative-ddtree-topk 8 \
    --mamba-scheduler-strategy extra_buffer \
    --attention-backend triton \
    --max-running-requests 16 \
    --cuda-graph-max-bs 16 \
    --mem-fraction-static 0.8 \
    --chunked-prefill-size 4096 \
    --reasoning-parser qwen3 \
    --tool-call-parser qwen3_coder \
    --enable-metrics \
    --model-loader-extra-config '{"num_threads": 16}'

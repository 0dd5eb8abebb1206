#!/usr/bin/env bash
# Measures on a GPU what docs/gpu.md lists as not measured: the whole pipeline on a hub target, then curves and baselines.
#
#   bash scripts/measure_gpu.sh [TARGET] [RUN_DIR] [hydra overrides]
#   e.g. bash scripts/measure_gpu.sh Qwen/Qwen3-0.6B runs/gpu recipe.prompts=5000
#
# Needs a CUDA build of torch, access to the model hub (or HF_HOME with the model), and hours. Writes RUN_DIR/evaluate/ and
# RUN_DIR/doctor.json; RUN_DIR/gpu.txt names the device and its clocks before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${1:-Qwen/Qwen3-0.6B}"
run_dir="${2:-runs/gpu}"
shift $(($# < 2 ? $# : 2))
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python="${PYTHON:-python3}"; fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "torch sees no CUDA device here. Install a CUDA build of torch, and look at: nvidia-smi" >&2
    exit 2
}
mkdir -p "$run_dir"
state() { nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,temperature.gpu,utilization.gpu,memory.used --format=csv; }
state > "$run_dir/gpu.txt"
common=(run_dir="$run_dir" target.name="$target" recipe=gsm8k "$@")
"$python" -m jetspec_train stage=doctor doctor.json="$run_dir/doctor.json" "${common[@]}"
"$python" -m jetspec_train stage=pipeline evaluate.prompts=40 evaluate.max_new_tokens=256 \
    'evaluate.baselines=[generate,prompt_lookup]' 'evaluate.curves=[context,batch,budget,temperature]' \
    evaluate.curve_prompts=8 'evaluate.variants={chain: {shape: chain, nodes: 7}, scheduled: {scheduler: true, nodes: 64}}' \
    "${common[@]}"
state >> "$run_dir/gpu.txt"
echo "Report: $run_dir/evaluate/report.html"

#!/usr/bin/env bash
# Ten random kills of a two-rank training on a real Slurm of this machine, then a comparison with an undisturbed run:
# the same number of steps, the same samples at every step, the same weights. Needs root and slurm-wlm (test.sh).
#
#   bash scripts/kill_storm.sh [--kills 10] [--steps 600] [--seed 0] [--folder DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python="${PYTHON:-python3}"; fi
OMP_NUM_THREADS=1 PYTHONPATH="$PWD" exec "$python" -m tests.cluster.kill_storm "$@"

#!/usr/bin/env bash
# From nothing to a measured speedup: environment, embedded target, pipeline, report.
#
#   bash scripts/quickstart.sh [--cpu] [hydra overrides]
#
#   --cpu   torch from its public CPU index (for Linux machines without a GPU)
#   e.g.    bash scripts/quickstart.sh run_dir=runs/second distill.max_new_tokens=64
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--cpu" ]; then export JETSPEC_CPU_TORCH=1; shift; fi
. scripts/environment.sh
install_environment ""
exec .venv/bin/python -m jetspec_train stage=pipeline preset=quickstart "$@"

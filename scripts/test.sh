#!/usr/bin/env bash
# Installs what the tests need and runs them: format, lint, types, the rooms' floors, then pytest.
#
#   bash scripts/test.sh [--cpu] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--cpu" ]; then export JETSPEC_CPU_TORCH=1; shift; fi
. scripts/environment.sh
install_environment "[test]"

# Chromium opens the report, Slurm runs the cluster tests. Both are optional: without them those tests are skipped.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    missing=""
    command -v chromium >/dev/null || missing="$missing chromium"
    command -v slurmctld >/dev/null || missing="$missing slurm-wlm munge"
    command -v g++ >/dev/null || missing="$missing g++"
    if [ -n "$missing" ]; then
        echo "Installing for the tests:$missing"
        (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing) \
            >/dev/null 2>&1 || echo "not installed (tests that need them are skipped):$missing"
    fi
fi

export PATH="$PWD/.venv/bin:$PATH" WANDB_MODE="${WANDB_MODE:-offline}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
ruff format --check .
ruff check .
mypy
lint-imports
python -m pytest "$@"

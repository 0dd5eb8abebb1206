"""Which process this is, how the processes meet, and the few things that they say to each other.

One process per device. The same command runs under ``srun`` (recommended), torchrun and the deepspeed launcher; a
single process needs none of them and makes no process group.
"""

from __future__ import annotations

import atexit
import datetime
import os
import subprocess
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetspec_train.artifacts.errors import UserError

# Rank 0 measures acceptance and writes checkpoints while the others wait for it, which can take longer than the
# backends' own ten minutes. A real hang is found, and named, by the watchdog.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)
FIRST_PORT, PORTS = 15_000, 20_000


@dataclass(frozen=True)
class Ranks:
    """Which process this is. ``local`` is the index of its device on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def find_ranks(env: MutableMapping[str, str]) -> Ranks:
    """The rank that the launcher gave this process; rank 0 of 1 without a launcher.

    Understood: ``RANK``/``WORLD_SIZE``/``LOCAL_RANK`` (torchrun, deepspeed) and, inside ``srun``, ``SLURM_PROCID``/
    ``SLURM_STEP_NUM_TASKS``/``SLURM_LOCALID`` (``SLURM_STEP_ID`` is set there: a bare sbatch script is one process).
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return Ranks(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0")))
    if env.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in env:
        world = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1"))
        return Ranks(int(env["SLURM_PROCID"]), world, int(env.get("SLURM_LOCALID", "0")))
    return Ranks()


def find_address(env: MutableMapping[str, str]) -> tuple[str, str]:
    """Where rank 0 listens: ``MASTER_ADDR``/``MASTER_PORT``, or the job's first node and a port from its number.

    Raises UserError when neither is known.
    """
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    job, nodes = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    if not port and job.isdigit():
        # Two steps of one job may run side by side, so the step counts too.
        port = str(FIRST_PORT + (int(job) + 1009 * int(env.get("SLURM_STEP_ID", "0"))) % PORTS)
    if not address and nodes:
        address = _first_node(nodes, int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or "1"))
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
    if missing:
        raise UserError(
            f"Several ranks were started but {' and '.join(missing)} is not set, so that they cannot meet. Start with "
            f"srun or torchrun, or export MASTER_ADDR (the first node's name) and MASTER_PORT (a free port)."
        )
    return address, port


def _first_node(nodes: str, count: int) -> str:
    """The first host of a Slurm node list such as ``gpu[07-09]``."""
    if count == 1:
        return "127.0.0.1"
    try:
        answer = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"scontrol cannot be asked for the hosts of {nodes} ({error}). Export MASTER_ADDR.") from error
    hosts = answer.stdout.split()
    if not hosts:
        raise UserError(f"scontrol knows no host of {nodes}: {answer.stderr.strip()}. Export MASTER_ADDR.")
    return hosts[0]


def join_ranks(device: str = "cpu") -> Ranks:
    """Find this process's rank and meet the others; on GPUs, also take the device of that rank.

    Raises UserError when there are several ranks and no address to meet at.
    """
    ranks = find_ranks(os.environ)
    on_gpu = device.startswith("cuda")
    if on_gpu and ":" not in device and ranks.world > 1:
        # A task that was given one GPU of its own sees it as number 0, whatever its local rank.
        torch.cuda.set_device(ranks.local % torch.cuda.device_count())
    if ranks.world > 1 and not dist.is_initialized():
        address, port = find_address(os.environ)
        # Through the variables, because torchrun has a store of its own listening there, which only they reveal.
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "LOCAL_RANK": str(ranks.local)}
        os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world)}
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)
        # Not after a stage: DeepSpeed keeps what it built on the group for as long as the process lives.
        atexit.register(leave_ranks)
    return ranks


def leave_ranks() -> None:
    """Close the process group if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: Tensor, ranks: Ranks) -> Tensor:
    """The element-wise sum over all ranks (the tensor itself when there is one rank)."""
    if ranks.world > 1:
        dist.all_reduce(values)
    return values


def largest_over_ranks(value: int, ranks: Ranks, device: torch.device | str | None = None) -> int:
    """The same answer on every rank: the largest of theirs (how ranks agree to stop)."""
    if ranks.world == 1:
        return value
    if device is None:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    shared = torch.tensor([value], device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared.item())


def from_main_rank(value: Any, ranks: Ranks) -> Any:
    """What rank 0 decided, on every rank (PITFALLS 23: decide once, broadcast)."""
    if ranks.world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]

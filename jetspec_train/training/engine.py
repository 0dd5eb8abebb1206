"""The door to the optimiser: one small interface, plain torch behind it.

The loop knows only these calls: ``wrap`` once, then for every micro-step ``backward(loss, boundary)``, then
``step()`` once per optimiser step, ``save`` / ``load`` around it. The contract that lets another engine stand behind
the same door:

* **the loss arrives normalised for the whole global batch** (every rank and every accumulation step, METHODS 3), so
  gradients are *summed* over micro-steps and ranks and never averaged. An engine that averages by itself multiplies
  by the number of ranks first and leaves its own division by the accumulation steps off;
* the frozen target stays outside: only the trained module is wrapped;
* ``save`` is called at step boundaries alone, so there are never partial gradients to keep.

Ranks: one process per device. Rank and address come from torchrun's variables or from Slurm's; a single process needs
neither and never makes a process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jetspec_train.artifacts.errors import UserError

OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True)
class Ranks:
    """Which process this is. ``local`` is the index of its device on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join_ranks(device: str = "cpu") -> Ranks:
    """Find this process's rank from the launcher's variables and meet the others.

    Understood: torchrun's ``RANK``/``WORLD_SIZE``/``LOCAL_RANK`` and Slurm's ``SLURM_PROCID``/``SLURM_NTASKS``/
    ``SLURM_LOCALID`` (only inside ``srun``, where ``SLURM_STEP_ID`` is set: a bare sbatch script is one process).
    Raises UserError when there are several ranks and no address to meet at.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        ranks = Ranks(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0")))
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        ranks = Ranks(int(env["SLURM_PROCID"]), int(env.get("SLURM_NTASKS", "1")), int(env.get("SLURM_LOCALID", "0")))
    else:
        ranks = Ranks()
    if ranks.world > 1 and not dist.is_initialized():
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise UserError(
                f"{ranks.world} ranks were started but {' and '.join(missing)} is not set, so that they cannot meet. "
                f"Start with torchrun, or export MASTER_ADDR (the first node's name) and MASTER_PORT (a free port)."
            )
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world)
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


def largest_over_ranks(value: int, ranks: Ranks, device: torch.device | str = "cpu") -> int:
    """The same answer on every rank: the largest of theirs (how ranks agree to stop)."""
    if ranks.world == 1:
        return value
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


class Engine(Protocol):
    """What the loop may ask of an engine; see the module text for the contract."""

    name: str
    ranks: Ranks

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> nn.Module: ...

    def backward(self, loss: Tensor, *, boundary: bool = True) -> None: ...

    def step(self) -> float: ...

    def model_tensors(self) -> dict[str, Tensor]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, tensors: dict[str, Tensor]) -> None: ...


class TorchEngine:
    """Plain torch: autograd, one all-reduce of the summed gradients per step, global-norm clipping, the optimiser."""

    name = "torch"

    def __init__(self, *, clip: float = 0.0, ranks: Ranks | None = None) -> None:
        """``clip``: largest global gradient norm; 0 leaves gradients as they are."""
        self.clip = clip
        self.ranks = ranks or Ranks()
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> nn.Module:
        """Take charge of the three; returns the module that the loop must call."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        if self.ranks.world > 1:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, src=0)
        return model

    def backward(self, loss: Tensor, *, boundary: bool = True) -> None:
        """Add the gradient of one micro-step. ``boundary``: it is the last one before ``step``."""
        loss.backward()

    def step(self) -> float:
        """Reduce, clip, update, advance the schedule. Returns the gradient norm before clipping.

        Raises FloatingPointError if the gradient is not finite: no update is made, so that the last checkpoint and
        the weights in memory are still good.
        """
        assert self.model is not None and self.optimizer is not None
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.ranks.world > 1:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            # A parameter unused on this rank may be used on another: every rank reduces the same flat buffer.
            flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
            dist.all_reduce(flat)
            for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = piece.view_as(parameter)
            gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient norm is {norm.item()}")
        if self.clip > 0 and gradients:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def model_tensors(self) -> dict[str, Tensor]:
        """The trained weights, whole, on the CPU, in fp32 (what a checkpoint and the export hold)."""
        assert self.model is not None
        return {name: value.detach().to("cpu").contiguous() for name, value in self.model.state_dict().items()}

    def save(self, folder: Path) -> None:
        """Write the optimiser's and the schedule's state into ``folder`` (rank 0 only; the ranks hold the same)."""
        assert self.optimizer is not None
        if self.ranks.is_main:
            state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
            torch.save(state, folder / OPTIMIZER_FILE)

    def load(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Bring back weights (``tensors``, strictly the same names and shapes) and optimiser state."""
        assert self.model is not None and self.optimizer is not None
        load_strictly(self.model, tensors, str(folder))
        state = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def load_strictly(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Copy ``tensors`` into ``model``; any missing, extra or misshapen tensor is an error that names them all."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in tensors.items()}
    missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    shapes = [
        f"{n} {given[n]} instead of {wanted[n]}" for n in sorted(wanted.keys() & given.keys()) if wanted[n] != given[n]
    ]
    if missing or extra or shapes:
        raise UserError(
            f"The weights in {source} do not fit this draft: missing {missing}, "
            f"unexpected {extra}, other shapes {shapes}."
        )
    model.load_state_dict(tensors)


def create_engine(name: str, *, clip: float, ranks: Ranks) -> Engine:
    """The engine of that name; ``auto`` is plain torch."""
    if name in ("auto", "torch"):
        return TorchEngine(clip=clip, ranks=ranks)
    raise UserError(f"engine.name={name} is not available in this version. Use engine.name=torch (or auto).")

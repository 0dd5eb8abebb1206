"""The door to the optimiser: one small interface, plain torch or DeepSpeed behind it.

The loop knows only these calls: ``wrap`` once, then for every micro-step ``backward(loss, boundary)``, then
``step()`` once per optimiser step; ``load`` right after ``wrap`` to continue a run, ``model_tensors`` and
``optimizer_state`` to save one. The contract of both engines:

* **the loss arrives normalised for the whole global batch** (every rank and every accumulation step, METHODS 3), so
  gradients are *summed* over micro-steps and ranks and never averaged;
* the frozen target stays outside: only the trained module is wrapped;
* a run is saved at step boundaries alone, so there are never partial gradients to keep;
* what is saved is whole, in fp32, and in torch's own form, whatever the engine and however it was divided among the
  ranks. So a checkpoint continues on another number of ranks, another ZeRO stage or the other engine, and needs
  neither a GPU nor DeepSpeed to be exported. Price: rank 0 holds 12 bytes per trained parameter in CPU memory while
  it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import EngineConfig
from jetspec_train.training.ranks import Ranks

OPTIMIZER_FILE = "optimizer.pt"
DEFAULT_ZERO_STAGE = 2


class Engine(Protocol):
    """What the loop may ask of an engine; see the module text for the contract."""

    name: str
    ranks: Ranks
    on_exchange: Callable[[], None]  # called before ranks wait for each other's gradients

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> nn.Module: ...

    def backward(self, loss: Tensor, *, boundary: bool = True) -> None: ...

    def step(self) -> float: ...

    def model_tensors(self) -> dict[str, Tensor]: ...

    def optimizer_state(self) -> dict[str, Any]: ...

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
        self.on_exchange: Callable[[], None] = lambda: None

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
        """Reduce, clip, update, advance the schedule. Returns the gradient norm before clipping (the draft's, where a
        verifier is trained beside it: each is clipped by its own, so that the one does not move the other).

        Raises FloatingPointError if the gradient is not finite: no update is made, so that the last checkpoint and
        the weights in memory are still good.
        """
        assert self.model is not None and self.optimizer is not None
        if self.ranks.world > 1:
            self.on_exchange()
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            # A parameter unused on this rank may be used on another: every rank reduces the same flat buffer.
            flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
            dist.all_reduce(flat)
            for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = piece.view_as(parameter)
        norm = self.clip_networks()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def clip_networks(self) -> float:
        """Clip each network by its own norm; returns the first one's. FloatingPointError, and no gradients any more,
        if one is not finite."""
        assert self.model is not None and self.optimizer is not None
        norms = [(group, torch.nn.utils.get_total_norm(gradients_of(group))) for group in _networks(self.model)]
        bad = [norm.item() for _, norm in norms if not bool(torch.isfinite(norm))]
        if bad:
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient norm is {bad[0]}")
        if self.clip > 0:
            for group, norm in norms:
                torch.nn.utils.clip_grads_with_norm_(group, self.clip, norm)
        return float(norms[0][1]) if norms else 0.0

    def model_tensors(self) -> dict[str, Tensor]:
        """The trained weights, whole, on the CPU, in fp32 (what a checkpoint and the export hold).

        Every rank must call it; rank 0 gets the weights, the others may get nothing.
        """
        assert self.model is not None
        return {name: value.detach().to("cpu").contiguous() for name, value in self.model.state_dict().items()}

    def optimizer_state(self) -> dict[str, Any]:
        """State of optimiser and schedule for ``write_optimizer``; every rank must call it, rank 0 gets it."""
        assert self.optimizer is not None
        return {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Bring back weights (``tensors``, strictly the same names and shapes) and the state in ``folder``."""
        assert self.model is not None and self.optimizer is not None
        load_strictly(self.model, tensors, str(folder))
        state = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _networks(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters that have gradients: the draft's and the verifier's apart, those of any other module together."""
    apart: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            apart[name.startswith("verifier.")].append(parameter)
    return [group for group in apart.values() if group]


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


def write_optimizer(state: dict[str, Any], folder: Path) -> None:
    """Put what ``optimizer_state`` gave rank 0 into a checkpoint's folder."""
    torch.save(state, folder / OPTIMIZER_FILE)


def create_engine(
    cfg: EngineConfig, *, clip: float, ranks: Ranks, accumulation: int = 1, device: torch.device | str = "cpu"
) -> Engine:
    """The engine that was asked for. ``auto`` is DeepSpeed where it can be imported and there are several ranks or a
    GPU, else plain torch. Raises UserError for an engine that is missing or lacks the ZeRO stage asked for."""
    if cfg.name not in ("auto", "torch", "deepspeed"):
        raise UserError(f"engine.name={cfg.name} is not known; allowed are auto, torch, deepspeed.")
    from jetspec_train.training import deepspeed_engine

    device = torch.device(device)
    reason = "engine.name=torch"
    if cfg.name == "deepspeed" or (cfg.name == "auto" and (ranks.world > 1 or device.type == "cuda")):
        reason = deepspeed_engine.why_not(device)
        if not reason:
            return deepspeed_engine.DeepSpeedEngine(
                clip=clip,
                ranks=ranks,
                accumulation=accumulation,
                device=device,
                stage=DEFAULT_ZERO_STAGE if cfg.zero_stage is None else cfg.zero_stage,
                offload=cfg.offload,
            )
        if cfg.name == "deepspeed":
            raise UserError(f"engine=deepspeed cannot be used: {reason}. Install it, or use engine=torch.")
    elif cfg.name == "auto":
        reason = "one rank without a GPU"
    if cfg.zero_stage or cfg.offload:
        asked = f"engine.zero_stage={cfg.zero_stage}" if cfg.zero_stage else "engine.offload=true"
        raise UserError(
            f"{asked} needs DeepSpeed, but this run uses plain torch ({reason}), which keeps everything on every rank. "
            f"Use engine=deepspeed, or leave engine.zero_stage and engine.offload at their defaults."
        )
    return TorchEngine(clip=clip, ranks=ranks)

"""DeepSpeed behind the engine's door: ZeRO 0-3 and CPU offload for the trained module.

ZeRO divides optimiser state (stage 1), gradients (2) and weights (3) among the ranks; stage 0 is plain data parallel.
At stage 3 a layer is brought together for its own forward and backward; what is read outside its module's forward (the
parent term, inside the loss) for the whole step; what is small, always.
Weights stay fp32 at every stage; with ``train.precision=bfloat16`` the module multiplies in bf16 under autocast, just
as under plain torch, so that both engines compute the same numbers and any checkpoint fits either. DeepSpeed's own
bf16 mode would save 2 bytes of weights and 2 of gradients per parameter, and would run the residual stream and the
accumulation in bf16; for drafts, which are small beside their target, exactness was preferred.

Three choices against surprises:

* DeepSpeed starts with the first micro-step, after ``load``: a resumed run hands it finished weights, and what is left
  to put back is Adam's two moments.
* The optimiser is torch's AdamW, offloaded or not, so nothing is compiled. DeepSpeed would also build a shared-memory
  extension on CPUs, for minutes, and wait for ever on the lock that a killed build leaves; gloo does that work.
* It averages gradients over ranks where our loss is already divided by the weight of the whole batch, so the loss is
  multiplied by the number of ranks, and its division by the accumulation steps is left off.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jetspec_train.artifacts.errors import UserError
from jetspec_train.training.engine import TorchEngine
from jetspec_train.training.ranks import Ranks, leave_ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
KEEP_WHOLE_BELOW = 100_000  # ZeRO-3 leaves smaller weights undivided: gathering them costs more than they take


def why_not(device: torch.device) -> str:
    """Why DeepSpeed cannot be used here, "" if it can."""
    if importlib.util.find_spec("deepspeed") is None:
        return "it is not installed (pip install deepspeed)"
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _private_extensions()
    try:
        with _quiet():
            import deepspeed  # noqa: F401
    except Exception as error:  # it looks at compilers and drivers while it is imported, and any of them may be odd
        return f"its import fails ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    return ""


def _private_extensions() -> None:
    """Compiled extensions of this job go to a folder of its own, where no killed build has left a lock.

    Raises UserError for a folder chosen by the user in which such a lock lies.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not chosen:
        job = os.environ.get("SLURM_JOB_ID") or f"{os.getuid()}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(tempfile.gettempdir()) / f"torch-extensions-{job}")
        return
    locks = [str(path) for path in Path(chosen).glob("*/lock")]
    if locks:
        raise UserError(
            f"A build lock lies in TORCH_EXTENSIONS_DIR: {', '.join(locks)}. A build that was killed leaves one, and "
            f"every later start waits for it without a word. If no build is running, delete it, or unset "
            f"TORCH_EXTENSIONS_DIR."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While DeepSpeed starts, its information and warnings (dozens of lines per rank) are dropped; errors stay."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _LossOnly(nn.Module):
    """What DeepSpeed sees: a module whose output is the loss tensor. The rest of the result is kept aside.

    Its hooks find tensors in tuples and dicts only, not in a result of our own type.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.result: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.result = self.inner(*args, **kwargs)
        return self.result if isinstance(self.result, Tensor) else self.result.loss


class _Wrapped(nn.Module):
    """What the loop calls: runs the module through DeepSpeed and gives back its whole result."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__()
        self._engine = (engine,)  # in a tuple, so that it is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running = self._engine[0].start()
        loss = running(*args, **kwargs)
        result, running.module.result = running.module.result, None
        # DeepSpeed's own loss tensor, not the module's: on its way back the gradient passes through its hooks.
        return loss if isinstance(result, Tensor) else dataclasses.replace(result, loss=loss)


class DeepSpeedEngine(TorchEngine):
    """Plain torch until the first micro-step, DeepSpeed from then on; see the module text."""

    name = "deepspeed"

    def __init__(
        self,
        *,
        clip: float = 0.0,
        ranks: Ranks | None = None,
        accumulation: int = 1,
        device: torch.device | str = "cpu",
        stage: int = 2,
        offload: bool = False,
    ) -> None:
        """``stage``: 0-3. ``offload``: optimiser state and update on the CPU (stage 1 and above).

        Raises UserError for offload at stage 0, which has nothing of its own to offload.
        """
        super().__init__(clip=clip, ranks=ranks)
        if offload and stage == 0:
            raise UserError("engine.offload=true needs engine.zero_stage=1, 2 or 3 (stage 0 divides nothing).")
        self.accumulation, self.stage, self.offload = accumulation, stage, offload
        self.device = torch.device(device)
        self.running: Any = None  # the deepspeed engine, once it has started

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> nn.Module:
        super().wrap(model, optimizer, scheduler)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        # DeepSpeed replaces the optimiser's parameters by its own flat ones; the saved form keeps these.
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        return _Wrapped(self)

    def start(self) -> Any:
        """The running deepspeed engine; the first call, on all ranks together, makes it."""
        if self.running is None:
            assert self.model is not None and self.optimizer is not None
            stated = [p for group in self.groups for p in group if p in self.optimizer.state]
            moments = {p: self.optimizer.state.pop(p) for p in stated}
            with _quiet():
                self.running = self._initialize()
            self._make_state(moments)
        return self.running

    def _initialize(self) -> Any:
        import deepspeed

        if not dist.is_initialized():  # a single rank; DeepSpeed wants a process group even so
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(leave_ranks)
        os.environ.setdefault("LOCAL_RANK", str(self.ranks.local))  # asked for even where one process has no launcher
        _never_build_shared_memory(deepspeed)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        assert self.model is not None
        module = _LossOnly(self.model)
        running, *_ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=self._settings(), dist_init_required=False
        )
        if self.stage == 3:
            for weight in getattr(self.model, "used_directly", list)():
                deepspeed.zero.register_external_parameter(module, weight)
        return running

    def _settings(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": KEEP_WHOLE_BELOW}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        return {
            # DeepSpeed only divides these numbers by each other; rows per step are the loop's business.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0,  # ours
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # its CPU Adam would have to be compiled
            "steps_per_print": 1_000_000_000,
            "wall_clock_breakdown": False,
        }

    def backward(self, loss: Tensor, *, boundary: bool = True) -> None:
        running = self.start()
        self.on_exchange()
        running.backward(loss * self.ranks.world, scale_wrt_gas=False)
        if not boundary:
            running.step()  # counts the micro-step, changes nothing

    def step(self) -> float:
        """Clip, update, advance the schedule; see ``TorchEngine.step``, whose clipping of draft and verifier apart
        this repeats on divided gradients (DeepSpeed itself would clip them together)."""
        norm = self.clip_networks() if self.stage == 0 else self._clip_divided()
        self.running.step()
        self.scheduler.step()
        return norm

    def _clip_divided(self) -> float:
        """``clip_networks`` on this rank's pieces of the gradients."""
        groups: list[list[nn.Parameter]] = [[], []]
        for parameter, name in self.names.items():
            if parameter.requires_grad:
                groups[name.startswith("verifier.")].append(parameter)
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, group in enumerate(groups):
            for piece in map(self._own_gradient, group):
                if piece is not None:
                    squares[number] += piece.double().square().sum()
        dist.all_reduce(squares)
        norms = squares.sqrt().tolist()
        for norm, group in zip(norms, groups, strict=True):
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient norm is {norm}")
            if 0 < self.clip < norm:
                for parameter in group:
                    self._scale_gradient(parameter, self.clip / (norm + 1e-6))
        return norms[0] if groups[0] else norms[1]

    def _own_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's piece of a reduced gradient (fp32, flat); None if it has no part of it."""
        if self.stage == 3:
            return deepspeed_utils().safe_get_local_grad(parameter)
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        return mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]

    def _scale_gradient(self, parameter: nn.Parameter, factor: float) -> None:
        piece = self._own_gradient(parameter)
        if piece is None:
            return
        if self.stage == 3:
            deepspeed_utils().safe_set_local_grad(parameter, piece * factor)
        else:
            piece.mul_(factor)

    def model_tensors(self) -> dict[str, Tensor]:
        if self.running is None or self.stage < 3:
            return super().model_tensors()  # every rank holds all weights
        assert self.model is not None
        tensors = {n: b.detach().cpu() for n, b in self.model.state_dict().items() if n not in self.names.values()}
        for parameter, name in self.names.items():
            whole = deepspeed_utils().safe_get_full_fp32_param(parameter)
            if self.ranks.is_main:
                tensors[name] = whole.detach().float().cpu().clone()
        return tensors if self.ranks.is_main else {}

    def optimizer_state(self) -> dict[str, Any]:
        """Adam's state whole and in torch's own form; every rank must call it, rank 0 gets it."""
        if self.running is None or self.stage == 0:
            return super().optimizer_state()
        assert self.optimizer is not None
        get = deepspeed_utils().safe_get_full_optimizer_state
        steps = {float(state["step"]) for state in self.optimizer.state.values()}
        state: dict[int, dict[str, Tensor]] = {}
        saved_groups: list[dict[str, Any]] = []
        for group, now in zip(self.groups, self.optimizer.param_groups, strict=True):
            numbers = range(len(state), len(state) + len(group))
            saved_groups.append({**{k: v for k, v in now.items() if k != "params"}, "params": list(numbers)})
            for number, parameter in zip(numbers, group, strict=True):
                whole = {name: get(parameter, name) for name in MOMENTS}
                kept = {name: value.float().cpu().clone() for name, value in whole.items() if self.ranks.is_main}
                state[number] = {"step": torch.tensor(max(steps)), **kept}
        if not self.ranks.is_main:
            return {}
        optimizer = {"state": state, "param_groups": saved_groups}
        return {"optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        if self.running is not None:
            raise RuntimeError("load must come before the first step")
        super().load(folder, tensors)

    def _make_state(self, moments: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """Adam's state for the flat, divided tensors that now stand for the parameters: zeros, or of a loaded run.

        Made here even for a fresh run: DeepSpeed ties parameters to their pieces after the first group has made its
        step, when the state of the second does not exist yet.
        """
        assert self.optimizer is not None
        if self.stage == 0:
            for parameter, state in moments.items():
                self.optimizer.state[parameter] = state
            return
        zero = self.running.optimizer
        flats = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        step = max((float(state["step"]) for state in moments.values()), default=0.0)
        for flat in flats:
            own = {name: torch.zeros_like(flat) for name in MOMENTS}
            self.optimizer.state[flat] = {"step": torch.tensor(step, device=flat.device), **own}
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()  # ties parameters to their pieces of the flat state
        for parameter, state in moments.items():
            for name in MOMENTS:
                deepspeed_utils().safe_set_full_optimizer_state(parameter, state[name], name)


def deepspeed_utils() -> Any:
    """DeepSpeed's public functions on divided tensors."""
    import deepspeed.utils

    return deepspeed.utils


def _never_build_shared_memory(deepspeed: Any) -> None:
    """Say that the CPU extension cannot be built, so that gloo is used; a private name, hence the pinned version."""
    compatible = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(compatible, dict):
        compatible["deepspeed_shm_comm"] = False

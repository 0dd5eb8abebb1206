"""What stage=train hands to the training loop: samples within the budget, batches by step number, dev prompts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import Config
from jetspec_train.data.packing import PackedSampler
from jetspec_train.data.prompts import iterate_prompts
from jetspec_train.data.recipes import load_recipe
from jetspec_train.data.samples import SampleStore, load_samples
from jetspec_train.stages.select import selected_ids
from jetspec_train.targets.target import Target
from jetspec_train.training.step import TrainBatch
from jetspec_train.training.verifier_step import held_out


def load_data(cfg: Config) -> tuple[SampleStore, int]:
    """The training samples that stage=select kept (all, if it did not run) within ``train.tokens``, and how many of
    them that limit left out.

    Raises UserError for more unique supervised tokens than ``budget.tokens``.
    """
    everything = load_samples(Path(cfg.run_dir) / "distill", "train")
    selected = selected_ids(Path(cfg.run_dir))
    if selected is not None:
        everything = everything.select(np.flatnonzero([name in selected for name in everything.ids]))
    store = everything if cfg.train.tokens is None else everything.limit_tokens(cfg.train.tokens)
    if not len(store):
        raise UserError(
            f"train.tokens={cfg.train.tokens} is less than the shortest of the {len(everything)} samples. Raise it."
        )
    if store.supervised_tokens > cfg.budget.tokens:
        raise UserError(
            f"The data hold {store.supervised_tokens:,} supervised tokens, more than "
            f"budget.tokens={cfg.budget.tokens:,}. Set train.tokens={cfg.budget.tokens} to train on a part of them, "
            f"or raise the budget."
        )
    return store, len(everything) - len(store)


class StepBatches:
    """The global batch of any step, from the step's number alone. Epochs are planned once, in order.

    ``holdout``: share of the samples that only the verifier learns from.
    """

    def __init__(self, sampler: PackedSampler, holdout: float = 0.0) -> None:
        self.sampler = sampler
        self.held_out = np.array(held_out(sampler.store.ids.tolist(), holdout)) if holdout > 0 else None
        self._ends: list[int] = []  # the first step after each epoch

    def steps(self, epochs: float) -> int:
        """Steps of so many epochs; a fraction counts for its part of the last one."""
        whole = int(epochs)
        while len(self._ends) < whole + (epochs > whole):
            self._plan_next()
        before = self._ends[whole - 1] if whole else 0
        part = round((self._ends[whole] - before) * (epochs - whole)) if epochs > whole else 0
        return max(1, before + part)

    def __call__(self, step: int) -> TrainBatch:
        while not self._ends or step >= self._ends[-1]:
            self._plan_next()
        epoch = next(number for number, end in enumerate(self._ends) if step < end)
        within = step - (self._ends[epoch - 1] if epoch else 0)
        packed = self.sampler.batch(epoch, within)
        first = within * self.sampler.sequences
        samples = [self.sampler.sequence_rows(epoch, first + line) for line in range(self.sampler.sequences)]
        held_out_BT = None
        if self.held_out is not None:
            of_document = [np.append(self.held_out[rows], False) for rows in samples]  # document -1 is padding
            held_out_BT = torch.from_numpy(
                np.stack([held[documents] for held, documents in zip(of_document, packed.documents_ST)])
            )
        return TrainBatch(
            tokens_BT=torch.from_numpy(packed.tokens_ST),
            positions_BT=torch.from_numpy(packed.positions_ST),
            documents_BT=torch.from_numpy(packed.documents_ST),
            supervised_BT=torch.from_numpy(packed.supervised_ST),
            samples=samples,
            held_out_BT=held_out_BT,
        )

    def _plan_next(self) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + self.sampler.epoch_steps(len(self._ends)))


class DevPrompt(NamedTuple):
    tokens: list[int]
    domain: str


def dev_prompts(cfg: Config, target: Target) -> list[DevPrompt]:
    """Up to ``train.eval_prompts`` prompts of the recipe's dev split, domains in turn, that fit the target's context.

    Raises UserError if there is none: without them the best checkpoint cannot be told.
    """
    domains: dict[str, list[DevPrompt]] = {}
    for prompt in iterate_prompts(load_recipe(cfg.recipe), ("dev",)):
        group = domains.setdefault(prompt.domain, [])
        if len(group) < cfg.train.eval_prompts:
            tokens = target.chat.render(prompt.messages)
            if len(tokens) <= min(cfg.distill.max_prompt_tokens, target.max_positions - cfg.train.eval_max_new_tokens):
                group.append(DevPrompt(tokens, prompt.domain))
    longest = max((len(group) for group in domains.values()), default=0)
    chosen = [group[turn] for turn in range(longest) for group in domains.values() if turn < len(group)]
    if not chosen:
        raise UserError(
            f"The recipe {cfg.recipe.name} has no prompt of the dev split, by which the best checkpoint is chosen. "
            f"Give it a dev share, or set train.eval_prompts=0 to keep the last checkpoint."
        )
    return chosen[: cfg.train.eval_prompts]

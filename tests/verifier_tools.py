"""A tiny run directory with a draft and a verifier, for tests of what comes after training; untrained, so quick."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jetspec_train.config import Config
from jetspec_train.modeling.draft_config import resolve_draft_config
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.verifier import Verifier
from jetspec_train.modeling.verifier_config import resolve_verifier_config
from jetspec_train.training.checkpoint import TrainState, save_checkpoint
from tests.tiny import tiny_target, tiny_target_config


def bigram_draft(target: Any, texts: Sequence[Sequence[int]], **draft: Any) -> DraftHead:
    """A draft that proposes what last followed the token before in ``texts``: with the target's own answers it is often
    right, and wrong where a token was followed by several others."""
    settings = dataclasses.replace(Config().draft, **{"layers": 1, "block": 7, "taps": 2, "parent_rank": 48, **draft})
    config = resolve_draft_config(settings, target.config, mask_token_id=target.mask_token_id)
    torch.manual_seed(0)
    head = DraftHead(config)
    followed = {before: after for text in texts for before, after in itertools.pairwise(text)}
    with torch.no_grad():
        table = torch.nn.functional.normalize(torch.randn(config.vocab_size, config.parent_rank), dim=-1)
        head.markov_head.markov_w1.weight.copy_(table)
        head.markov_head.markov_w2.weight.zero_()
        for before, after in followed.items():
            head.markov_head.markov_w2.weight[after] += 40.0 * table[before]
    return head


def noisy_verifier(target: Any, draft: DraftHead, *, bias: float = 2.0, spread: float = 1.0) -> Verifier:
    """A verifier whose logits scatter around ``bias``."""
    settings = dataclasses.replace(Config().verifier, layers=1, intermediate_size=32)
    verifier = Verifier(resolve_verifier_config(settings, draft.config, target_parameters=target.parameters))
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in (verifier.score, verifier.confidence_head.proj):
            torch.nn.init.normal_(layer.weight, std=spread * layer.in_features**-0.5)
            layer.bias.fill_(bias)
    return verifier.eval()


def run_with_verifier(run_dir: Path, *, step: int = 5, bias: float = 2.0, verifier: bool = True) -> Config:
    """A run directory with one checkpoint; returns its configuration."""
    from jetspec_train.decoding.decoder import Decoder
    from jetspec_train.stages.calibration_inputs import read_prompts

    target = tiny_target("llama")
    cfg = Config(run_dir=str(run_dir), target=tiny_target_config("llama"))
    cfg.decoding.shortlist, cfg.decoding.nodes = 8, 8
    cfg.calibrate = dataclasses.replace(
        cfg.calibrate, fit_prompts=6, certify_prompts=6, max_new_tokens=16, batch_size=3, stages=2
    )
    prompts = [prompt.tokens for split in read_prompts(cfg, target)[0].values() for prompt in split]
    answers = Decoder(target).generate(prompts, max_new_tokens=cfg.calibrate.max_new_tokens)
    head = bigram_draft(target, [answer.tokens for answer in answers])
    judge = noisy_verifier(target, head, bias=bias)
    tensors = {f"draft.{name}": tensor for name, tensor in head.state_dict().items()}
    if verifier:
        tensors |= {f"verifier.{name}": tensor for name, tensor in judge.state_dict().items()}
    state = TrainState(step=step, token_visits=100, seconds=1.0)
    state.identity = {"target": target.identity.to_dict(), "seed": 0}
    save_checkpoint(
        run_dir / "train" / "checkpoints",
        state,
        tensors=tensors,
        draft=head.config.to_dict(),
        verifier=judge.config.to_dict() if verifier else None,
        save_engine=lambda folder: torch.save({}, folder / "optimizer.pt"),
        keep=2,
    )
    return cfg

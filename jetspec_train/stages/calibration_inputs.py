"""What stage=calibrate works on: the checkpoint's draft and verifier, and the prompts of the two calibration splits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import Config

if TYPE_CHECKING:
    from jetspec_train.decoding.calibration import Calibration
    from jetspec_train.evaluation.shadow import ShadowPrompt
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.verifier import Verifier
    from jetspec_train.targets.target import Target

FIT, CERTIFY = "calibrate_fit", "calibrate_certify"  # splits of the recipe


def load_checkpoint(cfg: Config, checkpoint: Path) -> tuple[Target, DraftHead, Verifier, Calibration]:
    """Target, draft, verifier, and a calibration that still says nothing but to whom it belongs.

    Raises UserError where the configured target is not the one of the training.
    """
    from jetspec_train.artifacts.bundle import check_target
    from jetspec_train.decoding.bundles import PREFIX, VERIFIER_PREFIX, load_draft_tensors
    from jetspec_train.decoding.calibration import Calibration, weights_hash
    from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig
    from jetspec_train.modeling.verifier import Verifier, VerifierConfig
    from jetspec_train.stages.export import target_of_training
    from jetspec_train.targets.loading import load_target, target_identity
    from jetspec_train.training.checkpoint import load_draft_config, load_tensors, load_verifier_config

    trained_for = target_of_training(checkpoint.parent.parent, checkpoint)
    if trained_for is not None:
        check_target({"target": trained_for}, target_identity(cfg.target))
    tensors = load_tensors(checkpoint)
    head = DraftHead(DraftHeadConfig.from_dict(load_draft_config(checkpoint)))
    verifier = Verifier(VerifierConfig.from_dict(load_verifier_config(checkpoint) or {}))
    load_draft_tensors(head, tensors, str(checkpoint), PREFIX)
    load_draft_tensors(verifier, tensors, str(checkpoint), VERIFIER_PREFIX)
    target = load_target(cfg.target)
    nothing = Calibration(
        bundle=weights_hash(tensors), target=target.identity.to_dict(), mode=verifier.config.mode, temperatures={}
    )
    return target, head.eval(), verifier.eval(), nothing


def read_prompts(cfg: Config, target: Target) -> tuple[dict[str, list[ShadowPrompt]], dict[str, int]]:
    """Prompts of the two splits, at most as many as configured, and how many of each were too long.

    Raises UserError naming the split that has none.
    """
    from jetspec_train.data.prompts import iterate_prompts
    from jetspec_train.data.recipes import load_recipe
    from jetspec_train.evaluation.shadow import ShadowPrompt

    settings = cfg.calibrate
    wanted = {FIT: settings.fit_prompts, CERTIFY: settings.certify_prompts}
    found: dict[str, list[ShadowPrompt]] = {split: [] for split in wanted}
    skipped = dict.fromkeys(wanted, 0)
    longest = min(cfg.distill.max_prompt_tokens, target.max_positions - settings.max_new_tokens)
    for prompt in iterate_prompts(load_recipe(cfg.recipe), (FIT, CERTIFY)):
        own = found[prompt.split]
        if len(own) >= wanted[prompt.split]:
            if all(len(found[split]) >= count for split, count in wanted.items()):
                break
            continue
        tokens = list(target.chat.render(prompt.messages))
        if len(tokens) > longest:
            skipped[prompt.split] += 1
            continue
        own.append(ShadowPrompt(prompt.id, prompt.domain, tokens, len(own)))
    for split, prompts in found.items():
        if not prompts:
            raise UserError(
                f"The recipe {cfg.recipe.name} has no prompt of at most {longest} tokens in its split {split}. Give "
                "the split a share in the recipe, or lower calibrate.max_new_tokens."
            )
    return found, skipped

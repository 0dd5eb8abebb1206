"""What a training trains as draft: a block head or an EAGLE-3 head, fresh of this seed or out of stored tensors.

A checkpoint's ``draft.json`` says ``"kind": "eagle3"`` where it is one; a block head's says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import Config

if TYPE_CHECKING:
    import torch

    from jetspec_train.data.samples import SampleStore
    from jetspec_train.modeling.draft_config import DraftHeadConfig
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
    from jetspec_train.modeling.vocabulary import DraftVocabulary
    from jetspec_train.stages.training_verifier import Networks
    from jetspec_train.targets.target import Target
    from jetspec_train.training.eagle3_step import Eagle3Step
    from jetspec_train.training.step import DraftStep, StepSettings

EAGLE3 = "eagle3"


@dataclass(frozen=True)
class FreshDraft:
    """``vocabulary``: the reduced one of an EAGLE-3 head, None for the whole."""

    config: DraftHeadConfig | Eagle3Config
    head: DraftHead | Eagle3Head
    vocabulary: DraftVocabulary | None = None


def fresh_draft(cfg: Config, target: Target, store: SampleStore) -> FreshDraft:
    """A draft for this target with the initial weights of this seed; the global generator is left as it was.

    Raises UserError for a draft that does not fit the target.
    """
    import torch

    from jetspec_train.modeling.draft_config import resolve_draft_config
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.eagle3 import Eagle3Head
    from jetspec_train.modeling.eagle3_training import initialise_eagle3, resolve_eagle3_config

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        if cfg.draft.kind != EAGLE3:
            config = resolve_draft_config(cfg.draft, target.config, mask_token_id=target.mask_token_id)
            return FreshDraft(config, DraftHead(config))
        vocabulary = None if cfg.draft.vocabulary is None else answer_vocabulary(store, target, cfg.draft.vocabulary)
        described = resolve_eagle3_config(cfg.draft, target.config, draft_vocab_size=cfg.draft.vocabulary)
        head = Eagle3Head(described)
        initialise_eagle3(head, target.head.weight.detach().cpu(), None if vocabulary is None else vocabulary.ids_X)
        return FreshDraft(described, head, vocabulary)


def answer_vocabulary(store: SampleStore, target: Target, size: int) -> DraftVocabulary:
    """The ``size`` most frequent tokens of the answers, those that end one among them; counted on the CPU.

    Raises UserError if ``size`` is not below the target's vocabulary.
    """
    import numpy as np
    import torch

    from jetspec_train.modeling.vocabulary import choose_vocabulary, token_counts

    if not len(target.eos_ids) <= size < target.vocab_size:
        raise UserError(
            f"draft.vocabulary={size}: must be below the target's vocabulary of {target.vocab_size} (leave it "
            f"unset for all) and hold the {len(target.eos_ids)} tokens that end an answer."
        )
    answers = (
        torch.from_numpy(store.tokens[start + prompt : end].astype(np.int64))
        for start, prompt, end in zip(store.starts[:-1], store.prompt_lengths, store.starts[1:])
    )
    return choose_vocabulary(token_counts(answers, target.vocab_size), size, always=target.eos_ids)


def described(config: DraftHeadConfig | Eagle3Config) -> dict[str, Any]:
    """What a checkpoint stores as ``draft.json``."""
    from jetspec_train.modeling.eagle3 import Eagle3Config

    return {"kind": EAGLE3, **config.to_dict()} if isinstance(config, Eagle3Config) else config.to_dict()


def kind_and_settings(draft: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(``block`` or ``eagle3``, the configuration's fields) of a checkpoint's ``draft.json``."""
    settings = dict(draft)
    return settings.pop("kind", "block"), settings


def empty_draft(config: DraftHeadConfig | Eagle3Config) -> DraftHead | Eagle3Head:
    """A draft of this configuration whose weights are still to be loaded."""
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head

    return Eagle3Head(config) if isinstance(config, Eagle3Config) else DraftHead(config)


def draft_of(tensors: Mapping[str, Any], config: DraftHeadConfig | Eagle3Config, device: torch.device) -> Any:
    """A draft with the weights that an engine gave out (``draft.*``); a copy, as a divided engine has no whole."""
    from jetspec_train.training.engine import load_strictly

    prefix = "draft."
    head = empty_draft(config)
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    load_strictly(head, own, "the running training")
    return head.to(device)


def step_module(networks: Networks, target: Target, settings: StepSettings) -> DraftStep | Eagle3Step:
    """What an engine trains: the networks of this training and their loss."""
    from jetspec_train.modeling.eagle3 import Eagle3Head
    from jetspec_train.training.eagle3_step import Eagle3Step
    from jetspec_train.training.step import DraftStep

    if isinstance(networks.draft, Eagle3Head):
        return Eagle3Step(networks.draft, target, settings)
    return DraftStep(
        networks.draft, target, settings, networks.verifier, networks.judging, train_draft=not networks.frozen
    )

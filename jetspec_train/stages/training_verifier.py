"""The networks of stage=train: a fresh draft or a frozen one, the verifier beside it, and what the latter learns from.

Nothing here imports torch until it is called: settings that contradict each other are told at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import sha256_file
from jetspec_train.config import Config, to_dict
from jetspec_train.stages.training_drafts import EAGLE3, FreshDraft, fresh_draft

if TYPE_CHECKING:
    from torch import Tensor

    from jetspec_train.data.samples import SampleStore
    from jetspec_train.modeling.draft_config import DraftHeadConfig
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
    from jetspec_train.modeling.verifier import Verifier
    from jetspec_train.modeling.vocabulary import DraftVocabulary
    from jetspec_train.targets.target import Target
    from jetspec_train.training.stored_paths import StoredPaths
    from jetspec_train.training.verifier_step import JudgeSettings


@dataclass(frozen=True)
class Networks:
    """What a training trains, and what it does not.

    ``verifier``, ``judging``: None without a verifier. ``stored``: negatives to learn from, None without any.
    ``frozen``: weights (``draft.*``) that stay as they are and go into every checkpoint; empty where the draft learns.
    """

    draft_config: DraftHeadConfig | Eagle3Config
    draft: DraftHead | Eagle3Head
    verifier: Verifier | None
    judging: JudgeSettings | None
    stored: StoredPaths | None
    frozen: dict[str, Tensor]
    inputs: dict[str, str]  # of the manifest
    vocabulary: DraftVocabulary | None = None  # of an EAGLE-3 draft, where it is reduced

    @property
    def verifier_config(self) -> dict[str, Any] | None:
        return None if self.verifier is None else self.verifier.config.to_dict()

    @property
    def verifier_parameters(self) -> int:
        return 0 if self.verifier is None else self.verifier.trainable_parameters

    def describe(self, target: Target) -> str:
        """Sizes in words: each network alone, and both together, as shares of the target."""
        draft, judge = sum(p.numel() for p in self.draft.parameters()), self.verifier_parameters

        def share(parameters: int) -> str:
            return f"{parameters / target.parameters:.1%}"

        layers = self.draft_config.layers
        words = (
            f"{'frozen ' if self.frozen else ''}draft of {draft:,} parameters ({share(draft)} of the target), "
            f"{layers} layer{'s' if layers > 1 else ''}"
        )
        if self.vocabulary is not None:
            words += (
                f", which can say {len(self.vocabulary.ids_X):,} of {self.vocabulary.vocab_size:,} tokens, "
                f"{self.vocabulary.coverage:.2%} of the answers"
            )
        if self.verifier is None:
            return words
        stored = f", {len(self.stored):,} stored paths" if self.stored else ""
        return (
            f"{words}; verifier of {judge:,} ({share(judge)}; both {share(draft + judge)}), "
            f"rule {self.verifier.config.mode}{stored}"
        )


def networks(cfg: Config, target: Target, store: SampleStore) -> Networks:
    """Fresh networks of this seed, or the frozen draft of a checkpoint with a fresh verifier.

    Raises UserError where there is no such checkpoint, or settings contradict each other.
    """
    frozen: dict[str, Tensor] = {}
    inputs: dict[str, str] = {}
    if cfg.train.only == "verifier":
        config, head, frozen = frozen_draft(cfg)
        draft = FreshDraft(config, head)
        inputs["draft"] = identity(cfg)["frozen_draft"]
    else:
        draft = fresh_draft(cfg, target, store)
    stored = stored_paths(cfg, store) if has_verifier(cfg) else None
    if stored is not None:
        inputs["negatives"] = identity(cfg)["negatives"]
    verifier = None
    if has_verifier(cfg):
        verifier = fresh_verifier(cfg, cast("DraftHeadConfig", draft.config), target.parameters)
    return Networks(
        draft_config=draft.config,
        draft=draft.head.to(target.device),
        verifier=None if verifier is None else verifier.to(target.device),
        judging=judge_settings(cfg, stored=stored is not None),
        stored=stored,
        frozen=frozen,
        inputs=inputs,
        vocabulary=draft.vocabulary,
    )


def has_verifier(cfg: Config) -> bool:
    """Whether this training makes a verifier. Raises UserError for settings that contradict each other."""
    if cfg.train.only == "verifier" and not cfg.verifier.enabled:
        raise UserError("train.only=verifier with verifier.enabled=false: there is nothing to train.")
    if cfg.train.init is not None and cfg.train.only != "verifier":
        raise UserError(
            f"train.init={cfg.train.init} is the frozen draft of train.only=verifier; set that, or unset it."
        )
    if cfg.draft.kind == EAGLE3 and cfg.train.only == "verifier":
        raise UserError(
            "train.only=verifier with draft.kind=eagle3: the verifier reads the states of block drafts only."
        )
    if cfg.draft.kind == EAGLE3 and cfg.verifier.enabled and cfg.train.only is None:
        raise UserError(
            "verifier.enabled=true with draft.kind=eagle3: the verifier reads the states of a block, which EAGLE-3 "
            "does not have. Set verifier=none."
        )
    return cfg.verifier.enabled and cfg.train.only != "draft" and cfg.draft.kind == "block"


def train_folder(cfg: Config) -> Path:
    """Where this training writes: ``run_dir/train``, or ``run_dir/verifier`` beside the draft's training."""
    return Path(cfg.run_dir) / ("verifier" if cfg.train.only == "verifier" else "train")


def holdout(cfg: Config) -> float:
    """Share of the samples that the draft does not learn from (0 without a verifier to learn from them)."""
    return cfg.verifier.holdout if has_verifier(cfg) else 0.0


def identity(cfg: Config) -> dict[str, Any]:
    """What determines the verifier's weights, for the identity of the training; nothing without a verifier."""
    if not has_verifier(cfg):
        return {}
    described: dict[str, Any] = {"verifier": to_dict(cfg.verifier)}
    negatives = negatives_digest(cfg)
    if negatives is not None:
        described["negatives"] = negatives
    if cfg.verifier.mode != "match_greedy":
        described["verifier"]["sampling"] = to_dict(cfg.distill.sampling)
    if cfg.train.only == "verifier":
        described["frozen_draft"] = sha256_file(frozen_checkpoint(cfg) / "model.safetensors")
    return described


def negatives_digest(cfg: Config) -> str | None:
    """The digest of the finished negatives that this training would read, None if there are none or none are wanted."""
    from jetspec_train.artifacts.manifest import read_manifest

    if not cfg.verifier.negatives or cfg.verifier.negatives_share == 0:
        return None
    manifest = read_manifest(Path(cfg.run_dir) / "negatives")
    return None if manifest is None else manifest.digest()


def frozen_checkpoint(cfg: Config) -> Path:
    """The checkpoint whose draft stays as it is under ``train.only=verifier``."""
    from jetspec_train.training.checkpoint import find_checkpoint

    return find_checkpoint(Path(cfg.run_dir) / "train", cfg.train.init or "best")


def judge_settings(cfg: Config, *, stored: bool) -> JudgeSettings | None:
    """How a step judges; None without a verifier. Raises UserError where mode and data do not fit each other."""
    from jetspec_train.objectives.candidates import Rule
    from jetspec_train.objectives.verifier_loss import VerifierWeights
    from jetspec_train.targets.sampling import is_greedy, process_logits
    from jetspec_train.training.verifier_step import JudgeSettings

    if not has_verifier(cfg):
        return None
    settings, sampling = cfg.verifier, cfg.distill.sampling
    process = None
    if settings.mode != "match_greedy":
        if is_greedy(sampling):
            raise UserError(
                f"verifier.mode={settings.mode} needs answers sampled by the target, but "
                "distill.sampling.temperature=0. Distill with a temperature, or use verifier.mode=match_greedy."
            )
        if sampling.repetition_penalty != 1.0:
            raise UserError(
                f"verifier.mode={settings.mode} with distill.sampling.repetition_penalty="
                f"{sampling.repetition_penalty}: the penalty depends on the whole text and is not supported here."
            )
        process = partial(process_logits, sampling=sampling)
    return JudgeSettings(
        rule=Rule(settings.mode, settings.siblings, process),
        weights=VerifierWeights(
            settings.confidence_weight, settings.correctness_weight, settings.reject_weight, settings.sibling_weight
        ),
        blocks=settings.blocks,
        seen_weight=settings.seen_weight if settings.holdout > 0 else 1.0,
        negatives_share=settings.negatives_share if stored else 0.0,
    )


def fresh_verifier(cfg: Config, draft: DraftHeadConfig, target_parameters: int) -> Verifier:
    """A verifier with the initial weights of this seed; the global generator is left as it was."""
    import torch

    from jetspec_train.modeling.verifier import Verifier
    from jetspec_train.modeling.verifier_config import resolve_verifier_config

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed + 1)
        return Verifier(resolve_verifier_config(cfg.verifier, draft, target_parameters=target_parameters))


def frozen_draft(cfg: Config) -> tuple[DraftHeadConfig, DraftHead, dict[str, Tensor]]:
    """The draft that ``train.only=verifier`` judges: configuration, head, and its weights as a checkpoint names them.

    Says so when that draft has learned from the samples on which the verifier is to learn.
    """
    from jetspec_train.modeling.draft_config import DraftHeadConfig
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.training.checkpoint import load_draft_config, load_draft_tensors, open_checkpoint
    from jetspec_train.training.engine import load_strictly

    path = frozen_checkpoint(cfg)
    trained = open_checkpoint(path).state.identity
    held_out = (trained.get("verifier") or {}).get("holdout", 0.0)
    if held_out < cfg.verifier.holdout:
        print(
            f"train: NOTE: the draft of {path.name} learned with verifier.holdout={held_out}, so that it knows samples "
            f"that verifier.holdout={cfg.verifier.holdout} takes for unknown to it; the verifier will be too sure."
        )
    print(f"train: the draft of {path} stays as it is")
    config, tensors = DraftHeadConfig.from_dict(load_draft_config(path)), load_draft_tensors(path)
    draft = DraftHead(config)
    load_strictly(draft, tensors, str(path))
    return config, draft, {f"draft.{name}": tensor for name, tensor in tensors.items()}


def stored_paths(cfg: Config, store: SampleStore) -> StoredPaths | None:
    """The run's stored negatives on samples of ``store``; None where that stage has not finished, or none is wanted.

    Raises UserError if its files were changed, a path does not belong to its sample, or samples and negatives together
    exceed the budget.
    """
    if negatives_digest(cfg) is None:
        return None
    from jetspec_train.data.negatives.reading import finished_negatives, judged_tokens, load_negatives
    from jetspec_train.data.negatives.rows import KINDS
    from jetspec_train.training.stored_paths import StoredPath, StoredPaths

    folder, manifest = Path(cfg.run_dir) / "negatives", finished_negatives(cfg.run_dir)
    total = store.supervised_tokens + (judged_tokens(manifest) if manifest else 0)
    if total > cfg.budget.tokens:
        raise UserError(
            f"Samples and stored negatives hold {total:,} supervised tokens, more than budget.tokens="
            f"{cfg.budget.tokens:,}. Lower train.tokens, set verifier.negatives=false, or raise the budget."
        )
    row_of = {name: row for row, name in enumerate(store.ids.tolist())}
    soft = cfg.verifier.mode != "match_greedy"
    paths: list[StoredPath] = []
    for negative in load_negatives(folder, split="train"):
        row = row_of.get(negative.sample_id)
        if row is None:
            continue  # of a sample that this training leaves out
        start = int(store.starts[row])
        if store.tokens[start : start + len(negative.prefix)].tolist() != list(negative.prefix):
            raise UserError(
                f"The negative {negative.id} in {folder} does not begin like its sample {negative.sample_id}: it was "
                "made from other data. Delete that folder and run stage=negatives again."
            )
        labels = [math.exp(value) for value in negative.logprobs] if soft else [float(x) for x in negative.labels]
        paths.append(
            StoredPath(row, len(negative.prefix), tuple(negative.path), tuple(labels), KINDS.index(negative.kind))
        )
    judged = sum(len(path.labels) for path in paths)
    if store.supervised_tokens + judged > cfg.budget.tokens:
        raise UserError(
            f"The samples hold {store.supervised_tokens:,} supervised tokens and the negatives of {folder} {judged:,} "
            f"judged ones, together more than budget.tokens={cfg.budget.tokens:,}. Raise the budget, lower "
            "train.tokens, or set verifier.negatives=false."
        )
    return StoredPaths(paths, KINDS)

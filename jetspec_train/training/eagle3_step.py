"""One micro-step of an EAGLE-3 draft: training-time test, then the loss of a block draft over its own output head.

Stands where ``DraftStep`` stands for block drafts: the same plan, normaliser, engine and metrics. What its blocks are
and which place sees what: ``modeling.eagle3_training``.

Shapes: B rows, T tokens, A anchors, K steps, F taps, D / d width of target / draft.
"""

from __future__ import annotations

from torch import Tensor, nn

from jetspec_train.modeling.blocks import Blocks
from jetspec_train.modeling.eagle3 import Eagle3Head
from jetspec_train.modeling.eagle3_training import unroll
from jetspec_train.objectives.draft_loss import draft_loss
from jetspec_train.targets.target import Target
from jetspec_train.training.step import PackedText, StepOutput, StepSettings, autocast
from jetspec_train.training.verifier_step import JudgePlan


class Eagle3Step(nn.Module):
    """The trained head under the names of a bundle's tensors (``draft.*``); its forward is one micro-step.

    The frozen target is held outside the module tree, as in ``DraftStep``.
    """

    def __init__(self, draft: Eagle3Head, target: Target, settings: StepSettings) -> None:
        super().__init__()
        self.draft = draft
        self._outside = (target,)
        self.settings = settings

    def used_directly(self) -> list[Tensor]:
        """As ``DraftStep.used_directly``: the loss multiplies with the output head chunk by chunk."""
        return [self.draft.lm_head.weight]

    def forward(
        self,
        blocks: Blocks,
        weights_BAK: Tensor,
        text: PackedText,
        features_BTF: Tensor,
        target_hidden_BTD: Tensor,
        total_weight: float,
        judging: JudgePlan | None = None,
    ) -> StepOutput:
        """Loss (already normalised) and metrics of some rows. Raises ``ValueError`` if asked to judge."""
        if judging is not None:
            raise ValueError("an EAGLE-3 draft has no verifier; plan the step without judging")
        settings, draft, (target,) = self.settings, self.draft, self._outside
        with autocast(target.device, settings.autocast):
            hidden_BAKd = unroll(
                draft,
                features_BTF,
                text.tokens_BT,
                text.positions_BT,
                text.documents_BT,
                blocks.anchors_BA,
                target.embed,
                steps=settings.block,
            )
            drafted = draft_loss(
                hidden_BAKd,
                labels_BAK=draft.draft_ids(blocks.labels_BAK),
                weights_BAK=weights_BAK,
                clean_BA=None,
                target_hidden_BTD=target_hidden_BTD,
                sources_BAK=blocks.sources_BAK,
                draft_logits=None,
                target_logits=target.logits,
                total_weight=total_weight,
                ce=settings.ce,
                l1=settings.l1,
                kl=settings.kl,
                parent_state_BAKr=hidden_BAKd,
                parent_weight_Vr=draft.lm_head.weight,
                target_columns_X=draft.columns_X,
                chunk_rows=settings.chunk_rows,
                reach=settings.reach,
            )
        return StepOutput(drafted.loss, dict(drafted.metrics))

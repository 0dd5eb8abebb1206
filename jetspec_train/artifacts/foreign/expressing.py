"""What each form can say about a draft, and what it would turn it into.

``check`` is asked before anything is written. A *refusal* is final: the form has no place for the draft. An
*inequality* means that servers of the form would compute something else than was trained; ``export.force`` overrides
it, and the card then says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jetspec_train.artifacts.foreign.draft import TargetFacts
from jetspec_train.artifacts.foreign.eagle3 import FLAGS

FORMS = ("vllm", "dflash", "jetspec", "deepspec", "eagle3")
DESCRIPTIONS = {
    "vllm": "speculators form, served by vLLM",
    "dflash": "z-lab DFlash form, bidirectional in-place block (also SGLang, vLLM)",
    "jetspec": "JetSpec form, in-place block",
    "deepspec": "DeepSpec DSpark form, bidirectional anchor block with parent term",
    "eagle3": "SafeAILab / SGLang EAGLE-3 form",
}


@dataclass
class Verdict:
    """``refusals``: the form cannot hold the draft. ``inequalities``: it would be served as something else.
    ``notes``: true and worth knowing, for the card.
    """

    refusals: list[str] = field(default_factory=list)
    inequalities: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(form: str, kind: str, config: Mapping[str, Any], target: TargetFacts) -> Verdict:
    """Whether ``form`` can express a draft of ``kind`` (block, eagle3) with our ``config``."""
    verdict = Verdict()
    if kind == "eagle3":
        _check_eagle3(form, config, target, verdict)
    else:
        _check_block(form, config, target, verdict)
    return verdict


def _check_block(form: str, config: Mapping[str, Any], target: TargetFacts, verdict: Verdict) -> None:
    causal, anchor, parent = config["mask"] == "causal", config["layout"] == "anchor", config["parent"]
    if form == "eagle3":
        verdict.refusals.append("a block head is not an EAGLE-3 draft; this form holds an autoregressive layer")
        return
    if config["mask_token_id"] is None:
        verdict.refusals.append(
            "the MASK of this head is a learned vector, and the form has a place only for a token id "
            "(draft.mask_token_id: a reserved token of the target's vocabulary; it must be set before training)"
        )
    if config["hidden_size"] != config["target_hidden_size"]:
        verdict.refusals.append("the form shares the target's embedding, so draft and target must be equally wide")
    if form in ("dflash", "jetspec"):
        if anchor:
            verdict.inequalities.append(
                "slots follow the anchor layout (slot j predicts anchor + j + 1), loaders of this form read them in "
                "place: every drafted token would be one position off"
            )
        if parent != "none":
            verdict.inequalities.append("the parent term (markov_head) has no place in this form and would be dropped")
        if form == "dflash" and causal:
            verdict.inequalities.append(
                "the block is causal, and older loaders of this form take it for bidirectional without a word; "
                "export.formats=[jetspec] is the same folder for loaders that read the flag"
            )
    elif form == "deepspec":
        if not anchor:
            verdict.inequalities.append(
                "slots are in place, DeepSpec reads them in the anchor layout: one position off"
            )
        if causal:
            verdict.inequalities.append("the block is causal, DeepSpec always computes it bidirectional")
        if (target.embedding_scale, target.logit_softcap, target.logit_scale) != (1.0, None, 1.0):
            verdict.inequalities.append(f"DeepSpec's loader leaves out how {target.name} scales embeddings and logits")
    else:
        _check_vllm_block(config, target, verdict)


def _check_vllm_block(config: Mapping[str, Any], target: TargetFacts, verdict: Verdict) -> None:
    causal, anchor, parent = config["mask"] == "causal", config["layout"] == "anchor", config["parent"]
    dspark = anchor or parent != "none"
    verdict.notes.append("vLLM serves a draft as a chain; trees exist only in the bundled decoder")
    if parent == "gated":
        verdict.inequalities.append("the parent term is gated; vLLM implements only the vanilla one and stops")
    if target.embedding_scale != 1.0:
        verdict.inequalities.append(
            f"{target.name} scales its embeddings by {target.embedding_scale:g}; vLLM feeds the draft unscaled ones"
        )
    if dspark:
        verdict.notes.append(
            "written as dspark, which vLLM loads only on a GPU: names, shapes and the forward pass of the speculators "
            "package were checked, serving was not"
        )
        if causal:
            verdict.notes.append(
                "the causal block is expressed by sliding layers whose window covers every position; limit "
                f"--max-model-len to {config['max_positions']}"
            )
        if parent == "none":
            verdict.notes.append("a parent term of rank 1 that adds nothing was written, because vLLM insists on one")
        if target.logit_softcap is not None or target.logit_scale != 1.0:
            verdict.inequalities.append(
                f"{target.name} scales or caps its logits, vLLM adds the parent term to logits that are not"
            )
    elif causal:
        verdict.notes.append(
            "sliding_window_non_causal=false makes vLLM serve the block causal; the speculators package itself would "
            "compute full-attention layers bidirectional"
        )


def _check_eagle3(form: str, config: Mapping[str, Any], target: TargetFacts, verdict: Verdict) -> None:
    if form not in ("vllm", "eagle3"):
        verdict.refusals.append("an EAGLE-3 draft is autoregressive; this form holds a block head")
        return
    if target.embedding_scale != 1.0:
        verdict.inequalities.append(
            f"{target.name} scales its embeddings by {target.embedding_scale:g}; servers feed the draft unscaled ones"
        )
    if form == "vllm":
        return
    if config["layers"] != 1:
        verdict.refusals.append(f"the draft has {config['layers']} layers; this form names exactly one (midlayer)")
    if config.get("qk_norm"):
        verdict.inequalities.append("q_norm and k_norm are unknown to loaders of this form, which drop them silently")
    used = [flag for flag in FLAGS if config.get(flag)]
    if used:
        verdict.inequalities.append(f"{', '.join(used)} are unknown to SafeAILab's loader, which computes without them")
    usual = [1, target.num_layers // 2 - 1, target.num_layers - 4]
    if list(config["target_layer_ids"]) != usual:
        verdict.notes.append(
            f"SafeAILab's own code always reads the layers {usual}; this draft reads "
            f"{list(config['target_layer_ids'])}, which SGLang and vLLM follow"
        )

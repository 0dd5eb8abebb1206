"""stage=export: the best checkpoint becomes a bundle that loads by itself, checked by loading it.

Writes ``run_dir/export/bundle/`` (and ``run_dir/export/FORM/`` for every further form asked for). The
written bundle is read back like a stranger's and its logits are compared with the checkpoint's bit
for bit on the target's own features. A checkpoint of another target is refused with both values.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.bundle import check_target, read_bundle, write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import make_folder, read_json, sha256_file
from jetspec_train.artifacts.manifest import MANIFEST, differing_keys, read_manifest, verify_outputs, write_manifest
from jetspec_train.artifacts.provenance import git_revision, package_versions
from jetspec_train.config import Config
from jetspec_train.stages import standalone
from jetspec_train.stages.model_card import model_card
from jetspec_train.stages.training_drafts import EAGLE3, empty_draft, kind_and_settings

if TYPE_CHECKING:
    from torch import Tensor

    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.eagle3 import Eagle3Head
    from jetspec_train.targets.target import Target

STAGE = "export"
COMPARED_TOKENS = 24
CONFIDENCE = "confidence_head.proj."  # the one part of a verifier that another engine's form has a place for


def plan(cfg: Config) -> dict[str, Any]:
    """What would be exported; loads nothing."""
    if cfg.draft.kind == "standalone":
        return standalone.plan(cfg, STAGE)
    return {
        "stage": STAGE,
        "checkpoint": cfg.export.checkpoint,
        "from": str(Path(cfg.run_dir) / "train" / "checkpoints"),
        "target": cfg.target.name,
        "formats": list(cfg.export.formats),
        "writes": [str(Path(cfg.run_dir) / STAGE / name) for name in cfg.export.formats],
        "checks": "reads each one back; compares weights and logits bit for bit",
    }


def run(cfg: Config) -> None:
    """Export, reload, compare. Does nothing when the same checkpoint was exported in the same forms."""
    if cfg.draft.kind == "standalone":
        standalone.export(cfg)
        return
    from jetspec_train.training.checkpoint import (
        find_trained,
        load_draft_config,
        load_draft_tensors,
        load_verifier_config,
        load_verifier_tensors,
    )

    begun = time.monotonic()
    run_dir = Path(cfg.run_dir)
    folder = make_folder(run_dir / STAGE)
    checkpoint = find_trained(run_dir, cfg.export.checkpoint)
    checkpoint_hash = sha256_file(checkpoint / "manifest.json")
    calibration, calibration_digest = calibration_of(run_dir, checkpoint_hash)
    identity = {
        "checkpoint": checkpoint_hash,
        **({"calibration": calibration_digest} if calibration_digest else {}),
        "formats": sorted(set(cfg.export.formats) | {"bundle"}),
        "target": dataclasses.asdict(cfg.target),
        "force": cfg.export.force,
        "target_name": cfg.export.target_name,
    }
    if _is_current(folder, identity):
        print(f"export: {folder} is up to date, nothing to do")
        return
    (folder / MANIFEST).unlink(missing_ok=True)

    kind, draft = kind_and_settings(load_draft_config(checkpoint))
    weights = load_draft_tensors(checkpoint)
    verifier, judging = load_verifier_config(checkpoint), load_verifier_tensors(checkpoint)
    trained_for = target_of_training(run_dir / "train", checkpoint)
    target = _load_target(cfg, trained_for)
    facts = training_facts(run_dir, checkpoint)
    meta = bundle_facts(cfg, kind, draft, weights, target, facts)
    if verifier is not None:
        meta["verifier"] = verifier_facts(verifier, judging, meta["draft"]["trainable_parameters"], target.parameters)
    bundle = write_bundle(
        folder / "bundle",
        bundle=meta,
        config={"kind": kind, "draft": draft, "verifier": verifier},
        tensors={f"draft.{n}": t for n, t in weights.items()} | {f"verifier.{n}": t for n, t in judging.items()},
        calibration=calibration,
        card=model_card(meta, draft, facts, calibration),
    )
    compare_with_checkpoint(bundle, kind, draft, weights, target, judging)
    outputs = [p for p in bundle.rglob("*") if p.is_file()]
    outputs += export_other_forms(cfg, folder, kind, draft, weights, target, meta, judging)
    write_manifest(
        folder,
        stage=STAGE,
        identity=identity,
        inputs={"checkpoint": checkpoint_hash, **({"calibration": calibration_digest} if calibration_digest else {})},
        outputs=outputs,
        counts={
            "tensors": len(weights) + len(judging),
            "parameters": meta["draft"]["trainable_parameters"],
            "verifier_parameters": meta.get("verifier", {}).get("parameters", 0),
        },
        seconds=time.monotonic() - begun,
    )
    print(f"export: {bundle} (from {checkpoint.name}; logits equal the checkpoint's bit for bit)")


def calibration_of(run_dir: Path, checkpoint_hash: str) -> tuple[dict[str, Any] | None, str | None]:
    """What stage=calibrate wrote about this checkpoint, and its digest; (None, None) if it did not run.

    One about another checkpoint is left out, and the user is told. Raises UserError where the file has changed.
    """
    folder = run_dir / "calibrate"
    manifest = read_manifest(folder)
    if manifest is None:
        return None, None
    if manifest.inputs.get("checkpoint") != checkpoint_hash:
        print(f"NOTE: {folder} is about another checkpoint; it is left out. Run stage=calibrate for this one.")
        return None, None
    verify_outputs(folder, manifest)
    return read_json(folder / "calibration.json", "The calibration"), manifest.digest()


def _is_current(folder: Path, identity: Mapping[str, Any]) -> bool:
    """A newer checkpoint or another form is a reason to export again, not an error as in longer stages."""
    manifest = read_manifest(folder)
    if manifest is None or differing_keys(manifest.identity, identity):
        return False
    try:
        verify_outputs(folder, manifest)
    except UserError as problem:
        print(f"export: exporting again, because {problem}")
        return False
    return True


def target_of_training(train_dir: Path, checkpoint: Path) -> Mapping[str, Any] | None:
    """The identity of the target that the checkpoint was trained on, as the training recorded it."""
    state = read_json(checkpoint / "state.json", "The checkpoint's state")
    manifest = read_manifest(train_dir)
    for record in (state.get("identity", {}), manifest.identity if manifest else {}):
        target = record.get("target_identity", record.get("target"))
        if isinstance(target, Mapping) and "config_hash" in target:
            return target
    return None


def _load_target(cfg: Config, trained_for: Mapping[str, Any] | None) -> Target:
    """The configured target, refused before its weights are read when the draft belongs to another."""
    from jetspec_train.targets.loading import load_target, target_identity

    if trained_for is not None:
        check_target({"target": trained_for}, target_identity(cfg.target))
    return load_target(cfg.target)


def training_facts(run_dir: Path, checkpoint: Path) -> dict[str, Any]:
    """What the run recorded about its data and its training; absent facts are None."""
    state = read_json(checkpoint / "state.json", "The checkpoint's state")
    train, distill = read_manifest(run_dir / "train"), read_manifest(run_dir / "distill")
    counts = train.counts if train else {}
    return {
        "step": state.get("step"),
        "token_visits": state.get("token_visits"),
        "supervised_tokens": counts.get("supervised_tokens"),
        "seconds": state.get("seconds"),
        "dev": state.get("best"),
        "settings": state.get("identity", {}),
        "distill": {"identity": distill.identity, "counts": distill.counts, "seconds": distill.seconds}
        if distill
        else None,
    }


def bundle_facts(
    cfg: Config,
    kind: str,
    draft: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: Target,
    training: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of ``bundle.json`` except the file list (FORMATS 1)."""
    parameters = sum(tensor.numel() for tensor in weights.values() if tensor.is_floating_point())
    return {
        "target": {
            **target.identity.to_dict(),
            "parameters": target.parameters,
            "gguf_file": cfg.target.gguf_file,
            "template": cfg.target.template,
            "template_options": dict(cfg.target.template_options),
            "system_prompt": cfg.target.system_prompt,
        },
        "architecture": architecture(kind, draft),
        "draft": {
            "preset": cfg.draft.preset,
            "trainable_parameters": parameters,
            "ratio_to_target": parameters / target.parameters,
        },
        "taps": list(draft.get("target_layer_ids", [])),
        "block": draft.get("block"),
        "conventions": conventions(kind, draft),
        "training": {"budget_tokens": cfg.budget.tokens, **training},
        "provenance": {"git_revision": git_revision(), "versions": package_versions()},
    }


def architecture(kind: str, draft: Mapping[str, Any]) -> str:
    """The draft in a few words."""
    if kind == EAGLE3:
        return (
            f"EAGLE-3 head, {draft['layers']} layers, {draft['draft_vocab_size']} of {draft['vocab_size']} tokens in "
            "its output head"
        )
    return (
        f"block draft head, {draft.get('layers')} layers, block of {draft.get('block')}, {draft.get('mask')} mask, "
        f"{draft.get('layout')} layout, {draft.get('parent')} parent term"
    )


def conventions(kind: str, draft: Mapping[str, Any]) -> dict[str, str]:
    """How indices are meant, for whoever reads the bundle without this code."""
    taps = {"taps": "0-based; output of decoder layer i, before the final norm"}
    if kind == EAGLE3:
        return {
            **taps,
            "inputs": "the input at q joins the token at q + 1 with the state of q, and predicts the token at q + 2",
            "vocabulary": "target id = draft id + d2t[draft id]; without d2t the ids are the target's",
            "embedding": "the target's own, not stored here; lm_head is the draft's own",
        }
    return {
        **taps,
        "context": "the block of anchor a sees context positions strictly below a",
        "slots": f"slot j predicts position a + j{' + 1' if draft.get('layout') == 'anchor' else ''}",
        "embedding_and_head": "the target's own, not stored here",
    }


def verifier_facts(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], draft_parameters: int, target_parameters: int
) -> dict[str, Any]:
    """What ``bundle.json`` says of the verifier: its rule and its size, alone and together with the draft."""
    parameters = sum(tensor.numel() for tensor in weights.values())
    return {
        "mode": config["mode"],
        "layers": config["layers"],
        "parameters": parameters,
        "ratio_to_target": parameters / target_parameters,
        "ratio_with_draft": (parameters + draft_parameters) / target_parameters,
    }


def head_of(kind: str, draft: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DraftHead | Eagle3Head:
    """A draft with the given weights, all of them and no others."""
    from jetspec_train.decoding.bundles import load_draft_tensors
    from jetspec_train.modeling.draft_head import DraftHeadConfig
    from jetspec_train.modeling.eagle3 import Eagle3Config

    config = (Eagle3Config if kind == EAGLE3 else DraftHeadConfig).from_dict(dict(draft))
    head = empty_draft(config).eval()
    load_draft_tensors(head, {f"draft.{name}": tensor for name, tensor in weights.items()}, "the checkpoint")
    return head


def draft_logits(head: DraftHead | Eagle3Head, target: Target) -> Tensor:
    """The draft's logits on the target's own features of a fixed text: of one block [K, V], or of an EAGLE-3 head's
    inputs [T, X]."""
    import torch

    from jetspec_train.modeling.draft_head import MASK_SLOT, DraftHead

    config = head.config
    generator = torch.Generator().manual_seed(0)
    length = min(COMPARED_TOKENS, target.max_positions - (head.config.block if isinstance(head, DraftHead) else 0))
    tokens_BT = torch.randint(target.vocab_size, (1, length), generator=generator).to(target.device)
    positions_BT = torch.arange(length, device=target.device)[None]
    head = head.to(target.device)
    with torch.inference_mode():
        output = target.forward_packed(tokens_BT, positions_BT, torch.zeros_like(tokens_BT), config.target_layer_ids)
        assert output.features_BNF is not None
        if not isinstance(head, DraftHead):
            states_BTd = head.fuse(output.features_BNF)
            hidden_BTd, _, _ = head(target.embed(tokens_BT.roll(-1, dims=1)), states_BTd, positions_BT)
            return head.lm_head(hidden_BTd)[0]
        context = head.context_kv(head.fuse(output.features_BNF), positions_BT)
        inputs_BAK = torch.full((1, 1, head.config.block), MASK_SLOT, device=target.device)
        inputs_BAK[..., 0] = tokens_BT[0, -1]
        positions_BAK = length + torch.arange(head.config.block, device=target.device)[None, None]
        hidden_BAKd = head(head.embed(inputs_BAK, target.embed), positions_BAK, context, None)
        logits_BAKV = target.logits(hidden_BAKd.to(target.dtype)).float()
        if head.has_parent:
            parents_BAK = torch.randint(target.vocab_size, inputs_BAK.shape, generator=generator).to(target.device)
            logits_BAKV = logits_BAKV + head.parent_bias(parents_BAK, hidden_BAKd)
    return logits_BAKV[0, 0]


def compare_with_checkpoint(
    bundle: Path,
    kind: str,
    draft: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: Any,
    verifier: Mapping[str, Tensor] | None = None,
) -> None:
    """Read the bundle back as a stranger would and compare its logits, and a verifier's weights, with the checkpoint's.

    Raises UserError naming the largest difference unless they are equal bit for bit.
    """
    import torch

    read = read_bundle(bundle)
    check_target(read.meta, target.identity)
    of_draft = {name: tensor for name, tensor in read.tensors.items() if name.startswith("draft.")}
    tensors = {name.removeprefix("draft."): tensor for name, tensor in of_draft.items()}
    for name, tensor in (verifier or {}).items():
        found = read.tensors.get(f"verifier.{name}")
        if found is None or not torch.equal(found, tensor):
            raise UserError(f"The bundle {bundle} does not reproduce its checkpoint: verifier.{name} differs.")
    before_KV, after_KV = (
        draft_logits(head_of(kind, config, values), target)
        for config, values in ((draft, weights), (read.config["draft"], tensors))
    )
    if not torch.equal(before_KV, after_KV):
        difference = (before_KV - after_KV).abs().max().item()
        raise UserError(
            f"The bundle {bundle} does not reproduce its checkpoint: logits differ by up to {difference:g}. The disk "
            "may be faulty; delete the folder and run stage=export again."
        )


def export_other_forms(
    cfg: Config,
    folder: Path,
    kind: str,
    draft: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: Any,
    meta: Mapping[str, Any],
    verifier: Mapping[str, Tensor],
) -> list[Path]:
    """Write the forms of other engines that ``export.formats`` names; returns their files."""
    forms = [form for form in cfg.export.formats if form != "bundle"]
    if not forms:
        return []
    from jetspec_train.artifacts.foreign import Draft, export_forms
    from jetspec_train.decoding.foreign import target_facts

    done = export_forms(
        Draft(
            kind=kind,
            config=draft,
            tensors=weights,
            confidence={
                name.removeprefix(CONFIDENCE): verifier[name] for name in verifier if name.startswith(CONFIDENCE)
            }
            or None,
            confidence_with_parent=draft.get("parent") != "none",
            beside={f"verifier.{name}": tensor for name, tensor in verifier.items()},
            provenance=dict(meta),
        ),
        forms,
        folder,
        target_facts(target, cfg.export.target_name),
        lambda: {
            "embed_tokens.weight": target.model.get_input_embeddings().weight.detach().cpu(),
            "lm_head.weight": target.model.get_output_embeddings().weight.detach().cpu(),
        },
        force=cfg.export.force,
    )
    for form in done:
        print(f"export: {form.folder}" + "".join(f"\n  forced: {reason}" for reason in form.forced))
    return [p for form in done for p in form.folder.rglob("*") if p.is_file()]

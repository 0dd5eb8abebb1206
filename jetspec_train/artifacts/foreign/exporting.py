"""``export_forms``: write a trained draft in the forms of other engines, and check each by loading it back.

The commonest failure in public trackers is a draft that validates well and is never accepted when served. So a form
is refused when it cannot say what was trained, every flag is explicit, a lint looks at the written folder as a
server would, and the folder is read back and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign import blocks, eagle3, speculators
from jetspec_train.artifacts.foreign.card import write_card
from jetspec_train.artifacts.foreign.checkpoint import write_checkpoint
from jetspec_train.artifacts.foreign.draft import TargetFacts
from jetspec_train.artifacts.foreign.expressing import FORMS, check
from jetspec_train.artifacts.foreign.lint import lint
from jetspec_train.artifacts.foreign.qwen3 import block_shapes
from jetspec_train.artifacts.foreign.reading import read_foreign

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Draft:
    """A trained draft on its way out, under our names.

    ``kind``: block or eagle3; ``config``: the dict of its configuration; ``tensors``: without prefix.
    ``confidence``: a confidence head that reads ``[h ; W1[parent]]`` (``weight`` [1, d(+r)], ``bias`` [1]), which is
    what DSpark forms have a place for. ``beside``: further tensors of the verifier, kept beside a form.
    """

    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    confidence: Mapping[str, Tensor] | None = None
    confidence_with_parent: bool = False
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Exported:
    """One written form: ``forced`` lists what export.force overrode, ``notes`` what the card says."""

    form: str
    folder: Path
    forced: list[str]
    notes: list[str]


def export_forms(
    draft: Draft,
    forms: Sequence[str],
    folder: str | Path,
    target: TargetFacts,
    target_weights: Callable[[], Mapping[str, Tensor]],
    *,
    force: bool = False,
) -> list[Exported]:
    """Write ``folder/FORM`` for each of ``forms`` (see ``FORMS``).

    ``target_weights``: called only for forms that carry copies; gives ``embed_tokens.weight`` and ``lm_head.weight``.
    All forms are checked before the first is written. Raises UserError listing what a form cannot express; with
    ``force`` only what it has no place for at all.
    """
    unknown = [form for form in forms if form not in FORMS]
    if unknown:
        raise UserError(f"export.formats has {unknown}; allowed: bundle, {', '.join(FORMS)}.")
    config, tensors, tap_note = _sorted_taps(draft)
    verdicts = {form: check(form, draft.kind, config, target) for form in forms}
    refused = [f"{form}: {reason}" for form, verdict in verdicts.items() for reason in verdict.refusals]
    unequal = [f"{form}: {reason}" for form, verdict in verdicts.items() for reason in verdict.inequalities]
    if refused or (unequal and not force):
        advice = "" if refused else " export.force=true writes it anyway and says so in its card."
        raise UserError(
            "export.formats asks for what the form cannot express; nothing was written.\n  - "
            + "\n  - ".join(refused + ([] if force else unequal))
            + ("\n" + advice.strip() if advice else "")
        )
    done = []
    for form in forms:
        notes = [*verdicts[form].notes, *([tap_note] if tap_note else [])]
        done.append(
            _export(
                form,
                draft,
                config,
                tensors,
                Path(folder) / form,
                target,
                target_weights,
                notes,
                verdicts[form].inequalities,
            )
        )
    return done


def _export(
    form: str,
    draft: Draft,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    folder: Path,
    target: TargetFacts,
    target_weights: Callable[[], Mapping[str, Tensor]],
    notes: list[str],
    forced: list[str],
) -> Exported:
    dtype = str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
    written, content = _content(form, draft, config, tensors, target, target_weights, dtype, notes)
    tokens = config.get("block", 4) - (1 if config.get("layout") == "in_place" else 0)
    files: dict[str, Any] = {
        "provenance.json": {**draft.provenance, "form": form, "forced": forced, "notes": notes},
    }
    beside = []
    if draft.calibration is not None:
        files["jetspec_train/calibration.json"] = dict(draft.calibration)
        beside.append("calibration.json (temperatures and thresholds)")
    if draft.beside:
        beside.append("verifier.safetensors (the verifier's heads)")
    files["README.md"] = write_card(
        form, draft.kind, config, target, notes=notes, forced=forced, tokens=tokens, beside=beside
    )
    write_checkpoint(folder, written, content, files, beside=draft.beside)
    errors = [finding.message for finding in lint(folder) if finding.severity == "error"]
    if errors and not forced:
        raise UserError(f"The exported form {form} in {folder} fails its own lint: " + "; ".join(errors))
    _compare(form, folder, config, content, target)
    return Exported(form, folder, forced, notes)


def _content(
    form: str,
    draft: Draft,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: TargetFacts,
    target_weights: Callable[[], Mapping[str, Tensor]],
    dtype: str,
    notes: list[str],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and tensors of one form."""
    if draft.kind == "eagle3":
        return _eagle3_content(form, config, tensors, target, target_weights, dtype)
    if form in ("dflash", "jetspec"):
        return blocks.write_dflash(config, target, dtype), {
            name: tensors[name] for name in block_shapes(config, parent=False)
        }
    confidence = draft.confidence if form == "deepspec" or _is_dspark(config) else None
    content = dict(tensors)
    if confidence is not None:
        content |= {f"confidence_head.proj.{name}": tensor for name, tensor in confidence.items()}
        notes.append("the confidence head of the verifier is inside, as confidence_head")
    flags = {"confidence": confidence is not None, "confidence_with_parent": draft.confidence_with_parent}
    if form == "deepspec":
        content |= _copies(target_weights(), blocks.COPIES, next(iter(tensors.values())).dtype)
        return blocks.write_deepspec(config, target, dtype, **flags), content
    written = speculators.write_block(config, target, dtype, **flags)
    if _is_dspark(config) and config["parent"] == "none":
        content |= speculators.silent_parent(config, written)
    return written, content


def _eagle3_content(
    form: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: TargetFacts,
    target_weights: Callable[[], Mapping[str, Tensor]],
    dtype: str,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if "lm_head.weight" not in content:
        if config["draft_vocab_size"] != config["vocab_size"]:
            raise UserError("The draft has a reduced vocabulary but no lm_head.weight; it cannot be exported.")
        content |= _copies(target_weights(), ("lm_head.weight",), next(iter(tensors.values())).dtype)
    content |= eagle3.vocabulary_tables(config, tensors)
    if form == "vllm":
        return eagle3.write_speculators(config, target, dtype, steps=4), content
    return eagle3.write_safeailab(config, target, dtype), {eagle3.to_midlayer(n): t for n, t in content.items()}


def _is_dspark(config: Mapping[str, Any]) -> bool:
    return config["layout"] == "anchor" or config["parent"] != "none"


def _copies(weights: Mapping[str, Tensor], names: Sequence[str], dtype: Any) -> dict[str, Tensor]:
    return {name: weights[name].to(dtype) for name in names}


def _sorted_taps(draft: Draft) -> tuple[dict[str, Any], dict[str, Tensor], str | None]:
    """The same draft with its taps in layer order, the columns of ``fc`` moved with them (and the norms over them).

    Servers join the taps in layer order whatever order a list gives them.
    """
    import torch

    config, tensors = dict(draft.config), dict(draft.tensors)
    config["target_layer_ids"] = list(config["target_layer_ids"])
    ids = config["target_layer_ids"]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    if order == list(range(len(ids))):
        return config, tensors, None
    config["target_layer_ids"] = [ids[i] for i in order]
    for name in ("fc.weight", "input_norm.weight"):
        if name in tensors:
            chunks = tensors[name].chunk(len(ids), dim=-1)
            tensors[name] = torch.cat([chunks[i] for i in order], dim=-1)
    norms = {f"fc_norm.{new}.weight": draft.tensors.get(f"fc_norm.{old}.weight") for new, old in enumerate(order)}
    tensors |= {name: tensor for name, tensor in norms.items() if tensor is not None}
    return config, tensors, f"the taps {ids} were put in layer order, fc's columns with them (servers join them so)"


def _compare(
    form: str, folder: Path, config: dict[str, Any], content: Mapping[str, Tensor], target: TargetFacts
) -> None:
    """Read the folder back: the same tensors bit for bit, and the same meaning unless it was forced."""
    import torch

    from jetspec_train.artifacts.foreign.checkpoint import read_tensors

    found = read_tensors(folder)
    changed = [name for name in content if name not in found or not torch.equal(found[name], content[name].cpu())]
    if changed or set(found) != set(content):
        raise UserError(f"The exported form {form} in {folder} does not read back as written: {changed[:5]}.")
    if read_foreign(folder, target).config.get("target_layer_ids") != config["target_layer_ids"]:
        raise UserError(f"The exported form {form} in {folder} reads back with other taps.")

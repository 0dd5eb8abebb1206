"""From an exported bundle to a target and a drafter that belong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jetspec_train.artifacts.bundle import STANDALONE, Bundle, check_target, read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import TargetConfig
from jetspec_train.decoding.calibration import Calibration, check_calibration, weights_hash
from jetspec_train.decoding.cost_profile import CostProfile
from jetspec_train.decoding.drafting import BlockDrafter, Companions, Drafter, check_fits
from jetspec_train.decoding.eagle3 import Eagle3Drafter
from jetspec_train.decoding.standalone import standalone_from_folder
from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig
from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
from jetspec_train.modeling.verifier import Verifier, VerifierConfig
from jetspec_train.targets.loading import load_target
from jetspec_train.targets.target import Target

PREFIX = "draft."
VERIFIER_PREFIX = "verifier."


def open_bundle(
    path: str | Path, target: Target | None = None, target_config: TargetConfig | None = None
) -> tuple[Target, Drafter]:
    """Read and check a bundle; load its target unless one is given.

    Raises UserError for a damaged bundle, for a target with another configuration, tokenizer or chat template (both
    values named), and for weights that do not fit the bundle's own configuration.
    """
    bundle = read_bundle(path)
    if target is None:
        target = load_target(target_config or target_config_of(bundle.meta))
    return target, drafter_from_bundle(bundle, target)


def target_config_of(meta: dict[str, Any]) -> TargetConfig:
    """How to load the target that a bundle names. Raises UserError if it names none."""
    named = meta.get("target")
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise UserError("The bundle does not name its target (no target.name in bundle.json); export it again.")
    config = TargetConfig(name=named["name"])
    known = {key: named[key] for key in ("gguf_file", "template", "template_options", "system_prompt") if key in named}
    # A local or embedded target's revision is a fingerprint of its weights and no name to ask for.
    local = named["name"].startswith("embedded:") or Path(named["name"]).exists()
    return replace(config, revision=None if local else named.get("revision"), **known)


def drafter_from_bundle(bundle: Bundle, target: Target) -> Drafter:
    """The bundle's draft on this target; see ``open_bundle`` for what is refused."""
    check_target(bundle.meta, target.identity)
    if bundle.meta.get("kind") == STANDALONE:
        return standalone_from_folder(bundle.path, target, bundle.meta.get("block"))
    described = bundle.config.get("draft")
    if not isinstance(described, dict):
        raise UserError(f"{bundle.path}/config.json has no 'draft' section; export the bundle again.")
    if bundle.config.get("kind", "block") == "eagle3":
        eagle3 = Eagle3Head(Eagle3Config.from_dict(described))
        load_draft_tensors(eagle3, bundle.tensors, str(bundle.path))
        return Eagle3Drafter(eagle3, target)
    return BlockDrafter(head_from_bundle(bundle, target), target, companions_of(bundle, target))


def head_from_bundle(bundle: Bundle, target: Target) -> DraftHead:
    """The bundle's block draft head, as it was trained (fp32, on the CPU).

    Raises UserError where it does not fit the target's sizes or its own configuration.
    """
    config = DraftHeadConfig.from_dict(bundle.config["draft"])
    check_fits(config, target)
    head = DraftHead(config)
    load_draft_tensors(head, bundle.tensors, str(bundle.path))
    return head


def companions_of(bundle: Bundle, target: Target) -> Companions:
    """Verifier, calibration and costs that came with a draft, checked; raises UserError for a calibration of other
    weights or of another target (both values named), and for files that cannot be read."""
    calibration = None
    if bundle.calibration is not None:
        where = f"{bundle.path}/calibration.json"
        calibration = Calibration.from_dict(bundle.calibration, where)
        identity = target.identity.to_dict()
        check_calibration(calibration, weights=weights_hash(bundle.tensors), target=identity, where=where)
    costs = None
    if bundle.cost_profile is not None:
        costs = CostProfile.from_dict(bundle.cost_profile, f"{bundle.path}/cost_profile.json")
    return Companions(verifier_from_bundle(bundle), calibration, costs)


def verifier_from_bundle(bundle: Bundle) -> Verifier | None:
    """The bundle's verifier, as it was trained (fp32, on the CPU); None where there is none.

    Raises UserError where its weights do not fit its configuration, or the draft's.
    """
    described, draft = bundle.config.get("verifier"), bundle.config.get("draft")
    if described is None:
        return None
    config = VerifierConfig.from_dict(described)
    width = draft.get("hidden_size") if isinstance(draft, dict) else None
    if config.draft_hidden_size != width:
        raise UserError(
            f"The verifier of {bundle.path} reads draft states of width {config.draft_hidden_size}, but the draft "
            f"beside it has width {width}. Export the bundle again."
        )
    verifier = Verifier(config).eval().requires_grad_(False)
    load_draft_tensors(verifier, bundle.tensors, str(bundle.path), VERIFIER_PREFIX)
    return verifier


def load_draft_tensors(
    head: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str, prefix: str = PREFIX
) -> None:
    """Copy the tensors named ``prefix`` + "*" into the module. Raises UserError listing what is missing, extra or
    misshapen."""
    given = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    expected = head.state_dict()
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    misshapen = [
        f"{name} is {list(given[name].shape)} instead of {list(expected[name].shape)}"
        for name in sorted(expected.keys() & given.keys())
        if given[name].shape != expected[name].shape
    ]
    if missing or extra or misshapen:
        raise UserError(
            f"The weights of {where} do not fit its configuration: missing {missing}, not expected {extra}, "
            f"other shapes {misshapen}. Export the bundle again."
        )
    head.load_state_dict(given)

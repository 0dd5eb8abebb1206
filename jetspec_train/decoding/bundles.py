"""From an exported bundle to a target and a drafter that belong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jetspec_train.artifacts.bundle import Bundle, check_target, read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import TargetConfig
from jetspec_train.decoding.drafting import BlockDrafter, Drafter, check_fits
from jetspec_train.decoding.eagle3 import Eagle3Drafter
from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig
from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
from jetspec_train.targets.loading import load_target
from jetspec_train.targets.target import Target

PREFIX = "draft."


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
    described = bundle.config.get("draft")
    if not isinstance(described, dict):
        raise UserError(f"{bundle.path}/config.json has no 'draft' section; export the bundle again.")
    if bundle.config.get("kind", "block") == "eagle3":
        eagle3 = Eagle3Head(Eagle3Config.from_dict(described))
        load_draft_tensors(eagle3, bundle.tensors, str(bundle.path))
        return Eagle3Drafter(eagle3, target)
    config = DraftHeadConfig.from_dict(described)
    check_fits(config, target)
    head = DraftHead(config)
    load_draft_tensors(head, bundle.tensors, str(bundle.path))
    return BlockDrafter(head, target)


def load_draft_tensors(head: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Copy the tensors named "draft.*" into the head. Raises UserError listing what is missing, extra or misshapen."""
    given = {name[len(PREFIX) :]: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
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

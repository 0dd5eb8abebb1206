"""Who takes part: plain decoding, the bundle, its variants, other bundles, transformers' own methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.bundle import Bundle, read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, EvaluateConfig, TargetConfig
from jetspec_train.evaluation.baselines import transformers_contender
from jetspec_train.evaluation.benchmark import PLAIN, SPECULATIVE, Contender, decoder_contender


def variant_settings(decoding: DecodingConfig, name: str, changes: Any) -> DecodingConfig:
    """``decoding`` with some keys changed. Raises UserError naming a key or type that does not fit."""
    allowed = {f.name for f in dataclasses.fields(DecodingConfig)} - {"sampling", "seed", "max_new_tokens", "stop"}
    if not isinstance(changes, Mapping) or not changes:
        raise UserError(
            f"evaluate.variants.{name} must be a mapping of decoding keys, e.g. {{nodes: 8}}; got {changes!r}."
        )
    for key, value in changes.items():
        if key not in allowed:
            raise UserError(f"evaluate.variants.{name}.{key} is not known. Allowed: {', '.join(sorted(allowed))}.")
        present = getattr(decoding, key)
        if present is not None and value is not None and type(value) is not type(present):
            raise UserError(
                f"evaluate.variants.{name}.{key} is {value!r}; a {type(present).__name__} like {present!r} is needed."
            )
    return dataclasses.replace(decoding, **changes)


def describe_settings(settings: DecodingConfig) -> str:
    if not settings.drafting:
        return "drafting off"
    depth = "" if settings.depth is None else f", at most {settings.depth} deep"
    controls = {
        f"stages of {settings.stages}": settings.stages > 0,
        f"pruned below {settings.prune:g}": settings.prune > 0,
        "size by the scheduler": settings.scheduler,
        "result cache": settings.cache,
        f"policy {settings.policy}": settings.policy != "lossless",
        f"{settings.rule} rule": settings.rule != "match",
    }
    asked = "".join(f", {name}" for name, on in controls.items() if on)
    return f"{settings.shape} of {settings.nodes} drafted tokens per round{depth}{asked}"


def check_contenders(evaluate: EvaluateConfig, decoding: DecodingConfig) -> None:
    """Everything that can be refused before a model is loaded."""
    from jetspec_train.evaluation.baselines import DESCRIPTIONS

    for name in evaluate.baselines:
        if name not in DESCRIPTIONS:
            raise UserError(f"evaluate.baselines names {name!r}. Allowed: {', '.join(DESCRIPTIONS)}.")
    if "assisted" in evaluate.baselines and evaluate.assistant is None:
        raise UserError("evaluate.baselines=[assisted] needs evaluate.assistant=HUB_ID_OR_FOLDER, a small draft model.")
    if not decoding.drafting:
        raise UserError("decoding.drafting=false leaves nothing to compare with plain decoding; leave it out.")
    taken = {PLAIN, SPECULATIVE, *DESCRIPTIONS}
    for name, changes in evaluate.variants.items():
        if name in taken:
            raise UserError(f"evaluate.variants names {name!r}, which is taken. Choose another name.")
        variant_settings(decoding, name, changes)


def bundle_names(paths: list[str]) -> dict[str, Path]:
    """A short name for each further bundle; its run's name where the folder is the usual export/bundle."""
    names: dict[str, Path] = {}
    for text in paths:
        path = Path(text)
        parts = path.resolve().parts
        name = parts[-3] if parts[-2:] == ("export", "bundle") and len(parts) > 2 else parts[-1]
        unique, count = name, 2
        while unique in names:
            unique, count = f"{name} ({count})", count + 1
        names[unique] = path
    return names


def decoder_of(target: Any, bundle: Bundle, settings: DecodingConfig) -> Any:
    """A decoder with the bundle's draft; the target is shared by all of them."""
    from jetspec_train.decoding.bundles import drafter_from_bundle
    from jetspec_train.decoding.decoder import Decoder

    return Decoder(target, drafter_from_bundle(bundle, target), settings)


def build_contenders(
    target: Any, bundle: Bundle, evaluate: EvaluateConfig, decoding: DecodingConfig, target_config: TargetConfig
) -> list[Contender]:
    """Plain decoding first, then the bundle, then whatever else was asked for."""
    from jetspec_train.decoding.decoder import Decoder

    common: dict[str, Any] = {"sampling": decoding.sampling, "seed": decoding.seed, "stop": decoding.stop}
    contenders = [
        decoder_contender(
            PLAIN,
            Decoder(target, None, dataclasses.replace(decoding, drafting=False)),
            description="our own decoding loop with drafting off",
            **common,
        ),
        decoder_contender(
            SPECULATIVE, decoder_of(target, bundle, decoding), description=describe_settings(decoding), **common
        ),
    ]
    for name, changes in evaluate.variants.items():
        settings = variant_settings(decoding, name, changes)
        description = "the same bundle, " + describe_settings(settings)
        contenders.append(
            decoder_contender(name, decoder_of(target, bundle, settings), description=description, **common)
        )
    for name, path in bundle_names(evaluate.bundles).items():
        other = decoder_of(target, read_bundle(path), decoding)
        contenders.append(decoder_contender(name, other, description=f"another bundle: {path}", **common))
    for name in evaluate.baselines:
        assistant = None
        if name == "assisted":
            from jetspec_train.targets.loading import load_target

            small = dataclasses.replace(target_config, name=str(evaluate.assistant), revision=None, gguf_file=None)
            assistant = load_target(small).model
        contenders.append(transformers_contender(name, target, assistant=assistant, **common))
    return contenders

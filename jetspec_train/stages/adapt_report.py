"""What stage=adapt leaves behind: the adapter, the table before and after, and the merged bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.adapter import Adapter, weights_hash, write_adapter
from jetspec_train.artifacts.bundle import Bundle, write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json
from jetspec_train.artifacts.manifest import write_manifest
from jetspec_train.artifacts.provenance import git_revision, package_versions
from jetspec_train.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.targets.target import Target
    from jetspec_train.training.checkpoint import TrainState

STAGE = "adapt"


def in_memory(peft_config: Mapping[str, Any], tensors: Mapping[str, Tensor], bundle: Bundle) -> Adapter:
    """An adapter that is not on the disk yet."""
    return Adapter(bundle.path, {"base": {"weights_sha256": weights_hash(bundle.meta)}}, dict(peft_config), {**tensors})


def head_with(bundle: Bundle, adapter: Adapter | None) -> DraftHead:
    """The bundle's draft head, changed by an adapter where one is given, as the decoder would change it."""
    from jetspec_train.decoding.adapters import merged_tensors
    from jetspec_train.decoding.bundles import load_draft_tensors
    from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig

    head = DraftHead(DraftHeadConfig.from_dict(bundle.config["draft"]))
    tensors = bundle.tensors if adapter is None else merged_tensors(bundle.tensors, adapter)
    load_draft_tensors(head, tensors, str(bundle.path))
    return head


def measured(
    cfg: Config, head: DraftHead, target: Target, prompts: list[list[int]], max_new_tokens: int, should_stop: Any = None
) -> dict[str, Any] | None:
    """Greedy acceptance lengths of this draft on these prompts, without verifier and stages; None when stopped."""
    from jetspec_train.training.acceptance import measure_acceptance

    decoding = dataclasses.replace(
        cfg.decoding, stages=0, policy="lossless", prune=0.0, candidates=None, scheduler=False, cache=False, trace=None
    )
    return measure_acceptance(
        head, target, prompts, decoding, max_new_tokens=max_new_tokens, should_stop=lambda: bool(should_stop)
    )


def finish(
    cfg: Config,
    folder: Path,
    bundle: Bundle,
    identity: Mapping[str, Any],
    peft_config: Mapping[str, Any],
    state: TrainState,
    target: Target,
    counts: Mapping[str, Any],
) -> None:
    """Write the best adapter, measure it on both domains, merge it if asked for, and close the stage."""
    from jetspec_train.decoding.adapters import merged_tensors
    from jetspec_train.training.adapters import adapter_tensors
    from jetspec_train.training.checkpoint import find_checkpoint, load_tensors

    tensors = adapter_tensors(load_tensors(find_checkpoint(folder, "best")))
    adapter = in_memory(peft_config, tensors, bundle)
    table = before_and_after(cfg, bundle, adapter, target)
    report: dict[str, Any] = {
        "bundle": str(bundle.path),
        "base_weights_sha256": weights_hash(bundle.meta),
        "step": state.best["step"] if state.best else state.step,
        "adapter": {"rank": cfg.adapt.rank, "alpha": cfg.adapt.alpha, "layers": peft_config["target_modules"]},
        "shape": cfg.decoding.shape,
        "domains": table,
        "counts": dict(counts),
    }
    facts = {
        "base": {
            "weights_sha256": weights_hash(bundle.meta),
            "target": bundle.meta.get("target"),
            "bundle": str(bundle.path),
        },
        "recipe": cfg.recipe.path or cfg.recipe.name,
        "measured": table,
        "training": {**counts, "seconds": state.seconds},
        "provenance": {"git_revision": git_revision(), "versions": package_versions()},
    }
    written = write_adapter(folder / "adapter", facts=facts, config=peft_config, tensors=tensors)
    size = sum(file.stat().st_size for file in written.iterdir())
    report["adapter"]["bytes"] = size
    atomic_json(folder / "report.json", report)
    outputs = [*written.iterdir(), folder / "report.json", folder / "metrics.jsonl"]
    if cfg.adapt.merge:
        merged = merge(bundle, merged_tensors(bundle.tensors, adapter), folder / "bundle", facts)
        outputs += [file for file in merged.rglob("*") if file.is_file()]
        print(f"adapt: {merged} (the adapter built in; calibrate it before policy=trusting)")
    write_manifest(
        folder,
        stage=STAGE,
        identity=identity,
        inputs={"distill": str(identity["data"]), "bundle": str(identity["bundle"])},
        outputs=outputs,
        counts=counts,
        seconds=state.seconds,
    )
    print(f"adapt: {written} ({size / 1e6:.2f} MB)\n{table_text(table)}")


def merge(bundle: Bundle, tensors: Mapping[str, Tensor], path: Path, facts: Mapping[str, Any]) -> Path:
    """The bundle with the adapter built in. Its calibration stays behind: it was fitted to the weights before."""
    meta = {key: value for key, value in bundle.meta.items() if key not in ("format", "format_version", "files")}
    meta["adapted"] = {key: facts[key] for key in ("base", "recipe", "measured", "training")}
    card = (bundle.path / "README.md").read_text() if (bundle.path / "README.md").is_file() else ""
    return write_bundle(
        path,
        bundle=meta,
        config=bundle.config,
        tensors=tensors,
        cost_profile=bundle.cost_profile,
        card=f"{card}\nAdapted to the recipe {facts['recipe']}:\n\n{table_text(facts['measured'])}\n",
    )


def before_and_after(cfg: Config, bundle: Bundle, adapter: Adapter, target: Target) -> dict[str, Any]:
    """Acceptance lengths on held-out prompts (report split) of the new and of the old domain, without and with the
    adapter: {"new" | "old": {"recipe", "prompts", "before", "after", "change"}}; no "old" where it is unknown."""
    from jetspec_train.data.prompts import iterate_prompts
    from jetspec_train.data.recipes import load_recipe
    from jetspec_train.evaluation.suites import build_suite

    recipes = {"new": load_recipe(cfg.recipe)}
    old = old_recipe(cfg, bundle.meta)
    if old is not None:
        recipes["old"] = load_recipe(old)
    heads = {"before": head_with(bundle, None), "after": head_with(bundle, adapter)}
    table: dict[str, Any] = {}
    for which, recipe in recipes.items():
        suite = build_suite(
            iterate_prompts(recipe, ("report",)),
            target.chat,
            per_domain=cfg.adapt.prompts,
            max_new_tokens=cfg.adapt.max_new_tokens,
            max_positions=target.max_positions,
        )
        prompts = [list(prompt.tokens) for prompt in suite.prompts]
        found = {n: measured(cfg, d, target, prompts, cfg.adapt.max_new_tokens) for n, d in heads.items()}
        lengths = {name: record["acceptance_length"] for name, record in found.items() if record is not None}
        table[which] = {
            "recipe": recipe.name,
            "prompts": len(prompts),
            **found,
            "change": lengths["after"] / lengths["before"] - 1,
        }
    return table


def old_recipe(cfg: Config, meta: Mapping[str, Any]) -> str | None:
    """What the bundle was trained on: ``adapt.old_recipe``, or the recipe of this installation whose content hash the
    bundle's provenance names; None if it is neither."""
    from jetspec_train.artifacts.resources import resource_folder
    from jetspec_train.data.recipes import load_recipe

    if cfg.adapt.old_recipe is not None:
        return cfg.adapt.old_recipe
    distill = ((meta.get("training") or {}).get("distill") or {}).get("identity") or {}
    if "recipe" not in distill:
        return None
    for path in sorted(resource_folder("data_recipes").glob("*.yaml")):
        try:
            if load_recipe(path.stem).hash() == distill["recipe"]:
                return path.stem
        except UserError:
            continue  # a recipe whose data are not on this machine
    return None


def table_text(table: Mapping[str, Any]) -> str:
    """The table before and after, in Markdown."""
    lines = ["| domain | prompts | acceptance length before | after | change | chain before | after |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for which, row in table.items():
        before, after = row["before"], row["after"]
        lines.append(
            f"| {which} ({row['recipe']}) | {row['prompts']} | {before['acceptance_length']:.3f} | "
            f"{after['acceptance_length']:.3f} | {row['change']:+.1%} | {before['chain']:.3f} | {after['chain']:.3f} |"
        )
    if "old" not in table:
        lines.append("\nThe old domain was not measured: set adapt.old_recipe to see what is forgotten.")
    return "\n".join(lines)

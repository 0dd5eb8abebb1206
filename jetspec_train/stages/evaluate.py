"""stage=evaluate: plain decoding and speculative decoding side by side, on prompts held out from training.

Loads a bundle (``bundle=`` or the run's own export), measures every contender on the prompts of the
recipe's report split and of ``evaluate.recipes``, checks in float32 that speculative output is the
target's own, and writes ``run_dir/evaluate/``: report.json, report.html, records.jsonl, figures/.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.bundle import Bundle, read_bundle, read_meta
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import sha256_file
from jetspec_train.artifacts.manifest import is_current_or_replaced, read_manifest, write_manifest
from jetspec_train.artifacts.provenance import git_revision, package_versions
from jetspec_train.config import Config

if TYPE_CHECKING:
    from jetspec_train.evaluation.session import Evaluated

STAGE = "evaluate"


def run(cfg: Config) -> None:
    from jetspec_train.evaluation.contenders import check_contenders
    from jetspec_train.evaluation.report import REPORT, load_report, write_report

    started = time.perf_counter()
    folder = Path(cfg.run_dir) / STAGE
    bundle_path = find_bundle(cfg)
    check_contenders(cfg.evaluate, cfg.decoding)
    identity = run_identity(cfg, bundle_path)
    if is_current_or_replaced(folder, identity, "evaluate: measuring again"):
        print(f"evaluate: {folder} is up to date, nothing to do")
        print_summary(load_report(folder / REPORT), folder)
        return
    report, records, verification = measure(cfg, bundle_path)
    outputs = write_report(folder, report, records, verification)
    write_manifest(
        folder,
        stage=STAGE,
        identity=identity,
        inputs={"bundle": identity["bundle"]},
        outputs=outputs,
        counts={"prompts": len(records), "skipped": len(report["skipped_prompts"])},
        seconds=time.perf_counter() - started,
    )
    track(cfg, folder, report)
    print_summary(report, folder)


def plan(cfg: Config) -> dict[str, Any]:
    """What would be measured; reads no model."""
    from jetspec_train.evaluation.contenders import bundle_names, check_contenders

    check_contenders(cfg.evaluate, cfg.decoding)
    return {
        "stage": STAGE,
        "bundle": str(cfg.bundle or Path(cfg.run_dir) / "export" / "bundle"),
        "recipes": [recipe.name for recipe in recipes_of(cfg)],
        "domains": cfg.evaluate.domains or "every domain of the report split",
        "prompts_per_domain": cfg.evaluate.prompts,
        "max_new_tokens": cfg.evaluate.max_new_tokens,
        "contenders": [
            "plain",
            "speculative",
            *cfg.evaluate.variants,
            *bundle_names(cfg.evaluate.bundles),
            *cfg.evaluate.baselines,
        ],
        "float32_identity_prompts": cfg.evaluate.fp32_prompts,
        "writes": str(Path(cfg.run_dir) / STAGE),
    }


def find_bundle(cfg: Config) -> Path:
    """``bundle=`` if given, else what stage=export left in the run directory."""
    path = Path(cfg.bundle) if cfg.bundle else Path(cfg.run_dir) / "export" / "bundle"
    if not cfg.bundle and not path.is_dir():
        raise UserError(
            f"There is no bundle in {path}. Run stage=export with run_dir={cfg.run_dir} first, or give bundle=FOLDER."
        )
    read_meta(path)
    return path


def recipes_of(cfg: Config) -> list[Any]:
    """The run's recipe and the further suites."""
    from jetspec_train.data.recipes import load_recipe

    return [load_recipe(cfg.recipe), *(load_recipe(name) for name in cfg.evaluate.recipes)]


def run_identity(cfg: Config, bundle_path: Path) -> dict[str, Any]:
    """What determines the result, as far as a machine's timings are determined."""
    return {
        "bundle": sha256_file(bundle_path / "bundle.json"),
        "other_bundles": [sha256_file(Path(path) / "bundle.json") for path in cfg.evaluate.bundles if read_meta(path)],
        "recipes": [recipe.hash() for recipe in recipes_of(cfg)],
        "scoring": [[source.scoring for source in recipe.sources] for recipe in recipes_of(cfg)],
        "target": dataclasses.asdict(cfg.target),
        "decoding": dataclasses.asdict(cfg.decoding),
        "evaluate": {k: v for k, v in dataclasses.asdict(cfg.evaluate).items() if k not in ("recipes", "bundles")},
        "seed": cfg.seed,
        **({"adapter": sha256_file(Path(cfg.adapter) / "adapter.json")} if cfg.adapter else {}),
    }


def report_prompts(cfg: Config) -> Iterator[Any]:
    """Prompts that no draft was trained or tuned on; of each recipe the report split."""
    from jetspec_train.data.prompts import iterate_prompts

    for recipe in recipes_of(cfg):
        yield from iterate_prompts(recipe, ("report",))


def measure(cfg: Config, bundle_path: Path) -> Evaluated:
    """Everything that needs a model."""
    from jetspec_train.evaluation.session import evaluate_bundle

    bundle = read_bundle(bundle_path)
    if cfg.adapter is not None:
        from jetspec_train.decoding.adapters import adapted_bundle

        bundle = adapted_bundle(bundle, cfg.adapter)
    return evaluate_bundle(
        bundle,
        report_prompts(cfg),
        target_config=cfg.target,
        evaluate=cfg.evaluate,
        decoding=cfg.decoding,
        training=training_facts(bundle, Path(cfg.run_dir) / "train"),
        settings={
            "evaluate": dataclasses.asdict(cfg.evaluate),
            "decoding": dataclasses.asdict(cfg.decoding),
            "recipes": [recipe.name for recipe in recipes_of(cfg)],
            "seed": cfg.seed,
        },
        commands=[reproduce_command()],
        versions={**package_versions(), "source": git_revision() or "installed package"},
        seed=cfg.seed,
    )


def training_facts(bundle: Bundle, train_dir: Path) -> dict[str, Any]:
    """The report's ``training``: from the bundle's provenance, else from the run's own train manifest."""
    stated = dict(bundle.meta.get("training") or {})
    manifest = read_manifest(train_dir)
    if manifest is not None:
        counts = {"seconds": manifest.seconds, **manifest.counts}
        stated = {**{key: value for key, value in counts.items() if stated.get(key) is None}, **stated}
    return {key: stated.get(key) for key in ("supervised_tokens", "budget_tokens", "seconds")} | {"provenance": stated}


def reproduce_command() -> str:
    """The command that was given, as a shell would read it."""
    return shlex.join(["python", "-m", "jetspec_train", *sys.argv[1:]])


def track(cfg: Config, folder: Path, report: dict[str, Any]) -> None:
    """W&B gets the numbers of the report, if it is on."""
    if cfg.tracking.name == "none":
        return
    from jetspec_train.training.tracking import Tracker

    tracker = Tracker(folder, cfg.tracking, run_config=report["settings"])
    numbers = {
        f"{scope}/{key}": figures[key]
        for scope, figures in (("overall", report["overall"]), *report["domains"].items())
        for key in ("speedup", "acceptance_length", "tokens_per_second", "pass_rate", "wasted_compute")
        if figures[key] is not None
    }
    tracker.log("report", 0, numbers)
    tracker.close(numbers)


def print_summary(report: dict[str, Any], folder: Path) -> None:
    """The small table at the end of a run, and where the page is."""
    from jetspec_train.evaluation.report import PAGE, summary_table

    print()
    print(summary_table(report))
    print()
    for line in report["verdict"]:
        print(f"  {line['text']}")
    print(f"\nReport: {folder / PAGE}")

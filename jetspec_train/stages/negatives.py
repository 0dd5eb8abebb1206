"""Make hard negatives of the samples: near misses, edits and, with a bundle, the draft's own mistakes (METHODS 6).

Reads ``run_dir/distill``, writes ``run_dir/negatives/negatives-*.parquet``, ``rejects.jsonl``, ``summary.html`` and the
manifest. Every path is judged by the target; what the target would accept is kept as a positive. Killed at any instant
and started again, it makes exactly what is missing. With ``shard=i/n`` n processes work independently, and the last
one chooses the mix over all of them.

Without ``bundle=`` there are no on-policy paths here: the training step drafts its own. With one, the draft is replayed
over the samples (train, mine, train again).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_write, make_folder, require_free_space, sha256_file, stable_hash
from jetspec_train.artifacts.manifest import Manifest, read_manifest, require_manifest, verify_outputs, write_manifest
from jetspec_train.config import Config, to_dict
from jetspec_train.data import shards as shard_files
from jetspec_train.data.working import WorkClock, progress

if TYPE_CHECKING:
    from jetspec_train.data.samples import SampleStore

STAGE = "negatives"
FREE_KEYS = ("batch_size", "examples")  # how the work is cut and shown; which paths are kept does not follow from it
BYTES_PER_PATH = 900  # prefix, path, labels; compressed, while parts and the merged files lie side by side


def plan(cfg: Config) -> dict[str, Any]:
    """What would be tried; reads the manifest of the samples only."""
    distill = read_manifest(Path(cfg.run_dir) / "distill")
    samples = distill.counts["samples"] if distill else None
    if samples is not None and cfg.negatives.samples is not None:
        samples = min(samples, cfg.negatives.samples * len(cfg.negatives.splits))
    return {
        "stage": STAGE,
        "used_by_training": is_used(cfg),
        "samples": f"{cfg.run_dir}/distill has not finished yet" if samples is None else samples,
        "attempts_at_most": None if samples is None else samples * cfg.negatives.per_sample,
        "kinds": [kind for kind in cfg.negatives.kinds if kind != "on_policy" or cfg.bundle],
        "on_policy": f"mined with {cfg.bundle}" if cfg.bundle else "left to the training step (no bundle=...)",
        "shares_at_most": {"near_miss": cfg.negatives.near_miss, "synthetic": cfg.negatives.synthetic},
        "tokens_per_path_at_most": path_tokens(cfg),
        "output": str(stage_dir_of(cfg)),
    }


def run(cfg: Config) -> None:
    """Try what is missing, then merge if this was the last shard.

    Raises UserError for samples that are missing, were changed, or came from another target; for another
    configuration's folder; for a bundle that does not belong to the target; and for a full disk.
    """
    from jetspec_train.targets.loading import target_identity

    if not is_used(cfg):
        print(
            "negatives: nothing learns from them (see verifier.enabled, verifier.negatives, train.only), nothing to do"
        )
        return
    stage_dir = stage_dir_of(cfg)
    target = target_identity(cfg.target).to_dict()
    data = read_data(cfg, target)
    shard, shards = shard_files.which_shard(cfg)
    identity = negatives_identity(cfg, data, target, shards)
    if shard_files.is_finished(stage_dir, identity):
        print(f"negatives: finished before, nothing to do ({stage_dir})")
        return
    make_folder(stage_dir)
    shard_files.claim_folder(stage_dir, identity, STAGE)
    with shard_files.only_worker(stage_dir, shard):
        from jetspec_train.data.negatives.merging import read_shard_report

        if read_shard_report(stage_dir, shard, identity) is None:
            _run_shard(cfg, identity, stage_dir, shard, shards)
    print(f"negatives: {_merge(cfg, identity, stage_dir, shards)}")


def stage_dir_of(cfg: Config) -> Path:
    return Path(cfg.run_dir) / STAGE


def path_tokens(cfg: Config) -> int:
    """Tokens of a path at most: the predictions of one block."""
    return cfg.draft.block - (cfg.draft.layout == "in_place")


def read_data(cfg: Config, target: Mapping[str, str]) -> Manifest:
    """The manifest of the samples, checked. Raises UserError if another target gave the answers than would judge."""
    folder = Path(cfg.run_dir) / "distill"
    data = require_manifest(folder, "distill")
    verify_outputs(folder, data)
    answered, judging = data.identity["target"], {key: value for key, value in target.items() if key != "name"}
    differing = sorted(key for key in judging if answered.get(key) != judging[key])
    if differing:
        listed = "; ".join(f"{key}: {answered.get(key)} there, {judging[key]} now" for key in differing)
        raise UserError(
            f"The samples of {folder} were answered by another target than target.name={target['name']} ({listed}). "
            "Only the target that answered can judge."
        )
    return data


def negatives_identity(cfg: Config, data: Manifest, target: Mapping[str, str], shards: int) -> dict[str, Any]:
    """Everything that decides which paths the folder holds."""
    selection = read_manifest(Path(cfg.run_dir) / "select")
    bundle = None
    if cfg.bundle is not None:
        from jetspec_train.artifacts.bundle import read_bundle

        read_bundle(cfg.bundle)
        bundle = sha256_file(Path(cfg.bundle) / "bundle.json")  # names the hash of every file
    elif cfg.negatives.kinds == ["on_policy"]:
        raise UserError("negatives.kinds=[on_policy]: mining needs a draft. Give bundle=FOLDER, or name further kinds.")
    return {
        "target": {key: value for key, value in target.items() if key != "name"},
        "data": data.digest(),
        "selection": selection.digest() if selection else None,
        "train_tokens": cfg.train.tokens,
        "bundle": bundle,
        "block": path_tokens(cfg),
        "settings": {key: value for key, value in to_dict(cfg.negatives).items() if key not in FREE_KEYS},
        "shards": shards,
    }


def is_used(cfg: Config) -> bool:
    """Whether training would read them: a pipeline without a verifier need not make any."""
    from jetspec_train.stages.training_verifier import has_verifier

    return has_verifier(cfg) and cfg.verifier.negatives and cfg.verifier.negatives_share > 0


def load_stores(cfg: Config) -> dict[str, SampleStore]:
    """The samples by split; of the train split only those that training will read."""
    from jetspec_train.data.samples import load_samples
    from jetspec_train.stages.training_inputs import load_data

    folder = Path(cfg.run_dir) / "distill"
    return {
        split: load_data(cfg)[0] if split == "train" else load_samples(folder, split) for split in cfg.negatives.splits
    }


def _run_shard(cfg: Config, identity: Mapping[str, Any], stage_dir: Path, shard: int, shards: int) -> None:
    from jetspec_train.data.journal import Journal
    from jetspec_train.data.negatives.merging import write_shard_report
    from jetspec_train.data.negatives.rows import JUDGED
    from jetspec_train.data.negatives.work import Shard
    from jetspec_train.targets.loading import load_target

    clock = WorkClock(stage_dir / "parts" / f"shard-{shard:05d}" / "seconds.json")
    journal = Journal(stage_dir, shard, JUDGED)
    stores = load_stores(cfg)
    work = Shard(
        cfg=cfg.negatives,
        stores=stores,
        journal=journal,
        block=path_tokens(cfg),
        drafted=cfg.bundle is not None,
        id_settings={key: identity[key] for key in ("target", "bundle", "block")} | {"seed": cfg.negatives.seed},
        shard=shard,
        shards=shards,
    )
    require_free_space(stage_dir, BYTES_PER_PATH * work.attempts, "The negatives")
    if len(journal.done) < work.attempts:
        target = load_target(cfg.target)
        drafter = None
        if cfg.bundle is not None:
            from jetspec_train.decoding.bundles import open_bundle

            drafter = open_bundle(cfg.bundle, target)[1]
        try:
            title = f"negatives {shard}/{shards}"
            with progress(title, "path", work.attempts, len(journal.done)) as report:
                work.run(target, drafter, report)
        finally:
            clock.save()
    journal.compact()
    write_shard_report(
        stage_dir,
        identity,
        journal,
        shard=shard,
        samples=len(work.units),
        training_tokens=stores["train"].supervised_tokens if "train" in stores else 0,
        seconds=clock.save(),
    )


def _merge(cfg: Config, identity: Mapping[str, Any], stage_dir: Path, shards: int) -> str:
    """Choose the mix and write the manifest when every shard has finished; returns one line that says what happened."""
    from jetspec_train.data.negatives.candidates import shares_of
    from jetspec_train.data.negatives.merging import merge, read_shard_report
    from jetspec_train.data.negatives.mix import Rules
    from jetspec_train.data.negatives.summary import render_summary
    from jetspec_train.targets.loading import load_tokenizer

    reports = [read_shard_report(stage_dir, number, identity) for number in range(shards)]
    finished = [report for report in reports if report is not None]
    if len(finished) < shards:
        missing = [str(number) for number, report in enumerate(reports) if report is None]
        listed = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        return f"{len(finished)} of {shards} shards are finished; still to run: {listed}"
    rules = Rules(shares_of(cfg.negatives, cfg.bundle is not None), cfg.negatives.keep, cfg.negatives.positives)
    room = max(0, cfg.budget.tokens - finished[0].training_tokens)
    merged = merge(stage_dir, finished, rules, room)
    facts = {
        "target": cfg.target.name,
        "draft": cfg.bundle or "none",
        "a path has at most": f"{identity['block']} tokens",
    }
    page = stage_dir / "summary.html"
    atomic_write(page, render_summary(merged, load_tokenizer(cfg.target), examples=cfg.negatives.examples, facts=facts))
    write_manifest(
        stage_dir,
        stage=STAGE,
        identity=identity,
        inputs={
            "distill": str(identity["data"]),
            "target": stable_hash(identity["target"]),
            **({"bundle": str(identity["bundle"])} if cfg.bundle else {}),
        },
        outputs=[*merged.files, page],
        counts={**merged.counts, "budget_room": room},
        seconds=merged.seconds,
    )
    counts = merged.counts
    return (
        f"{counts['kept']:,} of {counts['attempts']:,} attempts kept ({counts['positives']:,} of them accepted by the "
        f"target), {counts['judged_tokens']:,} judged tokens; examples in {page}"
    )

"""Independent shards of one distillation: their settings, their budgets, their reports, and the merge.

Shards share nothing that two of them write. The one that finishes last (or any later call) merges: it
checks every count and hash, hands budget that some shards did not need to those that ran out of it, and
writes the manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json, atomic_write, make_folder, read_json, sha256_file, stable_hash
from jetspec_train.artifacts.manifest import check_identity, flatten, read_manifest, write_manifest
from jetspec_train.config import Config
from jetspec_train.data.distillation import ShardCounts
from jetspec_train.data.ledger import shard_quota

IDENTITY = "identity.json"
QUOTAS = "quotas.json"
# Settings that may grow in the same folder: more prompts or more budget only add answers.
GROWING = ("extent.prompts", "extent.budget_tokens", "extent.budget_generated_tokens")


@dataclass
class ShardReport:
    """What one finished shard did. Written last by the shard, read by the merge."""

    shard: int
    shards: int
    identity_hash: str
    quota: int
    generated_quota: int | None
    kept_tokens: int
    generated_tokens: int
    truncated: int
    counts: dict[str, Any]
    tokens_by_domain: dict[str, int] = field(default_factory=dict)
    samples_sha256: str = ""
    rejects_sha256: str = ""
    seconds: float = 0.0


def which_shard(cfg: Config) -> tuple[int, int]:
    """(i, n) from ``shard=i/n``; in a Slurm array job without it, from the array's own numbering."""
    text = cfg.shard
    if text == "0/1" and os.environ.get("SLURM_ARRAY_TASK_ID"):
        first = int(os.environ.get("SLURM_ARRAY_TASK_MIN", "0"))
        count = int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1"))
        last = int(os.environ.get("SLURM_ARRAY_TASK_MAX", str(first + count - 1)))
        if last - first + 1 != count or first != 0:
            raise UserError(
                f"This array job numbers its tasks {first}..{last} ({count} tasks), so the shard cannot be told. "
                "Submit --array=0-(n-1), or give shard=i/n yourself (as for running one task again)."
            )
        return int(os.environ["SLURM_ARRAY_TASK_ID"]), count
    shard, shards = text.split("/")
    return int(shard), int(shards)


def distill_identity(
    cfg: Config, recipe: Any, target: Mapping[str, str], settings: Mapping[str, Any], shards: int
) -> dict:
    """The settings that decide which samples a folder holds. ``extent`` may grow, the rest may not change."""
    return {
        "target": {key: value for key, value in target.items() if key != "name"},
        "recipe": recipe.hash(),
        "settings": dict(settings),
        "splits": list(cfg.distill.splits),
        "samples_per_prompt": cfg.distill.samples_per_prompt,
        "max_prompt_tokens": cfg.distill.max_prompt_tokens,
        "keep_truncated": cfg.distill.keep_truncated,
        "shards": shards,
        "extent": {
            "prompts": recipe.prompts,
            "budget_tokens": cfg.budget.tokens,
            "budget_generated_tokens": cfg.budget.generated_tokens,
        },
    }


def claim_folder(stage_dir: Path, identity: Mapping[str, Any], stage: str = "distill") -> None:
    """Tie the folder to these settings, or let its extent grow; UserError for another configuration."""
    path = stage_dir / IDENTITY
    if not path.exists():
        atomic_json(path, dict(identity))
        return
    stored = read_json(path, f"The {stage} identity")
    if stored == json.loads(json.dumps(identity)):
        return
    if not grows(stored, identity):
        check_identity(stage_dir, stored, identity, stage)
    # More of the same: what is finished stays, reports and manifest no longer describe the whole.
    _grow_quotas(stage_dir, stored, identity)
    for outdated in (stage_dir / "manifest.json", *report_paths(stage_dir)):
        outdated.unlink(missing_ok=True)
    atomic_json(path, dict(identity))


def _grow_quotas(stage_dir: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """A shard that was handed budget keeps it; only what was added is dealt out anew."""
    path = stage_dir / QUOTAS
    if not path.exists():
        return
    handed = read_json(path, "The handed-on budgets")
    shards = int(wanted["shards"])
    for name, key in (("kept", "budget_tokens"), ("generated", "budget_generated_tokens")):
        old, new = stored["extent"][key], wanted["extent"][key]
        if new is None or old is None:
            handed[name] = [None if new is None else shard_quota(new, shard, shards) for shard in range(shards)]
        else:
            added = [shard_quota(new - old, shard, shards) or 0 for shard in range(shards)]
            handed[name] = [quota + more for quota, more in zip(handed[name], added)]
    atomic_json(
        path, {**handed, "of": [wanted["extent"]["budget_tokens"], wanted["extent"]["budget_generated_tokens"]]}
    )


def grows(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether ``wanted`` differs from ``stored`` only by a larger extent (None is unlimited)."""
    old, new = flatten(stored), flatten(wanted)
    if old.keys() != new.keys() or any(old[key] != new[key] for key in old if key not in GROWING):
        return False
    return all(new[key] is None or (old[key] is not None and new[key] >= old[key]) for key in GROWING)


@contextlib.contextmanager
def only_worker(stage_dir: Path, shard: int) -> Iterator[None]:
    """Hold the shard; UserError when another process works on it. Released by the system after a kill."""
    folder = make_folder(stage_dir / "parts" / f"shard-{shard:05d}")
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another process is working on shard {shard} of {stage_dir}. Wait for it, or stop it."
            ) from error
        except OSError:
            pass  # a file system without locks: the user must not start a shard twice
        yield


def report_paths(stage_dir: Path) -> list[Path]:
    return sorted(stage_dir.glob("parts/shard-*/shard.json"))


def report_path(stage_dir: Path, shard: int) -> Path:
    return stage_dir / "parts" / f"shard-{shard:05d}" / "shard.json"


def rejects_path(stage_dir: Path, shard: int) -> Path:
    return stage_dir / "parts" / f"shard-{shard:05d}" / "rejects.jsonl"


@dataclass(frozen=True)
class Quotas:
    """Every shard's part of the two budgets."""

    kept: list[int]
    generated: list[int | None]


def current_quotas(stage_dir: Path, identity: Mapping[str, Any]) -> Quotas:
    """Even parts, or what a merge has handed on since."""
    shards, extent = int(identity["shards"]), identity["extent"]
    path = stage_dir / QUOTAS
    if path.exists():
        handed = read_json(path, "The handed-on budgets")
        if handed["of"] == [extent["budget_tokens"], extent["budget_generated_tokens"]]:
            return Quotas(handed["kept"], handed["generated"])
    return Quotas(
        [shard_quota(extent["budget_tokens"], shard, shards) or 0 for shard in range(shards)],
        [shard_quota(extent["budget_generated_tokens"], shard, shards) for shard in range(shards)],
    )


def read_report(stage_dir: Path, shard: int, identity: Mapping[str, Any]) -> ShardReport | None:
    """The report of a finished shard; None for one of other settings, or that has more budget by now."""
    path = report_path(stage_dir, shard)
    if not path.exists() or not (stage_dir / f"samples-{shard:05d}.parquet").exists():
        return None
    report = ShardReport(**read_json(path, "The shard report"))
    if report.identity_hash != stable_hash(identity):
        return None
    quotas = current_quotas(stage_dir, identity)
    has_more = quotas.kept[shard] > report.quota or (quotas.generated[shard] or 0) > (report.generated_quota or 0)
    return None if has_more and report.counts["unstarted"] else report


def write_report(stage_dir: Path, report: ShardReport) -> None:
    report.samples_sha256 = sha256_file(stage_dir / f"samples-{report.shard:05d}.parquet")
    report.rejects_sha256 = sha256_file(rejects_path(stage_dir, report.shard))
    atomic_json(report_path(stage_dir, report.shard), asdict(report))


def merge(stage_dir: Path, identity: Mapping[str, Any], recipe_name: str) -> str:
    """Merge when every shard has finished; returns one line that says what happened.

    Raises UserError naming a file that changed since its shard wrote it, and RuntimeError when counts
    do not add up.
    """
    shards = int(identity["shards"])
    found = [read_report(stage_dir, shard, identity) for shard in range(shards)]
    reports = [report for report in found if report is not None]
    if len(reports) < shards:
        missing = [str(shard) for shard, report in enumerate(found) if report is None]
        listed = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        return f"{len(reports)} of {shards} shards are finished; still to run: {listed}"
    _check_files(stage_dir, reports)
    fed = _hand_on(stage_dir, identity, reports)
    if fed:
        return f"unused budget was handed to shards {', '.join(map(str, fed))}: run them again"
    counts = merged_counts(reports, current_quotas(stage_dir, identity))
    rejects = stage_dir / "rejects.jsonl"
    atomic_write(rejects, b"".join(rejects_path(stage_dir, report.shard).read_bytes() for report in reports))
    write_manifest(
        stage_dir,
        stage="distill",
        identity=identity,
        inputs={f"recipe {recipe_name}": str(identity["recipe"]), "target": stable_hash(identity["target"])},
        outputs=[*(f"samples-{report.shard:05d}.parquet" for report in reports), "rejects.jsonl"],
        counts=counts,
        seconds=sum(report.seconds for report in reports),
    )
    return f"{counts['samples']:,} samples, {counts['answer_tokens']:,} answer tokens"


def _check_files(stage_dir: Path, reports: list[ShardReport]) -> None:
    for report in reports:
        for path, written in (
            (stage_dir / f"samples-{report.shard:05d}.parquet", report.samples_sha256),
            (rejects_path(stage_dir, report.shard), report.rejects_sha256),
        ):
            if not path.exists() or sha256_file(path) != written:
                raise UserError(
                    f"{path} is missing or was changed after shard {report.shard} wrote it. Delete it and "
                    f"{report_path(stage_dir, report.shard)}, and run the shard again."
                )


def _hand_on(stage_dir: Path, identity: Mapping[str, Any], reports: list[ShardReport]) -> list[int]:
    """Give the unused budget of all shards to those that ran out, if it suffices for another conversation.

    The new quotas sum to the old ones. Returns the shards that have more now. Repeating it changes nothing.
    """
    hungry = [report for report in reports if report.counts["unstarted"]]
    if not hungry or len(reports) == 1:
        return []
    quotas = current_quotas(stage_dir, identity)
    kept_pool = sum(quotas.kept) - sum(report.kept_tokens for report in reports)
    limits = [quota for quota in quotas.generated if quota is not None]
    generated_pool = sum(limits) - sum(report.generated_tokens for report in reports) if limits else None
    hungry.sort(key=lambda report: report.counts["next_reservation"])
    while hungry:
        need = max(report.counts["next_reservation"] for report in hungry)
        if min(kept_pool, kept_pool if generated_pool is None else generated_pool) // len(hungry) >= need:
            break
        hungry.pop()  # too little for all of them: the last waits for what the others leave
    if not hungry:
        return []
    fed = [report.shard for report in hungry]
    kept = _handed([report.kept_tokens for report in reports], kept_pool, fed)
    generated: list[int] | list[None] = [None] * len(reports)
    if generated_pool is not None:
        generated = _handed([report.generated_tokens for report in reports], generated_pool, fed)
    extent = identity["extent"]
    of = [extent["budget_tokens"], extent["budget_generated_tokens"]]
    atomic_json(stage_dir / QUOTAS, {"kept": kept, "generated": generated, "of": of})
    return sorted(fed)


def _handed(used: list[int], pool: int, fed: list[int]) -> list[int]:
    """What every shard has used, and to those in ``fed`` equal parts of the pool."""
    quotas = list(used)
    for place, shard in enumerate(fed):
        quotas[shard] += pool // len(fed) + (place < pool % len(fed))
    return quotas


def merged_counts(reports: list[ShardReport], quotas: Quotas) -> dict[str, Any]:
    """Sums over shards; ``turns = samples + rejected + unstarted`` holds again."""
    counts = [ShardCounts(**report.counts) for report in reports]
    reasons: dict[str, int] = {}
    domains: dict[str, int] = {}
    for report, count in zip(reports, counts):
        for reason, number in count.by_reason.items():
            reasons[reason] = reasons.get(reason, 0) + number
        for domain, tokens in report.tokens_by_domain.items():
            domains[domain] = domains.get(domain, 0) + tokens
    merged: dict[str, Any] = {
        "rows_read": max(count.rows_read for count in counts),
        "bad_rows": sum(count.bad_rows for count in counts),
        "turns": sum(count.turns for count in counts),
        "samples": sum(count.kept for count in counts),
        "rejected": sum(count.rejected for count in counts),
        "unstarted": sum(count.unstarted for count in counts),
        "rejects_by_reason": dict(sorted(reasons.items())),
        "answer_tokens": sum(report.kept_tokens for report in reports),
        "generated_tokens": sum(report.generated_tokens for report in reports),
        "truncated": sum(report.truncated for report in reports),
        "answer_tokens_by_domain": dict(sorted(domains.items())),
        "budget_tokens": sum(quotas.kept),
    }
    if merged["answer_tokens"] > merged["budget_tokens"]:
        raise RuntimeError(f"the budget was exceeded: {merged}")
    if merged["turns"] != merged["samples"] + merged["rejected"] + merged["unstarted"]:
        raise RuntimeError(f"counts in and counts out differ: {merged}")
    return merged


def is_finished(stage_dir: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds exactly this, complete (sizes are compared, not hashes)."""
    manifest = read_manifest(stage_dir)
    if manifest is None or manifest.identity != json.loads(json.dumps(identity)):
        return False
    return all(
        (stage_dir / name).is_file() and (stage_dir / name).stat().st_size == described["bytes"]
        for name, described in manifest.outputs.items()
    )

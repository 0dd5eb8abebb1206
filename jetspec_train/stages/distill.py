"""Let the target answer the recipe's prompts: from prompts to samples within the token budget.

Writes ``run_dir/distill/samples-*.parquet``, ``rejects.jsonl`` and the manifest. Killed at any instant and
started again, it answers exactly what is missing; a finished run has nothing to do. With ``shard=i/n``
(or in a Slurm array) n processes work independently, and the last one merges.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_write, make_folder, require_free_space
from jetspec_train.config import Config
from jetspec_train.data import shards as shard_files
from jetspec_train.data.distillation import Shard, sampling_settings
from jetspec_train.data.ledger import Ledger, require_room
from jetspec_train.data.prompts import PromptCounts, iterate_prompts
from jetspec_train.data.recipes import Recipe, load_recipe
from jetspec_train.data.working import WorkClock, progress

# Measured on greedy answers of a 135M chat model; a plan is an estimate and says so.
EXPECTED_SHARE_OF_LIMIT = 0.8
BYTES_PER_ANSWER_TOKEN = 18  # token, log-probability, entropy, margin, text; compressed
BYTES_PER_PROMPT_CHARACTER = 1.5


def plan(cfg: Config) -> dict[str, Any]:
    """Prompts, tokens and disk of this configuration, from reading the recipe alone."""
    recipe = load_recipe(cfg.recipe)
    counts, characters = _read_recipe(cfg, recipe)
    shard, shards = shard_files.which_shard(cfg)
    answers = counts.turns * cfg.distill.samples_per_prompt
    at_most = answers * cfg.distill.max_new_tokens
    caps = [at_most, cfg.budget.tokens, cfg.budget.generated_tokens]
    expected = min(int(EXPECTED_SHARE_OF_LIMIT * at_most), *(cap for cap in caps if cap is not None))
    return {
        "recipe": recipe.name,
        "licences": sorted({str(source.licence) for source in recipe.sources}),
        "splits": list(cfg.distill.splits),
        "rows_read": counts.rows,
        "prompts": counts.prompts,
        "prompts_by_domain": dict(sorted(counts.by_domain.items())),
        "rejected_rows": dict(sorted(counts.by_reason.items())),
        "answers": answers,
        "answer_tokens_at_most": at_most,
        "answer_tokens_expected": expected,
        "budget_tokens": cfg.budget.tokens,
        "disk_bytes_expected": _disk_bytes(cfg, expected, characters),
        "shard": f"{shard}/{shards}",
        "output": str(stage_dir_of(cfg)),
    }


def run(cfg: Config) -> None:
    """Answer what is missing, then merge if this was the last shard.

    Raises UserError for another configuration's folder, a recipe that cannot be read, a budget below one
    answer, a full disk, and when more than ``distill.max_reject_share`` of the rows were bad.
    """
    from jetspec_train.targets.loading import target_identity

    _check(cfg)
    shard, shards = shard_files.which_shard(cfg)
    stage_dir = stage_dir_of(cfg)
    recipe = load_recipe(cfg.recipe)
    target = target_identity(cfg.target).to_dict()
    identity = shard_files.distill_identity(cfg, recipe, target, sampling_settings(cfg.distill), shards)
    if shard_files.is_finished(stage_dir, identity):
        print(f"distill: finished before, nothing to do ({stage_dir})")
        return
    counts, characters = _read_recipe(cfg, recipe)
    make_folder(stage_dir)
    shard_files.claim_folder(stage_dir, identity)
    with shard_files.only_worker(stage_dir, shard):
        if shard_files.read_report(stage_dir, shard, identity) is None:
            expected = int(EXPECTED_SHARE_OF_LIMIT * counts.turns * cfg.distill.max_new_tokens) // shards
            # parts and the merged file lie side by side for a moment
            require_free_space(stage_dir, 2 * _disk_bytes(cfg, expected, characters // shards), "Distillation")
            _run_shard(cfg, recipe, target, identity, stage_dir, shard, shards, counts)
    print(f"distill: {shard_files.merge(stage_dir, identity, recipe.name)}")


def stage_dir_of(cfg: Config) -> Path:
    return Path(cfg.run_dir) / "distill"


def _check(cfg: Config) -> None:
    distill = cfg.distill
    if distill.samples_per_prompt > 1 and distill.sampling.temperature == 0:
        raise UserError(
            f"distill.samples_per_prompt={distill.samples_per_prompt} with distill.sampling.temperature=0: all greedy "
            "answers to one prompt are the same. Set a temperature or samples_per_prompt=1."
        )
    if not distill.splits or len(set(distill.splits)) != len(distill.splits):
        raise UserError(f"distill.splits={distill.splits}: name at least one split, each once.")


def _read_recipe(cfg: Config, recipe: Recipe) -> tuple[PromptCounts, int]:
    """Count the recipe's prompts of the wanted splits, before anything expensive is loaded."""
    counts, characters = PromptCounts(), 0
    for prompt in iterate_prompts(recipe, cfg.distill.splits, counts=counts):
        characters += sum(len(message["content"]) for message in prompt.messages) + sum(map(len, prompt.later_turns))
    share = counts.bad / max(1, counts.rows)
    if share > cfg.distill.max_reject_share:
        raise UserError(
            f"{counts.bad} of {counts.rows} rows of the recipe {recipe.name} are bad "
            f"({_reasons(counts.by_reason)}), more than distill.max_reject_share="
            f"{cfg.distill.max_reject_share}. Check its columns."
        )
    if counts.prompts == 0:
        raise UserError(
            f"The recipe {recipe.name} has no prompt of the splits {', '.join(cfg.distill.splits)} among its "
            f"{counts.rows} rows. Check distill.splits, the recipe's shares, and 'use' of its sources."
        )
    return counts, characters


def _disk_bytes(cfg: Config, answer_tokens: int, characters: int) -> int:
    draws = cfg.distill.samples_per_prompt
    return int(BYTES_PER_ANSWER_TOKEN * answer_tokens + BYTES_PER_PROMPT_CHARACTER * characters * draws)


def _run_shard(
    cfg: Config,
    recipe: Recipe,
    target_identity: dict[str, str],
    identity: dict[str, Any],
    stage_dir: Path,
    shard: int,
    shards: int,
    read: PromptCounts,
) -> None:
    from jetspec_train.data.journal import Journal
    from jetspec_train.targets.loading import load_target

    clock = WorkClock(stage_dir / "parts" / f"shard-{shard:05d}" / "seconds.json")
    journal = Journal(stage_dir, shard)
    quotas = shard_files.current_quotas(stage_dir, identity)
    ledger = Ledger(quotas.kept[shard], quotas.generated[shard])
    if not journal.done:
        require_room(ledger, cfg.distill.max_new_tokens)
    work = Shard(
        cfg=cfg.distill,
        recipe=recipe,
        journal=journal,
        ledger=ledger,
        target_identity=target_identity,
        shard=shard,
        shards=shards,
    )
    target = load_target(cfg.target)
    total = read.turns * cfg.distill.samples_per_prompt // shards
    try:
        with progress(f"distill {shard}/{shards}", "answer", total, len(journal.done)) as report:
            work.run(target, report)
    finally:
        clock.save()
    journal.compact()
    _write_rejects(stage_dir, shard, work, journal)
    share = work.reject_share()
    if share > cfg.distill.max_reject_share:
        raise UserError(
            f"{share:.1%} of the rows of shard {shard} were rejected ({_reasons(work.counts.by_reason)}; bad rows: "
            f"{work.counts.bad_rows}), more than distill.max_reject_share={cfg.distill.max_reject_share}. See "
            f"{shard_files.rejects_path(stage_dir, shard)}."
        )
    shard_files.write_report(
        stage_dir,
        shard_files.ShardReport(
            shard=shard,
            shards=shards,
            identity_hash=shard_files.stable_hash(identity),
            quota=ledger.kept_quota,
            generated_quota=ledger.generated_quota,
            kept_tokens=journal.tally.kept_tokens,
            generated_tokens=journal.tally.generated_tokens,
            truncated=journal.tally.truncated_rows,
            counts=asdict(work.counts),
            tokens_by_domain=dict(sorted(journal.tally.tokens_by_domain.items())),
            seconds=clock.save(),
        ),
    )
    _print_summary(cfg, work, journal, shard, shards)


def _write_rejects(stage_dir: Path, shard: int, work: Shard, journal: Any) -> None:
    """All rejects of the shard with their reasons, each once: rows that were unusable, answers not kept."""
    records = [asdict(reject) for reject in work.input_rejects]
    for row in journal.rejected_rows(["source", "row"]):
        records.append({"source": row["source"], "row": row["row"], "reason": row["reject_reason"], "id": row["id"]})
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    atomic_write(shard_files.rejects_path(stage_dir, shard), lines.encode("utf-8", "backslashreplace"))


def _print_summary(cfg: Config, work: Shard, journal: Any, shard: int, shards: int) -> None:
    tally, counts = journal.tally, work.counts
    truncated = tally.truncated_rows / max(1, tally.kept_rows)
    text = (
        f"distill {shard}/{shards}: {counts.turns:,} turns = {counts.kept:,} samples + {counts.rejected:,} rejects "
        f"+ {counts.unstarted:,} beyond the budget; {tally.kept_tokens:,} answer tokens of {work.ledger.kept_quota:,}, "
        f"{truncated:.0%} of the answers cut at {cfg.distill.max_new_tokens} tokens"
    )
    rejects = _reasons({**counts.by_reason, **({"bad rows": counts.bad_rows} if counts.bad_rows else {})})
    print(text + (f"; rejects: {rejects}" if rejects else ""))


def _reasons(by_reason: dict[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in sorted(by_reason.items()))

"""The laws of stage=negatives on a tiny target: true verdicts, exact ids under kills, counts in = counts out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import (
    BudgetConfig,
    Config,
    DistillConfig,
    DraftConfig,
    NegativesConfig,
    RecipeConfig,
    SamplingConfig,
)
from jetspec_train.data.negatives.reading import load_negatives
from jetspec_train.data.negatives.rows import DIFFICULTIES, KINDS, class_of, difficulty_of
from jetspec_train.data.samples import load_samples
from jetspec_train.stages import distill, negatives
from tests.tiny import tiny_target, tiny_target_config, tiny_target_dir
from tests.unit.test_decoding_bundles import write
from tests.unit.test_decoding_decoder import random_head

BLOCK = 5


def distilled(folder: Path, **settings: Any) -> Config:
    """A finished distillation of 24 prompts by a tiny target."""
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"What is {n} and {n * 7 % 13}, " + "or so " * (n % 5) + "?"} for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": {"train": 1.0}, "sources": [source]}))
    cfg = Config(
        run_dir=str(folder / "run"),
        target=tiny_target_config("llama"),
        recipe=RecipeConfig(path=str(folder / "recipe.yaml")),
        distill=DistillConfig(max_new_tokens=24, batch_size=8, **settings),
        draft=DraftConfig(block=BLOCK),
        negatives=NegativesConfig(per_sample=10, batch_size=5, keep=1.0),
    )
    distill.run(cfg)
    return cfg


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return distilled(tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="module")
def made(greedy: Config) -> Config:
    """Finished negatives without a draft."""
    negatives.run(greedy)
    return greedy


def beside(cfg: Config, tmp_path: Path, **changes: Any) -> Config:
    """The same samples in a run directory of its own."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "distill").symlink_to(Path(cfg.run_dir) / "distill")
    return replace(cfg, run_dir=str(run), **changes)


def folder_of(cfg: Config) -> Path:
    return negatives.stage_dir_of(cfg)


def rows_of(cfg: Config) -> list[dict[str, Any]]:
    return [row for path in sorted(folder_of(cfg).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def verdicts_of(cfg: Config) -> dict[str, list[Any]]:
    """Everything about a row that the last digits of a number cannot move."""
    key = ("kind", "sample_id", "prefix_tokens", "path_tokens", "labels", "first_wrong", "right_token", "difficulty")
    return {row["id"]: [row[name] for name in key] for row in rows_of(cfg)}


def counts_of(cfg: Config) -> dict[str, Any]:
    manifest = read_manifest(folder_of(cfg))
    assert manifest is not None
    return manifest.counts


def check_rows(cfg: Config) -> None:
    """Prefix, labels, probabilities and difficulty of every kept row, from a plain forward of the target."""
    target = tiny_target("llama")
    store = load_samples(Path(cfg.run_dir) / "distill")
    sample = {
        str(id): (store.tokens[store.starts[i] : store.starts[i + 1]].tolist(), int(store.prompt_lengths[i]))
        for i, id in enumerate(store.ids)
    }
    rows = rows_of(cfg)
    assert rows and len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        prefix, path = row["prefix_tokens"], row["path_tokens"]
        tokens, prompt_length = sample[row["sample_id"]]
        assert prefix == tokens[: len(prefix)] and len(prefix) > prompt_length and 1 <= len(path) <= BLOCK
        everything = torch.tensor([[*prefix, *path]])
        positions = torch.arange(everything.shape[1])[None]
        hidden = target.forward_packed(everything, positions, torch.zeros_like(everything)).hidden_BND
        logprobs = target.logits(hidden)[0, len(prefix) - 1 : -1].float().log_softmax(-1)
        right = (logprobs.argmax(-1) == torch.tensor(path)).tolist()
        wrong = right.index(False) if False in right else None
        assert row["first_wrong"] == wrong and row["is_positive"] == (wrong is None)
        assert row["labels"] == right[: len(path) if wrong is None else wrong + 1]
        place = row["place"]
        assert place == (wrong if wrong is not None else place)
        assert row["right_token"] == int(logprobs[place].argmax())
        assert row["p_right"] == pytest.approx(float(logprobs[place, row["right_token"]].exp()), rel=1e-3)
        assert row["p_wrong"] == pytest.approx(float(logprobs[place, row["wrong_token"]].exp()), rel=1e-3)
        assert row["wrong_token"] == path[place] or row["is_positive"]
        assert row["difficulty"] == difficulty_of(row["margin"])
        if row["kind"] == "subword":
            same = tokens[len(prefix) :]
            text = target.chat.decode([*prefix, *path], skip_special_tokens=False)
            assert target.chat.decode([*prefix, *same], skip_special_tokens=False).startswith(text.rstrip("\ufffd"))
            assert path != same[: len(path)]
        if row["kind"] == "near_miss":
            rank = int(row["variant"].split()[-1])
            ranked = [int(logprobs[at].topk(rank).indices[-1]) for at in range(len(path))]
            assert 2 <= rank <= 5 and any(token == choice for token, choice in zip(path, ranked))


def check_counts(cfg: Config) -> None:
    counts, rows = counts_of(cfg), rows_of(cfg)
    rejects = [json.loads(line) for line in (folder_of(cfg) / "rejects.jsonl").read_text().splitlines()]
    assert counts["attempts"] == len(rows) + len(rejects) == counts["samples"] * cfg.negatives.per_sample
    assert counts["kept"] == len(rows) and counts["rejected"] == len(rejects)
    assert counts["judged_tokens"] == sum(len(row["labels"]) for row in rows)
    assert not {row["id"] for row in rows} & {reject["id"] for reject in rejects}
    for kind, books in counts["kinds"].items():
        of_kind = [row for row in rows if row["kind"] == kind]
        assert (
            books["tried"] == books["not_built"] + books["judged"]
            and books["judged"] == books["kept"] + books["dropped"]
        )
        assert books["kept"] == len(of_kind)
        assert books["kept_positives"] == sum(row["is_positive"] for row in of_kind) <= books["positives"]
        assert books["not_built"] == sum(books["not_built_by_reason"].values())
        spread = Counter(row["difficulty"] for row in of_kind)
        assert books["kept_by_difficulty"] == {name: spread[name] for name in DIFFICULTIES}
    assert (
        counts["judged_tokens"] + read_manifest(Path(cfg.run_dir) / "distill").counts["answer_tokens"]
        <= cfg.budget.tokens
    )


def test_every_verdict_is_the_targets_and_every_attempt_is_accounted_for(made):
    check_rows(made)
    check_counts(made)
    counts = counts_of(made)
    assert "on_policy" not in counts["kinds"]  # the training step drafts its own
    kinds = Counter(class_of(row["kind"]) for row in rows_of(made))
    assert kinds["synthetic"] <= len(rows_of(made)) / 3 and kinds["near_miss"] > 0
    assert {"swap", "repeat", "truncate"} <= {row["kind"] for row in rows_of(made)} <= set(KINDS)
    assert any(books["not_built"] for books in counts["kinds"].values())  # garbage text offers few numbers


def test_a_second_call_does_nothing_and_another_configuration_is_refused(made, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder_of(made).rglob("*") if path.name != "lock"}
    negatives.run(replace(made, negatives=replace(made.negatives, batch_size=3, examples=1)))
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder_of(made).rglob("*") if path.name != "lock"}
    with pytest.raises(UserError, match=r"belongs to another configuration.*settings.per_sample: 10 there, 9 asked"):
        negatives.run(replace(made, negatives=replace(made.negatives, per_sample=9)))


KILLED = """
import os, signal, sys
from jetspec_train.config import *
from jetspec_train.data.journal import Journal
from jetspec_train.stages import negatives
append, parts = Journal.append, []
def append_then_die(journal, rows):
    append(journal, rows)
    parts.append(rows)
    if len(parts) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.append = append_then_die
negatives.run(Config(run_dir=sys.argv[1], target=TargetConfig(name=sys.argv[2], dtype="float32", device="cpu"),
    draft=DraftConfig(block=5), negatives=NegativesConfig(per_sample=10, batch_size=5, keep=1.0)))
"""


def test_a_killed_run_continues_to_the_same_rows(made, tmp_path):
    cfg = beside(made, tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", KILLED, cfg.run_dir, str(tiny_target_dir("llama"))], capture_output=True, timeout=500
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()[-2000:]
    parts = list((folder_of(cfg) / "parts" / "shard-00000").glob("part-*.parquet"))
    assert len(parts) == 2 and not list(folder_of(cfg).glob("*.parquet"))
    negatives.run(cfg)
    assert verdicts_of(cfg) == verdicts_of(made) and counts_of(cfg) == counts_of(made)
    assert (folder_of(cfg) / "rejects.jsonl").read_text() == (folder_of(made) / "rejects.jsonl").read_text()


def test_shards_together_make_what_one_process_makes(made, tmp_path, capsys):
    cfg = beside(made, tmp_path)
    for shard in ("1/3", "0/3"):
        negatives.run(replace(cfg, shard=shard))
    assert "2 of 3 shards are finished; still to run: 2" in capsys.readouterr().out
    negatives.run(replace(cfg, shard="2/3"))
    assert len(list(folder_of(cfg).glob("negatives-*.parquet"))) == 3
    check_counts(cfg)
    assert verdicts_of(cfg) == verdicts_of(made)


def test_a_bundle_is_mined_and_the_default_mix_holds(made, tmp_path):
    target = tiny_target("llama")
    write(tmp_path / "bundle", random_head(target), target)
    cfg = beside(made, tmp_path, bundle=str(tmp_path / "bundle"))
    negatives.run(cfg)
    check_rows(cfg)
    check_counts(cfg)
    rows = rows_of(cfg)
    kinds = Counter(class_of(row["kind"]) for row in rows)
    assert kinds["on_policy"] >= 0.7 * len(rows)
    assert kinds["near_miss"] <= 0.2 * len(rows) and kinds["synthetic"] <= 0.1 * len(rows)
    for row in (row for row in rows if row["kind"] == "on_policy"):  # up to and including the first wrong token
        assert row["first_wrong"] is None or row["first_wrong"] == len(row["path_tokens"]) - 1
    with pytest.raises(UserError, match="bundle: "):
        negatives.run(replace(cfg, bundle=None))


def test_sampled_answers_are_judged_by_the_targets_first_choice(tmp_path):
    cfg = distilled(tmp_path / "sampled", sampling=SamplingConfig(temperature=1.0))
    negatives.run(cfg)
    check_rows(cfg)
    check_counts(cfg)
    # a token of the sample itself, before any edit, may be one that the target would not choose
    assert any(row["kind"] != "near_miss" and row["first_wrong"] == 0 for row in rows_of(cfg))


def test_what_the_target_would_accept_is_a_positive_and_counted_by_kind(greedy, tmp_path, monkeypatch):
    """Edits that change nothing: no builder is believed, the target alone decides."""
    from jetspec_train.data.negatives import work
    from jetspec_train.data.negatives.answer_text import Edit

    def same(kind, answer, random, end):
        place = answer.first + 1
        return Edit(place, [answer.tokens[place]], place + 1, "the same")

    monkeypatch.setattr(work, "build_edit", same)
    settings = replace(greedy.negatives, kinds=["near_miss", "stale", "swap"], positives=1.0)
    cfg = beside(greedy, tmp_path, negatives=settings)
    negatives.run(cfg)
    check_rows(cfg)
    check_counts(cfg)
    kinds = counts_of(cfg)["kinds"]
    for kind in ("stale", "swap"):
        assert kinds[kind]["positives"] == kinds[kind]["judged"] > 0 and kinds[kind]["kept_positives"] > 0
    assert kinds["near_miss"]["positives"] == 0
    (tmp_path / "few").mkdir()
    few = beside(greedy, tmp_path / "few", negatives=replace(settings, positives=0.0))
    negatives.run(few)
    assert counts_of(few)["positives"] == 0 and counts_of(few)["rejects_by_reason"]["easy_positive"] > 0


def test_the_budget_counts_negatives(greedy, tmp_path):
    answered = read_manifest(Path(greedy.run_dir) / "distill").counts["answer_tokens"]
    some = beside(greedy, tmp_path, budget=BudgetConfig(tokens=answered + 60))
    negatives.run(some)
    check_counts(some)
    counts = counts_of(some)
    assert (
        30 < counts["judged_tokens"] <= 60 == counts["budget_room"] and counts["rejects_by_reason"]["beyond_budget"] > 0
    )
    (tmp_path / "none").mkdir()
    none = beside(greedy, tmp_path / "none", budget=BudgetConfig(tokens=answered))
    negatives.run(none)
    check_counts(none)
    assert counts_of(none)["kept"] == 0 and list(load_negatives(folder_of(none))) == []


def test_reading_gives_what_was_written(made, tmp_path):
    rows = {row["id"]: row for row in rows_of(made)}
    read = list(load_negatives(folder_of(made)))
    assert [negative.id for negative in read] == list(rows)
    for negative in read:
        row = rows[negative.id]
        assert (negative.prefix, negative.path, negative.labels) == (
            row["prefix_tokens"],
            row["path_tokens"],
            row["labels"],
        )
        assert (negative.first_wrong, negative.margin) == (row["first_wrong"], row["margin"])
    assert {negative.kind for negative in load_negatives(folder_of(made), kinds=["swap"])} == {"swap"}
    assert list(load_negatives(folder_of(made), split="dev")) == []
    with pytest.raises(UserError, match="no finished negatives"):
        next(load_negatives(tmp_path))


def test_the_summary_is_one_page_that_hides_nothing(made):
    page = (folder_of(made) / "summary.html").read_text(encoding="utf-8")
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page and "src=" not in page
    assert "prefers-color-scheme: dark" in page and 'class="t wrong"' in page and 'class="t choice"' in page
    counts = counts_of(made)
    for kind, books in counts["kinds"].items():
        assert f"<td>{kind}</td><td>{books['tried']}</td><td>{books['not_built']}</td>" in page
    for kind in {row["kind"] for row in rows_of(made)}:
        assert f"<h3>{kind}</h3>" in page


def test_bad_input_is_refused_before_any_work(made, tmp_path):
    with pytest.raises(UserError, match="run stage=distill"):
        negatives.run(replace(made, run_dir=str(tmp_path / "empty")))
    other = tiny_target_config("llama", seed=1)
    with pytest.raises(UserError, match="answered by another target"):
        negatives.run(replace(made, target=other))
    with pytest.raises(UserError, match="mining needs a draft"):
        negatives.run(beside(made, tmp_path, negatives=NegativesConfig(kinds=["on_policy"])))
    quiet = replace(made, verifier=replace(made.verifier, enabled=False), run_dir=str(tmp_path / "none"))
    negatives.run(quiet)
    assert not folder_of(quiet).exists()

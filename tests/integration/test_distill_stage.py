"""The laws of distillation: exact ids under kills, exact budgets, counts in = counts out, true masks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import BudgetConfig, Config, DistillConfig, RecipeConfig, SamplingConfig
from jetspec_train.data.samples import load_samples, sample_files
from jetspec_train.stages import distill
from tests.fake_target import EOS, FakeTarget, install


def write_recipe(folder: Path, rows: list[Any], **source: Any) -> RecipeConfig:
    """A recipe whose only source is a JSON-lines file; rows that are text are written as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = source.pop("columns", {"question": "question"})
    content = {
        "shares": source.pop("shares", {"train": 1.0}),
        "sources": [{"name": "rows", "path": "rows.jsonl", "columns": columns, **source}],
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return RecipeConfig(path=str(path))


def questions(count: int) -> list[dict[str, str]]:
    return [{"question": f"Question {number}: " + "word " * (number * 7 % 23)} for number in range(count)]


def config(tmp_path: Path, recipe: RecipeConfig, shard: str = "0/1", **settings: Any) -> Config:
    budget = settings.pop("budget", 10**6)
    settings = {"max_new_tokens": 16, "batch_size": 4, "flush_rows": 3, "max_reject_share": 0.5, **settings}
    return Config(
        run_dir=str(tmp_path / "run"),
        recipe=recipe,
        shard=shard,
        distill=DistillConfig(**settings),
        budget=BudgetConfig(tokens=budget),
    )


def rows_of(cfg: Config) -> list[dict[str, Any]]:
    return [row for path in sample_files(distill.stage_dir_of(cfg)) for row in pq.read_table(path).to_pylist()]


def rejects_of(cfg: Config) -> list[dict[str, Any]]:
    text = (distill.stage_dir_of(cfg) / "rejects.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def counts_of(cfg: Config) -> dict[str, Any]:
    manifest = read_manifest(distill.stage_dir_of(cfg))
    assert manifest is not None
    return manifest.counts


def test_every_turn_is_a_sample_or_a_reject_and_the_second_call_does_nothing(tmp_path, monkeypatch, capsys):
    target = install(monkeypatch)
    cfg = config(tmp_path, write_recipe(tmp_path, questions(60)))
    distill.run(cfg)
    rows, counts = rows_of(cfg), counts_of(cfg)
    assert counts["turns"] == 60 == len(rows) + counts["rejected"]
    assert counts["rejects_by_reason"].keys() == {"empty_answer"}  # the fake answers some prompts with an end only
    assert len(rejects_of(cfg)) == counts["rejected"] > 0
    assert len({row["id"] for row in rows}) == len(rows)
    assert [row["order"] for row in rows] == sorted(row["order"] for row in rows)
    assert counts["answer_tokens"] == sum(len(row["answer_tokens"]) for row in rows)
    for row in rows:
        assert len(row["answer_tokens"]) == len(row["logprobs"]) == len(row["entropies"]) == len(row["margins"])
        assert (row["answer_tokens"][-1] == EOS) == (row["finish_reason"] == "stop") == (not row["truncated"])
    calls = target.calls
    distill.run(cfg)
    assert target.calls == calls and "nothing to do" in capsys.readouterr().out


def test_killed_at_any_instant_the_samples_are_those_of_an_undisturbed_run(tmp_path, monkeypatch):
    """Twenty random SIGKILLs of four shards: no id lost, none twice, the budget equal to the sum."""
    recipe = write_recipe(tmp_path, questions(160))
    install(monkeypatch, FakeTarget(delay=0.002))
    whole = config(tmp_path / "whole", recipe)
    install(monkeypatch)
    distill.run(whole)
    expected = {row["id"]: row["answer_tokens"] for row in rows_of(whole)}
    rejected = counts_of(whole)["rejected"]

    install(monkeypatch, FakeTarget(delay=0.002))
    generator = random.Random(5)
    kills = 0
    while kills < 20:
        children = [fork_and_run(config(tmp_path, recipe, f"{shard}/4")) for shard in range(4)]
        time.sleep(generator.uniform(0.01, 0.25))
        for child in children:
            os.kill(child, signal.SIGKILL)
            kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if all((tmp_path / "run/distill/parts" / f"shard-{n:05d}" / "shard.json").exists() for n in range(4)):
            break
    for shard in range(4):
        distill.run(config(tmp_path, recipe, f"{shard}/4"))
    cfg = config(tmp_path, recipe, "0/4")
    rows = rows_of(cfg)
    assert kills >= 8
    assert len(rows) == len(expected)
    assert {row["id"]: row["answer_tokens"] for row in rows} == expected
    counts = counts_of(cfg)
    assert counts["answer_tokens"] == sum(map(len, expected.values()))
    assert counts["rejected"] == rejected == len(rejects_of(cfg))
    assert not list((tmp_path / "run/distill").glob("**/part-*.parquet"))


def fork_and_run(cfg: Config) -> int:
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "w") as nowhere:
                sys.stdout = sys.stderr = nowhere
                distill.run(cfg)
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("budget", [40, 120, 333])
def test_the_budget_is_never_exceeded_and_does_not_depend_on_kills(tmp_path, monkeypatch, budget):
    recipe = write_recipe(tmp_path, questions(80))
    install(monkeypatch)
    whole = config(tmp_path / "whole", recipe, budget=budget)
    distill.run(whole)
    kept = counts_of(whole)
    assert budget - 16 < kept["answer_tokens"] <= budget and kept["unstarted"] > 0
    assert kept["turns"] == kept["samples"] + kept["rejected"] + kept["unstarted"]

    interrupted = config(tmp_path, recipe, budget=budget)
    for stop_after in (2, 5, 9):
        install(monkeypatch)
        stop_soon(monkeypatch, stop_after)
        with contextlib.suppress(KeyboardInterrupt):
            distill.run(interrupted)
    install(monkeypatch)
    distill.run(interrupted)
    assert {row["id"] for row in rows_of(interrupted)} == {row["id"] for row in rows_of(whole)}


def stop_soon(monkeypatch: Any, answers: int) -> None:
    """Ctrl-C after so many answers."""
    import jetspec_train.targets.generation as generation

    stream = generation.generate_stream

    def stopping(*arguments: Any, **settings: Any) -> Any:
        for number, completion in enumerate(stream(*arguments, **settings)):
            if number == answers:
                raise KeyboardInterrupt
            yield completion

    monkeypatch.setattr(generation, "generate_stream", stopping)


def test_unused_budget_is_handed_to_shards_that_ran_out(tmp_path, monkeypatch, capsys):
    recipe = write_recipe(tmp_path, questions(30))
    install(monkeypatch)
    enough = config(tmp_path / "whole", recipe)
    distill.run(enough)
    total = counts_of(enough)["answer_tokens"]
    budget = total + 3 * 16 + 8  # enough for all, but not if every third keeps what it does not need
    for _ in range(6):
        for shard in range(3):
            distill.run(config(tmp_path, recipe, f"{shard}/3", budget=budget))
        cfg = config(tmp_path, recipe, "0/3", budget=budget)
        if read_manifest(distill.stage_dir_of(cfg)):
            break
    counts = counts_of(cfg)
    assert counts["answer_tokens"] <= budget and counts["budget_tokens"] == budget
    assert counts["unstarted"] == 0 and counts["answer_tokens"] == total
    assert "handed to shards" in capsys.readouterr().out


def test_more_prompts_or_budget_add_samples_other_settings_are_refused(tmp_path, monkeypatch):
    target = install(monkeypatch)
    recipe = write_recipe(tmp_path, questions(40))
    recipe.prompts = 10
    cfg = config(tmp_path, recipe)
    distill.run(cfg)
    first = {row["id"] for row in rows_of(cfg)}
    calls = target.calls
    recipe.prompts = 40
    distill.run(cfg)
    assert target.calls == calls + 30 and first < {row["id"] for row in rows_of(cfg)}
    assert counts_of(cfg)["turns"] == 40
    changed = config(tmp_path, recipe, max_new_tokens=8)
    with pytest.raises(UserError, match=r"max_new_tokens: 16 there, 8 asked"):
        distill.run(changed)
    recipe.prompts = 20
    with pytest.raises(UserError, match=r"extent.prompts"):
        distill.run(cfg)


def test_a_damaged_part_is_set_aside_and_made_again(tmp_path, monkeypatch, caplog):
    recipe = write_recipe(tmp_path, questions(30))
    cfg = config(tmp_path, recipe)
    install(monkeypatch)
    stop_soon(monkeypatch, 15)
    with pytest.raises(KeyboardInterrupt):
        distill.run(cfg)
    part = sorted((tmp_path / "run/distill/parts/shard-00000").glob("part-*.parquet"))[1]
    part.write_bytes(part.read_bytes()[:-20])
    install(monkeypatch)
    distill.run(cfg)
    assert "damaged" in caplog.text and part.with_name(part.name + ".damaged").exists()
    assert counts_of(cfg)["turns"] == 30 == len(rows_of(cfg)) + counts_of(cfg)["rejected"]


def test_conversations_are_replayed_with_the_targets_own_answers(tmp_path, monkeypatch):
    target = install(monkeypatch)
    turns = [{"turns": [f"Start {n}", f"Go on {n}", f"And {n}?"]} for n in range(12)]
    cfg = config(tmp_path, write_recipe(tmp_path, turns, columns={"turns": "turns"}), max_reject_share=1.0)
    distill.run(cfg)
    rows = rows_of(cfg)
    assert len(rows) + counts_of(cfg)["rejected"] == 36 == target.calls
    by_place = {(row["prompt_id"], row["turn"]): row for row in rows}
    followed = 0
    for (prompt, turn), row in by_place.items():
        messages = json.loads(row["messages"])
        assert [m["role"] for m in messages] == ["user", "assistant"] * turn + ["user"]
        assert row["prompt_tokens"] == target.chat.render(messages)
        before = by_place.get((prompt, turn - 1))
        if before is not None:
            followed += 1
            assert messages[-2]["content"] == before["answer"] == target.chat.decode(before["answer_tokens"])
    assert followed > 8


def test_bad_rows_are_counted_with_reasons_and_stop_the_run_only_above_the_share(tmp_path, monkeypatch):
    install(monkeypatch)
    bad = [{"question": ""}, {"question": None}, {"other": 1}, "not json", '{"question": "\\ud800"}', {"question": 3}]
    refused = [{"question": "please refuse me"}, {"question": "long " * 400}]
    recipe = write_recipe(tmp_path, [*questions(40), *bad, *refused, questions(1)[0]])
    cfg = config(tmp_path, recipe, max_prompt_tokens=1000)
    distill.run(cfg)
    reasons = [reject["reason"] for reject in rejects_of(cfg)]
    for reason in ("empty", "missing_column", "invalid_json", "invalid_unicode", "template_error", "prompt_too_long"):
        assert reasons.count(reason) == 1, reason
    assert reasons.count("not_text") == 2 and reasons.count("duplicate") == 1
    strict = config(tmp_path / "strict", recipe, max_reject_share=0.01)
    with pytest.raises(UserError, match=r"6 of 49 rows .* are bad .*max_reject_share=0.01"):
        distill.run(strict)


def test_a_budget_below_one_answer_an_empty_recipe_and_a_busy_shard_are_refused(tmp_path, monkeypatch):
    install(monkeypatch)
    recipe = write_recipe(tmp_path, questions(5))
    with pytest.raises(UserError, match="smaller than one answer"):
        distill.run(config(tmp_path / "a", recipe, budget=15))
    with pytest.raises(UserError, match="no prompt of the splits report"):
        distill.run(config(tmp_path / "b", recipe, splits=["report"]))
    with pytest.raises(UserError, match="all greedy answers"):
        distill.run(config(tmp_path / "c", recipe, samples_per_prompt=2))
    cfg = config(tmp_path, recipe)
    busy = distill.shard_files.only_worker(distill.stage_dir_of(cfg), 0)
    with busy, pytest.raises(UserError, match="Another process"):
        distill.run(cfg)


def test_several_samples_of_a_prompt_are_different_rows(tmp_path, monkeypatch):
    install(monkeypatch)
    recipe = write_recipe(tmp_path, questions(10))
    cfg = config(tmp_path, recipe, samples_per_prompt=3, sampling=SamplingConfig(temperature=1.0))
    distill.run(cfg)
    rows = rows_of(cfg)
    assert counts_of(cfg)["turns"] == 30 and len({row["id"] for row in rows}) == len(rows)
    assert {row["draw"] for row in rows} == {0, 1, 2}


def test_plan_counts_without_a_target(tmp_path):
    recipe = write_recipe(tmp_path, questions(25))
    plan = distill.plan(config(tmp_path, recipe))
    assert plan["prompts"] == 25 and plan["answer_tokens_at_most"] == 25 * 16
    assert 0 < plan["answer_tokens_expected"] < plan["answer_tokens_at_most"] and plan["disk_bytes_expected"] > 0


def test_array_jobs_choose_their_shard(monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "8")
    assert distill.shard_files.which_shard(Config()) == (3, 8)
    assert distill.shard_files.which_shard(Config(shard="1/2")) == (1, 2)
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")  # one task of the array, submitted again
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "3")
    with pytest.raises(UserError, match="shard=i/n"):
        distill.shard_files.which_shard(Config())


REAL_RUN = """
import sys
from jetspec_train.config import *
from jetspec_train.stages import distill
distill.run(Config(run_dir=sys.argv[1], target=TargetConfig(name=sys.argv[2], dtype="float32", device="cpu"),
    recipe=RecipeConfig(prompts=16), distill=DistillConfig(max_new_tokens=12, batch_size=8, flush_rows=2,
    max_prompt_tokens=450)))
"""


def test_a_real_target_killed_once_gives_the_tokens_of_its_own_template(tmp_path):
    """SIGKILL of the real stage in its own process; then masks and greedy answers against the target itself."""
    import torch

    from tests.tiny import tiny_target, tiny_target_config, tiny_target_dir

    folder = tiny_target_dir("llama")
    command = [sys.executable, "-c", REAL_RUN, str(tmp_path / "killed"), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = tmp_path / "killed/distill/parts/shard-00000"
    give_up = time.monotonic() + 120
    while not list(parts.glob("part-*.parquet")) and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.01)
    process.kill()
    process.wait()
    settings = DistillConfig(max_new_tokens=12, batch_size=8, flush_rows=2, max_prompt_tokens=450)
    runs = {}
    for name in ("killed", "whole"):
        cfg = Config(
            run_dir=str(tmp_path / name),
            target=tiny_target_config("llama"),
            recipe=RecipeConfig(prompts=16),
            distill=settings,
        )
        distill.run(cfg)
        runs[name] = rows_of(cfg)
    key = ("id", "answer_tokens", "prompt_tokens", "finish_reason", "turn")
    assert [[row[k] for k in key] for row in runs["killed"]] == [[row[k] for k in key] for row in runs["whole"]]

    target = tiny_target("llama")
    for row in runs["whole"][:4]:
        messages = json.loads(row["messages"])
        assert row["prompt_tokens"] == target.chat.render(messages)
        tokens = torch.tensor([row["prompt_tokens"] + row["answer_tokens"]])
        zeros = torch.zeros_like(tokens)
        positions = torch.arange(tokens.shape[1])[None]
        hidden = target.forward_packed(tokens, positions, zeros, ()).hidden_BND
        logits = target.logits(hidden)[0, len(row["prompt_tokens"]) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        assert logits.argmax(-1).tolist() == row["answer_tokens"]
        own = logprobs.gather(1, torch.tensor(row["answer_tokens"])[:, None])[:, 0]
        torch.testing.assert_close(own, torch.tensor(row["logprobs"]), atol=1e-3, rtol=1e-3)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(entropy, torch.tensor(row["entropies"]), atol=1e-3, rtol=1e-3)
        spans = target.chat.supervised_spans([*messages, {"role": "assistant", "content": "Yes."}])
        assert spans[-1].tokens[: len(row["prompt_tokens"])] == row["prompt_tokens"] or row["turn"] > 0

    store = load_samples(tmp_path / "whole" / "distill")
    assert store.supervised_tokens == sum(len(row["answer_tokens"]) for row in runs["whole"])
    for index, row in enumerate(runs["whole"]):
        sequence = store.tokens[store.starts[index] : store.starts[index + 1]].tolist()
        assert sequence == row["prompt_tokens"] + row["answer_tokens"]
        assert store.prompt_lengths[index] == len(row["prompt_tokens"])

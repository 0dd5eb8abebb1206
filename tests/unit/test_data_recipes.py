"""Recipes are refused or understood before a row is read; splits are a function of the text."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.resources import resource_folder
from jetspec_train.config import RecipeConfig
from jetspec_train.data.prompts import BadRow, PromptCounts, conversation_of, iterate_prompts
from jetspec_train.data.recipes import Source, load_recipe
from jetspec_train.data.splits import DEFAULT_SHARES, SPLITS, content_hash, split_of

RECIPES = sorted(path.stem for path in resource_folder("data_recipes").glob("*.yaml"))
GSM8K_SHAPE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


def shared_prompts() -> Path:
    """The public prompt files beside the checkout; the test is skipped where they are absent."""
    root = os.environ.get("JETSPEC_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(root) / "prompts"
    if not folder.is_dir():
        pytest.skip(f"no public prompts in {folder} (JETSPEC_SHARED_DATA)")
    return folder


def write(folder: Path, content: dict, name: str = "recipe.yaml") -> RecipeConfig:
    path = folder / name
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return RecipeConfig(path=str(path))


def source(**changes) -> dict:
    return {"name": "s", "path": "rows.jsonl", "columns": {"question": "q"}, **changes}


def rows_file(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_load_and_say_their_licence(name):
    cfg = RecipeConfig(name=name)
    if name in ("gsm8k_local", "turns"):
        with pytest.raises(UserError, match=r"needs a path: recipe.overrides"):
            load_recipe(cfg)
        cfg.overrides = {"path": __file__.replace(".py", ".jsonl")}
    recipe = load_recipe(cfg)
    assert recipe.description
    for item in recipe.sources:
        assert item.licence or name == "turns"
        assert item.type != "hub" or item.revision or name == "open_perfectblend"
        assert item.type != "hub" or item.revision is None or len(item.revision) == 40
    readme = (resource_folder("data_recipes") / "README.md").read_text()
    assert f"`{name}`" in readme


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "needs 'sources'"),
        ({"sources": [source()], "colour": 1}, "Unknown key 'colour'"),
        ({"sources": [source(colour=1)]}, "Unknown key 'colour' in source 's'"),
        ({"sources": [source(), source()]}, "its own 'name'"),
        ({"sources": [source(type="csv")]}, "type is 'csv'. Allowed: procedural, jsonl, parquet, hub"),
        ({"sources": [source(use="test")]}, "use is 'test'. Allowed: all, train, report"),
        ({"sources": [source(weight=0)]}, "weight is 0"),
        ({"sources": [source(limit=0)]}, "limit is 0"),
        ({"sources": [source(columns={})]}, "exactly one of question, instruction, turns, messages"),
        ({"sources": [source(columns={"question": "q", "turns": "t"})]}, "exactly one of"),
        ({"sources": [source(columns={"prompt": "q"})]}, "Unknown key 'prompt' in columns"),
        ({"sources": [source(prompt="{problem}?")]}, "uses {problem}; it may use, and needs one of: {question}"),
        ({"sources": [source(prompt="Hello")]}, "needs one of: {question}"),
        ({"sources": [source(revision="abc")]}, "revision is only for a hub source"),
        ({"sources": [source(count=3)]}, "count is only for a procedural source"),
        ({"sources": [{"name": "p", "type": "procedural", "domains": ["law"]}]}, "it must be a list out of math"),
        ({"sources": [source()], "shares": {"train": 0.5}}, "the shares sum to 0.5, not to 1"),
        ({"sources": [source()], "shares": {"train": 1, "test": 0}}, "Unknown key 'test' in shares"),
    ],
)
def test_what_cannot_work_is_one_clear_line(tmp_path, content, message):
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, content))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_names_missing_files_and_columns_say_what_there_is(tmp_path):
    with pytest.raises(UserError, match=r"Known: .*gsm8k"):
        load_recipe(RecipeConfig(name="gsm9k"))
    cfg = write(tmp_path, {"sources": [source()]})
    with pytest.raises(UserError, match=r"rows.jsonl, where no such file exists"):
        list(iterate_prompts(load_recipe(cfg)))
    rows_file(tmp_path, [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError, match=r"no column 'q' \(columns.question\). Its columns: answer, question"):
        list(iterate_prompts(load_recipe(cfg)))
    rows_file(tmp_path, [])
    with pytest.raises(UserError, match="has no rows"):
        list(iterate_prompts(load_recipe(cfg)))


def test_overrides_reach_one_source_the_only_source_or_the_recipe(tmp_path):
    rows_file(tmp_path, [{"question": "one?", "answer": "1"}])
    local = str(tmp_path / "rows.jsonl")
    recipe = load_recipe(RecipeConfig(name="gsm8k", overrides={"gsm8k": {"path": local, "limit": 5}}))
    first, second = recipe.sources
    assert (first.type, first.path, first.revision, first.limit) == ("jsonl", local, None, 5)
    assert second.type == "hub" and first.prompt == GSM8K_SHAPE
    only = load_recipe(RecipeConfig(name="gsm8k_local", overrides={"path": local, "shares": {"train": 1.0}}))
    assert only.shares["train"] == 1.0
    [prompt] = iterate_prompts(only)
    assert prompt.messages == [{"role": "user", "content": GSM8K_SHAPE.replace("{question}", "one?")}]
    assert prompt.reference == "1"
    with pytest.raises(UserError, match=r"recipe.overrides.path fits neither a source .*gsm8k, gsm8k_test"):
        load_recipe(RecipeConfig(name="gsm8k", overrides={"path": local}))


def test_parquet_compressed_json_lists_and_patterns_give_the_same_prompts(tmp_path):
    rows = [{"q": f"number {n}", "extra": n} for n in range(30)]
    rows_file(tmp_path, rows)
    expected = [p.id for p in iterate_prompts(load_recipe(write(tmp_path, {"sources": [source()]})))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write((tmp_path / "rows.jsonl").read_text())
    rows_file(tmp_path, rows[:11], "part-0.jsonl")
    rows_file(tmp_path, rows[11:], "part-1.jsonl")
    for path in ("rows.parquet", "rows.json", "z.jsonl.gz", "part-*.jsonl"):
        recipe = load_recipe(write(tmp_path, {"sources": [source(path=path)]}))
        assert [p.id for p in iterate_prompts(recipe)] == expected, path
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        list(iterate_prompts(load_recipe(write(tmp_path, {"sources": [source(path="rows.parquet")]}))))


def test_hub_failures_name_the_data_set_and_the_local_way_out(monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"openai/gsm8k .*no route.*recipe.overrides.gsm8k_test.path=FILE.jsonl"):
        list(iterate_prompts(load_recipe("gsm8k_test")))
    given = {}

    def load(path, config, **settings):
        given.update(path=path, config=config, **settings)
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    [prompt] = iterate_prompts(load_recipe("gsm8k_test"))
    assert prompt.split == "report" and prompt.domain == "gsm8k"
    assert given["revision"] and given["split"] == "test" and given["config"] == "main"


def test_weights_interleave_and_limits_hold(tmp_path):
    for name in "ab":
        rows_file(tmp_path, [{"q": f"{name}{n}"} for n in range(40)], f"{name}.jsonl")
    sources = [source(name="a", path="a.jsonl", weight=3), source(name="b", path="b.jsonl", limit=12)]
    prompts = list(iterate_prompts(load_recipe(write(tmp_path, {"sources": sources}))))
    assert Counter(p.source for p in prompts) == {"a": 40, "b": 12}
    assert Counter(p.source for p in prompts[:16]) == {"a": 12, "b": 4}


def test_prompts_limits_training_only_and_a_larger_limit_only_adds(tmp_path):
    rows_file(tmp_path, [{"q": f"row {n}"} for n in range(400)])
    recipes = {}
    for limit in (None, 50, 100):
        cfg = write(tmp_path, {"sources": [source()]})
        cfg.prompts = limit
        recipes[limit] = load_recipe(cfg)
    ids = {k: [p.id for p in iterate_prompts(r, ("train",))] for k, r in recipes.items()}
    assert len(ids[50]) == 50 and ids[100][:50] == ids[50] and ids[None][:100] == ids[100]
    report = [[p.id for p in iterate_prompts(r, ("report",))] for r in recipes.values()]
    assert report[0] == report[1] == report[2] and report[0]


def test_report_sources_are_never_trained_on(tmp_path):
    rows_file(tmp_path, [{"q": f"row {n}"} for n in range(60)], "train.jsonl")
    rows_file(tmp_path, [{"q": f"ROW   {n}"} for n in range(0, 60, 3)], "test.jsonl")
    sources = [
        source(name="train", path="train.jsonl", use="train"),
        source(name="test", path="test.jsonl", use="report"),
    ]
    counts = PromptCounts()
    prompts = list(iterate_prompts(load_recipe(write(tmp_path, {"sources": sources})), counts=counts))
    measured = {p.id for p in prompts if p.split == "report"}
    assert len(measured) == 20 and {p.source for p in prompts if p.split == "report"} == {"test"}
    assert counts.by_reason["measured_elsewhere"] == 20
    assert counts.rows == 80 == counts.prompts + counts.rejects + counts.other_splits


def test_splits_ignore_form_and_follow_the_shares():
    assert content_hash(["What  is\nＡ ?"]) == content_hash(["what is a ?"]) != content_hash(["what is b ?"])
    assert content_hash(["a", "b"]) != content_hash(["a b"])
    found = Counter(split_of(content_hash([str(n)])) for n in range(20_000))
    for split in SPLITS:
        assert abs(found[split] / 20_000 - DEFAULT_SHARES[split]) < 0.01
    changed = {split_of(h): split_of(h, measured=False) for h in map(str, range(5000))}
    assert changed == {**{split: split for split in SPLITS}, "report": "train"}


def shape(columns: dict, row: dict, **settings):
    return conversation_of(Source("s", "jsonl", "x", columns=columns, **settings), row)


def test_rows_become_user_turns():
    found = shape({"instruction": "i", "input": "x"}, {"i": "Add.", "x": "1, 2"})
    assert found.turns == ["Add.\n\n1, 2"]
    assert shape({"instruction": "i", "input": "x"}, {"i": "Add.", "x": ""}).turns == ["Add."]
    messages = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "Bye"},
    ]
    found = shape({"messages": "m"}, {"m": messages}, prompt="User says: {turn}")
    assert found.system == "Be kind." and found.turns == ["User says: Hi", "User says: Bye"]
    assert found.raw_turns == ["Hi", "Bye"]
    literal = shape({"question": "q"}, {"q": "{x} {{question}}"}, prompt="{question} \\boxed{} {{question}} {}")
    assert literal.turns == ["{x} {{question}} \\boxed{} {question} {}"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no_user_turn"),
        ([{"role": "system", "content": "only me"}], "no_user_turn"),
        ([{"content": "hi"}], "no_role"),
        ([{"role": "user", "content": " "}], "empty"),
        ([{"role": "user", "content": None}], "not_text"),
        ([{"role": "wizard", "content": "hi"}], "unknown_role"),
        ([{"role": "user", "content": "hi"}, {"role": "tool", "content": "42"}], "tool_message"),
        ([{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}], "role_order"),
        ([{"role": "assistant", "content": "hi"}], "role_order"),
        ([{"role": "user", "content": "\ud800"}], "invalid_unicode"),
        ("hello", "no_user_turn"),
    ],
)
def test_conversations_that_cannot_be_replayed_have_a_reason(messages, reason):
    with pytest.raises(BadRow) as caught:
        shape({"messages": "m"}, {"m": messages})
    assert caught.value.reason == reason


def test_a_two_megabyte_row_is_a_reject_and_other_scripts_pass(tmp_path):
    rows_file(tmp_path, [{"q": "x" * 2_000_000}, {"q": "什么是光合作用？"}, {"q": "ما هي الجاذبية؟"}, {"q": "🙂?"}])
    counts = PromptCounts()
    prompts = list(iterate_prompts(load_recipe(write(tmp_path, {"sources": [source()]})), counts=counts))
    assert len(prompts) == 3 and counts.by_reason == {"too_long": 1}


def test_public_prompt_files_fit_the_shipped_recipes():
    folder = shared_prompts()
    paths = {
        f"gsm8k{end}": {"path": str(folder / f"gsm8k_{kind}.jsonl")} for end, kind in (("", "train"), ("_test", "test"))
    }
    counts = Counter(p.split for p in iterate_prompts(load_recipe(RecipeConfig(name="gsm8k", overrides=paths))))
    assert sum(counts.values()) == 7473 + 1319 and counts["report"] == 1319
    assert counts["calibrate_certify"] >= 592  # METHODS 9: one error allowed at a risk of 0.8 %
    for name, rows, turns in (("mt-bench", 80, 2), ("math500", 500, 1), ("humaneval", 164, 1)):
        overrides = {"path": str(folder / f"{name}.jsonl"), "domain": name}
        prompts = list(iterate_prompts(load_recipe(RecipeConfig(name="turns", overrides=overrides))))
        assert len(prompts) == rows and {p.split for p in prompts} == {"report"} and prompts[0].turns == turns

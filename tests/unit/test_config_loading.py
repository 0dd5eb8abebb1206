"""Words of the command line become checked settings, or one line that says what to write instead."""

import os
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train import config_checks
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.resources import resource_folder
from jetspec_train.config import Config, identity_of, load_config, to_dict
from jetspec_train.config_loading import groups, leaves, sort_arguments
from jetspec_train.stages import STAGES

TEXTS = [
    "What's up?",
    "Solve: x=2 (now)",
    "f(x) = {1}",
    "Hello, world",
    "two\nlines\r\n",
    "  spaces around  ",
    "$HOME ${seed} ${oc.env:HOME} $$",
    "\\ \\' \" '",
    "'quoted'",
    "[1,2]",
    "null",
    "",
    "=",
    "日本語 🎉",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_arrives_as_it_was_typed(text):
    assert load_config(["stage=generate", f"++prompt={text}", "preset=tiny"]).prompt == text


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_prompt_bypasses_the_grammar(text):
    sorted_words = sort_arguments([f"prompt={text}", f"run_dir=a{text}b"], Config)
    assert sorted_words.texts == {"prompt": text, "run_dir": f"a{text}b"} and sorted_words.hydra == []


@pytest.mark.parametrize("path", ["my runs/a=b", "a,b", "C:\\x", "(1)", "~/x", "$X/${Y}", "données"])
def test_paths_need_no_quotes(path):
    keys = ["run_dir", "bundle", "target.name", "prompt_file", "recipe.path", "doctor.json"]
    cfg = load_config([f"{key}={path}" for key in keys])
    assert [config_checks.setting(cfg, key) for key in keys] == [path] * len(keys)


def test_quotes_learned_from_hydra_are_forgiven_for_paths():
    assert load_config(["run_dir='a b'"]).run_dir == "a b"
    assert load_config(["bundle=null"]).bundle is None


def test_the_command_line_overrides_the_preset_and_the_preset_the_groups():
    assert load_config(["preset=gsm8k"]).recipe.name == "gsm8k"
    assert load_config(["preset=gsm8k", "recipe=procedural"]).recipe.name == "procedural"
    assert load_config(["distill.batch_size=3", "preset=tiny"]).distill.batch_size == 3
    assert load_config(["run_dir=x", "preset=tiny"]).run_dir == "x"
    assert load_config(["draft=dflash", "draft.clean_prefix=0.5"]).draft.clean_prefix == 0.5


def test_every_choice_of_every_group_loads():
    found = groups()
    assert set(found["stage"]) == set(STAGES)
    for number in range(max(len(choices) for choices in found.values())):
        chosen = {group: choices[number % len(choices)] for group, choices in found.items()}
        cfg = load_config([*(f"{group}={choice}" for group, choice in chosen.items()), "reports=[a,b]"])
        assert (cfg.stage, cfg.preset) == (chosen["stage"], chosen["preset"])


def test_every_choice_says_what_it_is():
    for file in resource_folder("conf").rglob("*.yaml"):
        lines = [line for line in file.read_text().splitlines() if line.startswith("#") and "@package" not in line]
        assert lines or file.parent.name == "stage", f"{file} lacks a line for --help"


def test_conf_alone_gives_the_defaults_of_the_dataclasses():
    cfg = load_config()
    assert to_dict(cfg) == to_dict(Config(preset="default"))


def test_numbers_and_lists():
    cfg = load_config(["budget.tokens=8e8", "train.epochs=3", "train.betas=[0.8,0.9]", "train.steps=null", "plan=True"])
    assert cfg.budget.tokens == 800_000_000 and type(cfg.budget.tokens) is int
    assert type(cfg.train.epochs) is float and cfg.train.betas == [0.8, 0.9] and cfg.train.steps is None and cfg.plan


def test_free_places_below_a_mapping():
    cfg = load_config(
        ["recipe.overrides.gsm8k.path=/a b=c/x.jsonl", "target.template_options={enable_thinking: false}"]
    )
    assert cfg.recipe.overrides == {"gsm8k": {"path": "/a b=c/x.jsonl"}}
    assert cfg.target.template_options == {"enable_thinking": False}


@settings(max_examples=12, deadline=None)
@given(st.text("ab =,'\"\\{}[]()$:/", min_size=1, max_size=12))
def test_a_free_place_takes_any_text_or_refuses_it_in_one_line(text):
    try:
        cfg = load_config([f"recipe.overrides.x.path={text}"])
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert "x" in cfg.recipe.overrides


def test_shorthands():
    assert load_config(["target=Qwen/Qwen3-0.6B"]).target.name == "Qwen/Qwen3-0.6B"
    assert load_config(["recipe=my/mix.yaml"]).recipe.path == "my/mix.yaml"
    assert load_config(["preset=null"]).preset == "default"


ERRORS = [
    (["train.epoch=3"], "train.epoch=3: unknown key 'train.epoch'. Did you mean train.epochs"),
    (["epochs=3"], "Did you mean train.epochs"),
    (["learning_rat=3"], "Did you mean train.learning_rate"),
    (["train.epochs=many"], "train.epochs=many: a number is needed"),
    (["train.steps=1.5"], "train.steps=1.5: an integer or null is needed"),
    (["train.steps=inf"], "train.steps=inf"),
    (["train.steps=true"], "train.steps=true: an integer or null is needed"),
    (["train.learning_rate=nan"], "finite"),
    (["plan=maybe"], "plan=maybe: true or false is needed"),
    (["train.betas=0.9"], "a list such as"),
    (["train.betas=[0.9,1.5]"], "train.betas=[0.9, 1.5]: two numbers"),
    (["decoding.nodes=0"], "decoding.nodes=0: must be at least 1"),
    (["draft.block=1"], "draft.block=1: must be at least 2"),
    (["draft.block=2"], "draft.clean_prefix=0.25"),
    (["draft.mask=causl"], "draft.mask=causl: allowed are causal, bidirectional. Did you mean causal?"),
    (["draft.layout=inplace"], "allowed are anchor, in_place"),
    (["draft.heads=9", "draft.kv_heads=2"], "draft.heads=9"),
    (["draft.target_layer_ids=[3,1]"], "draft.target_layer_ids=[3, 1]"),
    (["objective.ce=0", "objective.l1=0"], "nothing would be trained"),
    (["decoding.sampling.temperature=-1"], "decoding.sampling.temperature=-1.0: must be at least 0"),
    (["decoding.sampling.top_p=0"], "must be above 0 and at most 1"),
    (["distill.sampling.top_p=1.1"], "distill.sampling.top_p=1.1"),
    (["train.sequences=5", "train.accumulation=2"], "multiple of train.accumulation=2"),
    (["train.tokens=900000000"], "exceeds budget.tokens=800000000"),
    (["train.sequence_length=9"], "too short for draft.block=8"),
    (["preset=quick"], "preset=quick: allowed are default,"),
    (["stage=trian"], "Did you mean train?"),
    (["target=qwen"], "target.name=..."),
    (["recipe=nothing"], "recipe.path=FILE.yaml"),
    (["distill"], "Write stage=distill"),
    (["prompt=What", "is"], "quote it as a whole"),
    (["-m"], "Multirun"),
    (["train.epochs=1,2"], "[1,2]"),
    (["train=3"], "train is a section"),
    (["hydra.run.dir=x"], "run_dir"),
    (["~train.steps=3"], "train.steps=null"),
    (["shard=4/4"], "shard=4/4"),
    (["run_dir="], "run_dir is empty"),
    (["prompt=a", "prompt_file=b"], "both given"),
    (["pipeline=[train,train]"], "only once"),
    (["pipeline=[distil]"], "Did you mean distill"),
    (["stage=compare", "reports=[a]"], "two reports"),
    (["target.device=gpu"], "target.device=gpu"),
    (["train.steps={a"], "train.steps={a: an integer or null is needed"),
]


@pytest.mark.parametrize("words, expected", ERRORS, ids=[" ".join(w) for w, _ in ERRORS])
def test_errors_are_one_line_with_key_value_and_advice(words, expected):
    with pytest.raises(UserError) as caught:
        load_config(words)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abs.=,[]{}'\"$~+@:- 1", max_size=12), max_size=3))
def test_nonsense_is_never_a_traceback(words):
    try:
        load_config(words)
    except UserError as error:
        assert "\n" not in str(error)


def test_the_tables_of_checks_name_existing_keys():
    known = leaves(Config)
    assert set(config_checks.CHOICES) | set(config_checks.RANGES) <= set(known)
    numeric = {key for key, kind in known.items() if kind in (int, float, int | None, float | None)}
    assert numeric <= set(config_checks.RANGES), "a numeric key without a range"


def test_identity_of_names_values():
    identity = identity_of(load_config(), ["draft", "distill.max_new_tokens"])
    assert identity["distill.max_new_tokens"] == 256 and identity["draft"]["layers"] == 2


def test_loading_imports_nothing_heavy_and_touches_nothing(tmp_path):
    code = (
        "import os, sys; from jetspec_train.config import load_config; load_config(['preset=tiny'])\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules), 'heavy import'\n"
        "assert os.getcwd() == sys.argv[1] and os.listdir('.') == []"
    )
    environment = {**os.environ, "PYTHONPATH": str(resource_folder("conf").parent)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, env=environment, check=True)


def test_presets_hold_only_known_keys():
    known, sections = leaves(Config), {f.split(".")[0] for f in leaves(Config) if "." in f}
    for file in (resource_folder("conf") / "preset").glob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        content.pop("defaults", None)
        assert all(key in known or key in sections for key in content), file

"""Right and wrong answers, paired tests, and scorers that misbehave."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import RecipeConfig
from jetspec_train.data.prompts import iterate_prompts
from jetspec_train.data.recipes import load_recipe
from jetspec_train.evaluation.benchmark import Measurement, PromptRecord
from jetspec_train.evaluation.sandbox import code_of, passes_tests
from jetspec_train.evaluation.scoring import exact_mcnemar, same_expression, same_number, score_records, scorer
from jetspec_train.evaluation.suites import SuitePrompt

TEXTS = {
    1: "So the answer is $\\boxed{18}$.",
    2: "It is \\boxed{17}.",
    3: "```python\ndef f(x):\n    return x + 1\n```",
}


def record(scoring: str, reference: str, domain: str = "d", **outputs: int) -> PromptRecord:
    prompt = SuitePrompt("p", domain, 0, [5], "", reference, scoring)
    return PromptRecord(prompt, {name: Measurement([token], 1.0) for name, token in outputs.items()})


def decode(tokens: list[int]) -> str:
    return TEXTS[tokens[0]]


@pytest.mark.parametrize(
    ("judge", "answer", "reference", "right"),
    [
        (same_number, "He pays \\boxed{1200} dollars", "thus\n#### 1,200", True),
        (same_number, "He pays \\boxed{12} dollars", "thus\n#### 1,200", False),
        (same_number, "", "#### 3", False),
        (same_expression, "so \\boxed{\\frac{1}{2}}", "We get $\\boxed{0.5}$", True),
        (same_expression, "so \\boxed{2x+1}", "1 + 2x", True),
        (same_expression, "so \\boxed{2x}", "1 + 2x", False),
    ],
)
def test_equal_values_are_right_however_written(judge, answer: str, reference: str, right: bool) -> None:
    assert judge(answer, reference) is right


def test_code_runs_without_network_within_limits() -> None:
    assert code_of("text\n```python\na = 1\n```\nmore") == "a = 1\n"
    assert passes_tests("```python\ndef f(x):\n    return x + 1\n```", "assert f(1) == 2")
    assert not passes_tests("def f(x): return x", "assert f(1) == 2")
    assert not passes_tests("this is no program", "pass")
    assert not passes_tests("import socket", "socket.create_connection(('127.0.0.1', 9))")
    assert not passes_tests("x = bytearray(4 << 30)", "pass")
    assert passes_tests("import os", "assert os.listdir('.') == [] and 'WANDB_API_KEY' not in os.environ")
    begun = time.monotonic()
    assert not passes_tests("while True: pass", "pass", seconds=1)
    assert time.monotonic() - begun < 5


def test_answers_are_compared_in_pairs_with_plain_decoding() -> None:
    records = [
        record("gsm8k", "#### 18", plain=1, speculative=1),
        record("gsm8k", "#### 18", plain=1, speculative=2),
        record("gsm8k", "#### 17", plain=1, speculative=2),
        record("gsm8k", "#### 3", plain=1, speculative=2),
        record("code", "assert f(1) == 2", "python", plain=3, speculative=1),
    ]
    tasks = score_records(records, decode, run_code=False)
    plain, other = (tasks["d"]["contenders"][name] for name in ("plain", "speculative"))
    assert (plain["right"], plain["accuracy"], plain["p_value"]) == (2, 0.5, None)
    assert (other["right"], other["lost"], other["gained"], other["p_value"]) == (2, 1, 1, 1.0)
    assert tasks["d"]["meaningful"] is True
    assert "run_code" in tasks["python"]["reason"] and tasks["python"]["contenders"] == {}
    ran = score_records(records[-1:], decode, run_code=True)["python"]["contenders"]
    assert (ran["plain"]["right"], ran["speculative"]["right"]) == (1, 0)


def test_prompts_without_a_reference_are_not_scored() -> None:
    assert score_records([record("", "x", plain=1)], decode, run_code=True) == {}


def hang(answer: str, reference: str) -> bool:
    time.sleep(60)
    return True


def crash(answer: str, reference: str) -> bool:
    raise ValueError(answer)


def die(answer: str, reference: str) -> bool:
    import os

    os._exit(3)


def test_a_scorer_that_crashes_hangs_or_dies_is_replaced() -> None:
    with scorer(seconds=1.0) as process:
        assert process.score(crash, "a", "b") is None
        assert process.score(hang, "a", "b") is None
        assert process.score(die, "a", "b") is None
        assert process.score(same_number, "\\boxed{3}", "#### 3") is True


def test_the_exact_test_of_pairs() -> None:
    assert exact_mcnemar(0, 0) == 1.0
    assert exact_mcnemar(1, 9) == pytest.approx(22 / 1024)


def test_recipes_say_how_answers_are_scored(tmp_path: Path) -> None:
    (tmp_path / "he.jsonl").write_text(
        '{"prompt": "def f(x):", "test": "def check(c):\\n    assert c(1) == 2", "entry_point": "f"}\n'
    )
    recipe = load_recipe(RecipeConfig(name="humaneval", overrides={"path": str(tmp_path / "he.jsonl")}))
    prompt = next(iterate_prompts(recipe, ("report",)))
    assert prompt.scoring == "code" and str(prompt.reference).endswith("check(f)")
    assert passes_tests("def f(x):\n    return x + 1", str(prompt.reference))
    with pytest.raises(UserError, match=r"scoring is 'guess'. Allowed: gsm8k, math, code"):
        load_recipe(RecipeConfig(name="humaneval", overrides={"scoring": "guess"}))

"""Procedural prompts: the same everywhere, hardly ever alike, whole templates held out."""

from __future__ import annotations

import re
from collections import Counter

from datasketch import MinHash, MinHashLSH

from jetspec_train.artifacts.files import stable_hash
from jetspec_train.data.procedural import DOMAINS, draw_prompt, report_templates
from jetspec_train.data.prompts import iterate_prompts
from jetspec_train.data.recipes import Recipe, Source
from jetspec_train.data.templates import TEMPLATES

PROMPTS = 3000
ALIKE = 0.7  # Jaccard similarity of the sets of three successive words


def shingles(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[at : at + 3]) for at in range(max(1, len(words) - 2))}


def test_fewer_than_one_prompt_in_twenty_resembles_an_earlier_one():
    index = MinHashLSH(threshold=ALIKE, num_perm=64)
    sets, alike = [], Counter()
    for number in range(PROMPTS):
        drawn = draw_prompt(0, number)
        words = shingles(drawn.turns[0])
        signature = MinHash(num_perm=64)
        signature.update_batch([word.encode() for word in words])
        if any(len(words & sets[other]) / len(words | sets[other]) >= ALIKE for other in index.query(signature)):
            alike[drawn.domain] += 1
        sets.append(words)
        index.insert(number, signature)
    assert sum(alike.values()) < 0.05 * PROMPTS
    assert all(count < 0.05 * PROMPTS / len(DOMAINS) for count in alike.values()), alike


def test_prompts_depend_on_seed_and_index_alone():
    drawn = [draw_prompt(7, number) for number in range(60)]
    assert drawn == [draw_prompt(7, number) for number in range(60)]
    assert drawn != [draw_prompt(8, number) for number in range(60)]
    # Changing a template or a word changes every data set made so far: do it knowingly, and this number with it.
    assert stable_hash([[d.domain, d.template, list(d.turns)] for d in drawn])[:12] == "51845d6e769b"


def test_every_template_can_be_drawn_and_leaves_no_slot_open():
    seen = Counter()
    for number in range(4000):
        drawn = draw_prompt(1, number)
        seen[drawn.template] += 1
        for turn in drawn.turns:
            assert turn == turn.strip() and 10 < len(turn) < 1000
            assert not re.search(r"\{[a-z_]+\d?(\.[a-z])?\}|\S  |@\w+$", turn), turn
    assert set(seen) == {f"{domain}/{name}" for domain, templates in TEMPLATES.items() for name, _ in templates}


def test_code_keeps_its_indentation():
    turns = [draw_prompt(0, number, ["code"]).turns[0] for number in range(600)]
    assert any("\n    total = " in turn and "\n        total += " in turn for turn in turns)


def test_report_prompts_come_from_templates_that_training_never_sees():
    shares = {"train": 0.8, "dev": 0.05, "calibrate_fit": 0.03, "calibrate_certify": 0.02, "report": 0.1}
    recipe = Recipe("r", (Source("p", "procedural", count=1500),), shares)
    splits: dict[str, set[str]] = {}
    for prompt in iterate_prompts(recipe):
        splits.setdefault(prompt.split, set()).add(str(prompt.template))
    held_out = report_templates(0.1)
    assert splits["report"] == held_out
    assert not (held_out & (splits["train"] | splits["dev"] | splits["calibrate_fit"] | splits["calibrate_certify"]))
    assert {name.split("/")[0] for name in held_out} == set(DOMAINS)

"""How long a tree takes to build, and how many of its nodes the full-vocabulary oracle would also take.

    python scripts/tree_timing.py [--rounds 40] [--budget 64] [--depths 15] [--seeds 3]

Draft logits with a heavy tail, peaked ones and flat random ones (those of the tests, whose oracle is used), at
vocabularies 49,152 and 151,936, parent term of rank 64, shortlist of 256. Timed: shortlist and tree together, wall
clock, from logits on the host, with the parents' successors known (as after the first rounds), and in the first round.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jetspec_train.decoding.shortlist import ParentTerm, make_shortlist
from jetspec_train.decoding.tree import build_tree
from tests.unit.test_decoding_tree import CANDIDATES, Oracle, paths_of, synthetic_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--depths", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print("| vocabulary | logits | fastest ms | median ms | first ms | nodes of the oracle |")
    print("| --- | --- | --- | --- | --- | --- |")
    for vocabulary in (49_152, 151_936):
        for kind in ("heavy", "peaked", "random"):
            seconds: list[float] = []
            first: list[float] = []
            agreed = 0
            for seed in range(options.seeds):
                logits_KV, w1, w2 = synthetic_head(kind, vocabulary, options.depths, seed)
                term = ParentTerm(w1, w2)
                for number in range(options.rounds):
                    begun = time.perf_counter()
                    tree = build_tree(make_shortlist(logits_KV, CANDIDATES), term, options.budget)
                    (seconds if number else first).append(time.perf_counter() - begun)
                expected = {path for _, path in Oracle(logits_KV, w1, w2).best_set(options.budget)}
                agreed += len(expected & set(paths_of(tree)))
            share = agreed / (options.seeds * options.budget)
            times = [1e3 * value for value in (min(seconds), float(np.median(seconds)), float(np.median(first)))]
            print(
                f"| {vocabulary:,} | {kind} | {times[0]:.1f} | {times[1]:.1f} | {times[2]:.1f} | {share:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""One factor at a time: what mask, parent term, layout, block, layers, loss, preset and data do for acceptance.

    python scripts/study_drafts.py RUN_DIR OUT [--only NAME ...] [--seed N ...] [-- key=value ...]

RUN_DIR holds a finished stage=distill; nothing in it is changed. Each item of the study is a short training on those
samples (100,000 tokens unless it says otherwise) that differs from "base" in one setting; the target's states are
stored once per set of taps and amount of data in OUT. The words after "--" are settings of every item (those of the
distillation: target=, recipe=, preset=; and what shortens it). What is measured, on dev prompts: greedy acceptance
length as a chain and as a tree with 95 % intervals over prompts, draft time per round at batch 1, parameters and FLOPs.

OUT/study.json holds every result, OUT/study.md the table, OUT/figures/AXIS.png one figure per axis. Finished items are
skipped, a stopped training continues, so that the study may be run piece by piece; --list names the items.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import heapq
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json, atomic_write, read_json
from jetspec_train.config import Config, DecodingConfig, SamplingConfig, load_config

BASE = "base"
BASE_WORDS = (
    "draft=causal_markov",
    "objective=ce_l1",
    "verifier=none",
    "train.tokens=100000",
    "train.features=cache",
    "train.eval_prompts=0",  # measured here, with intervals
)
# axis -> (name of the base's value, {item: (its value, settings that make it)})
AXES: dict[str, tuple[str, dict[str, tuple[str, tuple[str, ...]]]]] = {
    "mask": ("causal", {"mask-bidirectional": ("bidirectional", ("draft.mask=bidirectional",))}),
    "parent": (
        "vanilla",
        {
            "parent-none": ("none", ("draft.parent=none",)),
            "parent-gated": ("gated", ("draft.parent=gated",)),
        },
    ),
    "layout": ("anchor", {"layout-in_place": ("in_place", ("draft.layout=in_place",))}),
    "block": ("8", {"block-4": ("4", ("draft.block=4",)), "block-16": ("16", ("draft.block=16",))}),
    "layers": ("2", {"layers-1": ("1", ("draft.layers=1",))}),
    "loss": (
        "ce_l1",
        {
            "loss-ce": ("ce", ("objective=ce",)),
            "loss-forward_kl": ("forward_kl", ("objective=forward_kl",)),
            "loss-reached": ("ce_l1, weighted by reach", ("objective.reach=true",)),
        },
    ),
    "preset": (
        "causal_markov",
        {
            "preset-dflash": ("dflash", ("draft=dflash",)),
            "preset-jetspec": ("jetspec", ("draft=jetspec",)),
            "preset-dspark": ("dspark", ("draft=dspark",)),
            "preset-eagle3": ("eagle3", ("draft=eagle3", "objective=eagle3")),
            # one layer wider than the published one, to compare at equal size
            "preset-eagle3-2": ("eagle3, 2 layers", ("draft=eagle3", "objective=eagle3", "draft.layers=2")),
        },
    ),
    "tokens": (
        "100k",
        {"tokens-50k": ("50k", ("train.tokens=50000",)), "tokens-300k": ("300k", ("train.tokens=300000",))},
    ),
}
# On the base's checkpoint, without training: tree budgets, and the builder that adds all W children of a popped node.
BUDGETS = (4, 8, 16, 32, 64)
WIDTHS = (2, 4, 8)
DECODING: dict[str, dict[str, tuple[str, int, int | None]]] = {  # axis -> item -> (value, nodes, W)
    "budget": {f"budget-{nodes}": (str(nodes), nodes, None) for nodes in BUDGETS},
    "builder": {
        "builder-exact": ("exact", 16, None),
        **{f"builder-all-{width}": (f"all {width} children", 16, width) for width in WIDTHS},
    },
}


def items() -> dict[str, tuple[str, ...]]:
    """Every training of the study, with the settings in which it differs from the base."""
    return {BASE: (), **{name: words for _, group in AXES.values() for name, (_, words) in group.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, extra = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="items or axes; without it all")
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="each training once per seed")
    parser.add_argument("--prompts", type=int, default=24, help="dev prompts")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=12, help="of the measured trees")
    parser.add_argument("--timed", type=int, default=3, help="prompts decoded one by one for the draft time per round")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(own)
    try:
        chosen = select(options.only)
        if options.list:
            print("\n".join(chosen))
            return 0
        study = Study(options, extra)
        for seed in options.seed:
            for name in chosen:
                study.do(name, seed)
        study.write()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def select(names: Sequence[str] | None) -> list[str]:
    """The items that these names (items or axes) mean, in the study's order; all without names.

    Raises UserError for a name that is neither.
    """
    axes = {axis: [*group] for axis, (_, group) in AXES.items()} | {axis: [*group] for axis, group in DECODING.items()}
    every = [*items(), *(name for group in DECODING.values() for name in group)]
    if names is None:
        return every
    unknown = [name for name in names if name not in every and name not in axes]
    if unknown:
        raise UserError(f"--only {' '.join(unknown)}: allowed are {', '.join([*axes, *every])}.")
    wanted = {name for given in names for name in axes.get(given, [given])}
    return [name for name in every if name in wanted]


def settings(words: Sequence[str]) -> list[str]:
    """The words with the last value of each key only (a group may be chosen once)."""
    return list({word.split("=", 1)[0]: word for word in words}.values())


class Study:
    """Results so far, and what is shared between items: the target and the dev prompts."""

    def __init__(self, options: argparse.Namespace, extra: Sequence[str]) -> None:
        self.options, self.extra, self.out = options, list(extra), Path(options.out)
        self.file = self.out / "study.json"
        self.results: dict[str, Any] = read_json(self.file, "The study's results") if self.file.exists() else {}
        self._target: Any = None
        self._prompts: list[list[int]] = []
        for name in ("distill", "select"):
            there, link = (options.run_dir / name).resolve(), self.out / "data" / name
            if there.is_dir() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(there, target_is_directory=True)

    def config(self, name: str, seed: int) -> Config:
        run = self.out / "runs" / key_of(name, seed)
        own = items()[name]
        cfg = load_config(settings([*BASE_WORDS, *self.extra, *own, f"seed={seed}", "stage=train", f"run_dir={run}"]))
        # a cache belongs to one set of taps on one set of samples
        tapped = cfg.draft.target_layer_ids or cfg.draft.taps
        place = self.out / "features" / f"taps-{tapped}-tokens-{cfg.train.tokens}-length-{cfg.train.sequence_length}"
        cfg.train.features_folder = str(place)
        return cfg

    def do(self, name: str, seed: int) -> None:
        """Train and measure one item, or find that it is done. Raises UserError where its settings have changed."""
        key = key_of(name, seed)
        wanted = {"settings": [*self.extra, *items().get(name, ())], "measured": self.measuring()}
        if key in self.results:
            found = {part: self.results[key][part] for part in wanted}
            if found != wanted:
                raise UserError(f"{key} in {self.file} was made with {found}, not {wanted}. Give another OUT.")
            print(f"study: {key} is done")
            return
        print(f"study: {key}", flush=True)
        result = self.train_and_measure(name, seed) if name in items() else self.decode_only(name, seed)
        self.results[key] = {"item": name, "seed": seed, **wanted, **result}
        self.write()
        print(f"study: {key}: chain {shown(result.get('chain'))}, tree {shown(result.get('tree'))}", flush=True)

    def measuring(self) -> dict[str, int]:
        return {key: getattr(self.options, key) for key in ("prompts", "new_tokens", "nodes", "timed")}

    def train_and_measure(self, name: str, seed: int) -> dict[str, Any]:
        from jetspec_train.artifacts.manifest import require_manifest
        from jetspec_train.stages import train

        cfg = self.config(name, seed)
        for part in ("distill", "select"):
            link, there = Path(cfg.run_dir) / part, self.out / "data" / part
            if there.exists() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(there.resolve(), target_is_directory=True)
        train.run(cfg)
        manifest = require_manifest(Path(cfg.run_dir) / "train", "train")
        head = self.head(cfg)
        drafter = self.drafter(head, cfg)
        facts = {
            "parameters": manifest.counts["trainable_parameters"],
            "layers": head.config.layers,
            "supervised_tokens": manifest.counts["supervised_tokens"],
            "token_visits": manifest.counts["token_visits"],
            "steps": manifest.counts["steps"],
            "training_seconds": manifest.seconds,
            "chain_mflops": flops_of_a_chain(head, self.target(cfg).head.weight.numel()) / 1e6,
        }
        return facts | self.measure(drafter, cfg, self.options.nodes)

    def decode_only(self, name: str, seed: int) -> dict[str, Any]:
        """A budget or a builder on the base's checkpoint. Raises UserError before there is one."""
        if key_of(BASE, seed) not in self.results:
            raise UserError(f"{name} is measured on the base's checkpoint: run --only {BASE} (seed {seed}) first.")
        _, nodes, width = next(group[name] for group in DECODING.values() if name in group)
        cfg = self.config(BASE, seed)
        with all_children(width):
            return self.measure(self.drafter(self.head(cfg), cfg), cfg, nodes, shapes=("tree",))

    def target(self, cfg: Config) -> Any:
        from jetspec_train.stages.training_inputs import dev_prompts
        from jetspec_train.targets.loading import load_target

        if self._target is None:
            self._target = load_target(cfg.target)
            asked = dataclasses.replace(
                cfg.train, eval_prompts=self.options.prompts, eval_max_new_tokens=self.options.new_tokens
            )
            self._prompts = [p.tokens for p in dev_prompts(dataclasses.replace(cfg, train=asked), self._target)]
        return self._target

    def head(self, cfg: Config) -> Any:
        from jetspec_train.stages.export import head_of
        from jetspec_train.stages.training_drafts import kind_and_settings
        from jetspec_train.training.checkpoint import find_checkpoint, load_draft_config, load_draft_tensors

        checkpoint = find_checkpoint(Path(cfg.run_dir) / "train", "last")
        return head_of(*kind_and_settings(load_draft_config(checkpoint)), load_draft_tensors(checkpoint))

    def drafter(self, head: Any, cfg: Config) -> Any:
        from jetspec_train.decoding.drafting import BlockDrafter
        from jetspec_train.decoding.eagle3 import Eagle3Drafter
        from jetspec_train.modeling.eagle3 import Eagle3Head

        return (Eagle3Drafter if isinstance(head, Eagle3Head) else BlockDrafter)(head, self.target(cfg))

    def measure(
        self, drafter: Any, cfg: Config, nodes: int, shapes: Sequence[str] = ("chain", "tree")
    ) -> dict[str, Any]:
        """Acceptance lengths with intervals over prompts; draft and host milliseconds per round at batch 1."""
        from jetspec_train.decoding.decoder import Decoder
        from jetspec_train.decoding.planning import without_controls
        from jetspec_train.decoding.stats import merge_stats
        from jetspec_train.evaluation.statistics import ratio_of_sums

        target, found = self.target(cfg), {}
        plain: DecodingConfig = without_controls(cfg.decoding)
        for shape in shapes:
            # a chain is as long as the draft can reach: "nodes" are those of trees
            wide = dataclasses.replace(
                plain, shape=shape, drafting=True, nodes=max(nodes, 16) if shape == "chain" else nodes
            )
            decoder = Decoder(target, drafter, dataclasses.replace(wide, sampling=SamplingConfig(), stop=[]))
            answers = decoder.generate(self._prompts, max_new_tokens=self.options.new_tokens)
            stats = [answer.stats for answer in answers]
            tau = ratio_of_sums([s.emitted for s in stats], [s.target_forwards for s in stats])
            found[shape] = {"acceptance_length": tau.value, "interval": tau.interval}
            alone = [
                decoder.generate([prompt], max_new_tokens=self.options.new_tokens)[0].stats
                for prompt in self._prompts[: self.options.timed]
            ]
            total = merge_stats(alone)
            for kind in ("draft", "host", "target"):
                found[shape][f"{kind}_ms"] = 1e3 * total.seconds[kind] / max(1, total.rounds)
        return found

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        atomic_json(self.file, self.results)
        atomic_write(self.out / "study.md", table(self.results))
        for axis in [*AXES, *DECODING]:
            draw(axis, self.results, self.out / "figures")


def key_of(name: str, seed: int) -> str:
    return name if seed == 0 else f"{name}@{seed}"


def flops_of_a_chain(head: Any, output_weights: int) -> float:
    """Multiplications and additions of one drafted chain at an empty context: a block, or seven EAGLE-3 forwards.

    ``output_weights``: those of the target's head, which a block head shares. Context keys are cached and left out.
    """
    from jetspec_train.decoding.eagle3 import DEFAULT_DEPTH
    from jetspec_train.modeling.eagle3 import Eagle3Head

    matrices = sum(p.numel() for layer in head.layers for p in layer.parameters() if p.dim() == 2)
    if isinstance(head, Eagle3Head):
        return 2.0 * DEFAULT_DEPTH * (matrices + head.lm_head.weight.numel())
    parent = 0 if head.parent_weight is None else head.parent_weight.numel()
    return 2.0 * (head.config.block * (matrices + output_weights) + head.config.predictions * parent)


@contextlib.contextmanager
def all_children(width: int | None) -> Iterator[None]:
    """Inside, trees are built by adding all ``width`` best children of each popped node; None: as always."""
    from jetspec_train.decoding import drafting

    exact = drafting.build_tree
    if width is not None:
        drafting.build_tree = lambda shortlist, term, nodes, gate=None: build_all(shortlist, term, nodes, gate, width)
    try:
        yield
    finally:
        drafting.build_tree = exact


def build_all(shortlist: Any, term: Any, nodes: int, gate_KR: Any, width: int) -> Any:
    """The builder that JetSpec publishes: pop the best node, add its ``width`` best children, all of them."""
    from jetspec_train.decoding.tree import Tree, empty_tree, token_at, transitions

    slots = len(shortlist.tokens_KC)
    if nodes <= 0 or not slots:
        return empty_tree()
    frontier: list[tuple[float, int, int, int]] = [(0.0, -1, -1, 0)]  # -score, number, token, depth of its children
    tokens, parents, depths, scores = [], [], [], []
    while frontier and len(tokens) < nodes:
        cost, number, token, depth = heapq.heappop(frontier)
        if depth == slots:
            continue
        scores_1S, successors_1M = transitions(shortlist, term, depth, np.array([token]), gate_KR)
        best = np.argsort(-scores_1S[0], kind="stable")[: min(width, nodes - len(tokens))]
        children = token_at(shortlist, depth, successors_1M, np.zeros(len(best), dtype=np.int64), best)
        for child, score in zip(children.tolist(), scores_1S[0, best].tolist()):
            total = min(0.0, score) - cost
            heapq.heappush(frontier, (-total, len(tokens), child, depth + 1))
            tokens.append(child)
            parents.append(number)
            depths.append(depth)
            scores.append(total)
    order = np.argsort(-np.array(scores, dtype=np.float32), kind="stable")
    place = np.full(len(order) + 1, -1)
    place[order] = np.arange(len(order))
    arrays = [np.array(values) for values in (tokens, parents, depths)]
    return Tree(arrays[0][order], place[arrays[1][order]], arrays[2][order], np.array(scores, np.float32)[order])


def shown(part: dict[str, Any] | None) -> str:
    if not part or part["acceptance_length"] is None:
        return "-"
    text = f"{part['acceptance_length']:.2f}"
    return text + (f" ({part['interval'][0]:.2f}..{part['interval'][1]:.2f})" if part["interval"] else "")


def table(results: dict[str, Any]) -> str:
    """All results as markdown, axis by axis."""
    lines = [
        "| item | acceptance length, chain | tree | draft ms per round, chain / tree | parameters | chain MFLOPs | "
        "tokens | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key, result in results.items():
        chain, tree = result.get("chain"), result.get("tree")
        times = " / ".join(f"{part['draft_ms']:.2f}" if part else "-" for part in (chain, tree))
        facts = [f"{result[name]:,.0f}" if name in result else "-" for name in ("parameters", "chain_mflops")]
        facts += [
            f"{result[name]:,.0f}" if name in result else "-" for name in ("supervised_tokens", "training_seconds")
        ]
        lines.append(f"| {key} | {shown(chain)} | {shown(tree)} | {times} | {' | '.join(facts)} |")
    return "\n".join(lines) + "\n"


def draw(axis: str, results: dict[str, Any], folder: Path) -> None:
    """The figure of one axis, as soon as two of its values are there (all seeds, one column each)."""
    from jetspec_train.evaluation.figures import PALETTE, render

    if axis in DECODING:
        values = {name: value for name, (value, _, _) in DECODING[axis].items()}
    else:
        base, group = AXES[axis]
        values = {BASE: base, **{name: value for name, (value, _) in group.items()}}
    found = [(values[result["item"]], result) for result in results.values() if result["item"] in values]
    if len({value for value, _ in found}) < 2:
        return
    names = [value for value in values.values() if any(value == other for other, _ in found)]

    def paint(axes: Any, ink: str) -> None:
        for offset, (shape, colour) in enumerate(zip(("chain", "tree"), PALETTE)):
            there = [(names.index(value), result[shape]) for value, result in found if shape in result]
            if not there:
                continue
            middle = np.array([part["acceptance_length"] for _, part in there])
            ends = np.array([part["interval"] or [part["acceptance_length"]] * 2 for _, part in there]).T
            places = np.array([place for place, _ in there]) + 0.2 * (offset - 0.5)
            spread = np.abs(ends - middle)
            axes.errorbar(places, middle, yerr=spread, fmt="os"[offset], color=colour, capsize=3, label=shape)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel(axis)
        axes.set_ylabel("acceptance length on dev prompts")
        axes.legend()

    folder.mkdir(parents=True, exist_ok=True)
    png, _ = render(paint)
    temporary = folder / f".{axis}.tmp"
    temporary.write_bytes(png)
    os.replace(temporary, folder / f"{axis}.png")


if __name__ == "__main__":
    sys.exit(main())

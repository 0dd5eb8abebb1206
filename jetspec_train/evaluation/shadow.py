"""Rounds of the real decoder with the target's verdict beside every drafted token: what calibration learns from.

A ``ShadowRun`` decodes prompts with any settings, records each round through the decoder's own trace, and leaves out
what carries no label. Three kinds of records come of it, all plain JSON:

* a *chain round*: the greedy chain of one round, its scores per slot, and how many slots the target accepted;
* a *screened stage*: a stage that the controller deferred, with the survival and the attention statistics it was judged
  by, and whether the target agrees with all of its tokens (its check was skipped; the coarse forward is the shadow);
* the answer itself.

Slots after the first rejected one carry no verdict of their own, and neither does anything after the answer's end.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jetspec_train.config import DecodingConfig, SamplingConfig
from jetspec_train.decoding.calibration import Calibration, PatternProfile
from jetspec_train.decoding.decoder import Decoder, Generation
from jetspec_train.decoding.drafting import BlockDrafter, Companions
from jetspec_train.decoding.patterns import STATISTICS
from jetspec_train.decoding.planning import without_controls
from jetspec_train.decoding.tree import Tree

if TYPE_CHECKING:
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.verifier import Verifier
    from jetspec_train.targets.target import Target

# Attention is measured only where there is a profile to compare it with; this one lets everything pass.
EVERY_PATTERN = PatternProfile(STATISTICS, (-1.0,) * len(STATISTICS), (2.0,) * len(STATISTICS), 1.0)


@dataclasses.dataclass(frozen=True)
class ShadowPrompt:
    """A prompt as the target sees it. ``row`` keys its random draws."""

    id: str
    domain: str
    tokens: list[int]
    row: int = 0


class ObservedDrafter(BlockDrafter):
    """A block drafter that also notes what training-free judges of a chain would look at, per slot: the drafted token's
    log-probability, the margin of the first to the second choice, and the entropy, all given the token before it.

    ``observed``: one list of ``{"token", "margin", "entropy"}`` per proposed chain that has slots, in order.
    """

    def __init__(self, head: DraftHead, target: Target, companions: Companions | None = None) -> None:
        super().__init__(head, target, companions)
        self.observed: deque[list[dict[str, float]]] = deque()

    @torch.inference_mode()
    def propose(
        self,
        anchors: Sequence[int],
        limits: Sequence[int],
        settings: DecodingConfig,
        pending: Sequence[Sequence[int]] | None = None,
    ) -> list[Tree]:
        trees = super().propose(anchors, limits, settings, pending)
        if self.states is not None:
            for row, (anchor, tree) in enumerate(zip(anchors, trees)):
                if len(tree):
                    self.observed.append(self._look(row, anchor, [int(token) for token in tree.tokens]))
        return trees

    def _look(self, row: int, anchor: int, chain: Sequence[int]) -> list[dict[str, float]]:
        assert self.states is not None
        hidden_Kd = self.states.hidden_BKd[row, : len(chain)]
        logits_KV = self._target.logits(hidden_Kd).float()
        if self.head.has_parent:
            parents_K = torch.tensor([anchor, *chain[:-1]], device=logits_KV.device)
            logits_KV = logits_KV + self.head.parent_bias(parents_K, hidden_Kd).float()
        log_KV = torch.log_softmax(logits_KV, dim=-1)
        best_K2 = log_KV.topk(2, dim=-1).values
        entropy_K = torch.special.entr(log_KV.exp()).sum(-1)
        margin_K = best_K2[:, 0] - best_K2[:, 1]
        return [
            {"token": token, "margin": margin, "entropy": entropy}
            for token, margin, entropy in zip(chain, margin_K.tolist(), entropy_K.tolist())
        ]


# ---- settings of the runs ------------------------------------------------------------------------------------


def sampling_of(mode: str, decoding: DecodingConfig) -> SamplingConfig:
    """How the target chooses in this mode: greedily, or as the configuration samples."""
    return SamplingConfig() if mode == "match_greedy" else decoding.sampling


def chain_settings(decoding: DecodingConfig, mode: str) -> DecodingConfig:
    """The judged population of METHODS 4: the greedy chain over the whole block, nothing deferred, nothing pruned."""
    plain = without_controls(decoding)
    # More nodes than any block has slots: the chain then ends with the block.
    return dataclasses.replace(
        plain, shape="chain", depth=None, nodes=max(64, plain.nodes), sampling=sampling_of(mode, decoding)
    )


def staged_settings(decoding: DecodingConfig, mode: str, *, stages: int, **changes: Any) -> DecodingConfig:
    """The policy under test: the configured drafting, stage by stage. What depends on the machine's speed or on earlier
    requests (scheduler, result cache) is off, so that the same prompts give the same decisions again."""
    return dataclasses.replace(
        decoding,
        stages=stages,
        rule="match",
        sampling=sampling_of(mode, decoding),
        scheduler=False,
        utilisation=False,
        cache=False,
        trace=None,
        **changes,
    )


# ---- running -------------------------------------------------------------------------------------------------


class ShadowRun:
    """Decodes batches of prompts with the trace on.

    Raises UserError where settings, draft and calibration do not go together (see ``RoundPlanner``).
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        verifier: Verifier | None,
        calibration: Calibration | None,
        settings: DecodingConfig,
    ) -> None:
        self._target, self._settings = target, settings
        companions = Companions(verifier=verifier, calibration=calibration)
        made = ObservedDrafter if settings.shape == "chain" and not settings.stages else BlockDrafter
        self._drafter = made(head, target, companions)

    def run(
        self, prompts: Sequence[ShadowPrompt], *, max_new_tokens: int
    ) -> tuple[list[dict[str, Any]], list[Generation]]:
        """Trace records with "prompt" and "domain" in each (of chains also "margin" and "entropy" of each node), and
        the answers."""
        with tempfile.TemporaryDirectory(prefix="shadow-") as folder:
            path = Path(folder) / "trace.jsonl"
            decoder = Decoder(self._target, self._drafter, dataclasses.replace(self._settings, trace=str(path)))
            answers = decoder.generate(
                [prompt.tokens for prompt in prompts],
                max_new_tokens=max_new_tokens,
                row_ids=[prompt.row for prompt in prompts],
            )
            if decoder.planner is not None and decoder.planner.trace is not None:
                decoder.planner.trace.close()
            with open(path, encoding="utf-8") as lines:
                records = [json.loads(line) for line in lines]
        for record in records:
            prompt = prompts[record["row"]]
            record["prompt"], record["domain"] = prompt.id, prompt.domain
        if isinstance(self._drafter, ObservedDrafter):
            _add_observations(records, self._drafter.observed)
        return records, answers


def _add_observations(records: Sequence[dict[str, Any]], observed: deque[list[dict[str, float]]]) -> None:
    """The decoder writes its rounds in the order in which they were proposed; tokens are compared to be sure."""
    for record in records:
        if not record["nodes"]:
            continue
        seen = observed.popleft()
        if [node["token"] for node in record["nodes"]] != [slot["token"] for slot in seen]:
            raise RuntimeError("the trace's rounds are not in the order in which they were proposed")
        for node, slot in zip(record["nodes"], seen):
            node["margin"], node["entropy"] = slot["margin"], slot["entropy"]


# ---- what a round says ---------------------------------------------------------------------------------------


def chain_round(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A chain's round as arrays over its slots; None where nothing was drafted or the verifier gave no number.

    ``accepted``: slots that the target accepted; ``known``: slots of which it is known whether the chain up to them was
    accepted (all, unless the answer ended inside); ``judged``: those that were offered after accepted ones only - up
    to and including the first rejected - which is the population that heads and baselines are compared on.
    """
    nodes = record["nodes"][: len(record["sent"])]
    logits = [node["correctness_logit"] for node in nodes]
    if not nodes or any(logit is None for logit in logits):
        return None
    emitted, accepted = len(record["emitted"]), len(record["accepted"])
    cut = emitted <= accepted  # the answer ended at a drafted token: what was drafted after it means nothing
    known = emitted if cut else len(nodes)
    return {
        "prompt": record["prompt"],
        "domain": record["domain"],
        "accepted": min(accepted, known),
        "known": known,
        "judged": known if cut else min(accepted + 1, len(nodes)),
        "correctness": logits,
        **{
            name: [node.get(key) for node in nodes]
            for name, key in (
                ("confidence", "confidence_logit"),
                ("logprob", "logprob"),
                ("margin", "margin"),
                ("entropy", "entropy"),
            )
        },
    }


def screened_stages(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The deferred stages of a round that the target's coarse forward judged, in order.

    ``passed``: the target's own choices are exactly the stage's tokens. A stage below tokens that were rolled back is
    left out: nobody knows what the target would have said of it on its own path.
    """
    place = {node: index for index, node in enumerate(record["sent"])}
    kept = set(record["accepted"])
    choices, nodes = record["target_choices"], record["nodes"]
    lowest = 1.0
    for decision in record["decisions"]:
        if decision["action"] != "defer":
            return
        stage = decision["nodes"]
        lowest = min(lowest, decision["survival"])
        own = all(
            choices[0 if nodes[node]["parent"] < 0 else 1 + place[nodes[node]["parent"]]] == nodes[node]["token"]
            for node in stage
        )
        yield {
            "prompt": record["prompt"],
            "domain": record["domain"],
            "round": record["round"],
            "stage": decision["stage"],
            "survival": decision["survival"],
            "lowest_survival": lowest,
            "statistics": decision["statistics"],
            "passed": own,
        }
        if not all(node in kept for node in stage):
            return

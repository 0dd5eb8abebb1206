"""How good the draft is while it trains: its acceptance length on dev prompts, measured by the real decoder.

A loss can fall while acceptance falls (PITFALLS 7), so the best checkpoint is the one that decodes best: greedy, with
the settings of the run's own decoding (chain and tree are both measured; ``decoding.shape`` decides). Prompts go
through the decoder as one batch, the target's forwards are counted, and no time is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jetspec_train.config import DecodingConfig, SamplingConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter, Drafter
from jetspec_train.decoding.eagle3 import Eagle3Drafter
from jetspec_train.decoding.planning import without_controls
from jetspec_train.decoding.stats import merge_stats
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.eagle3 import Eagle3Head
from jetspec_train.targets.target import Target


class Stopped(Exception):
    """Someone asked the training to stop while it was measuring."""


def measure_acceptance(
    draft: DraftHead | Eagle3Head,
    target: Target,
    prompts: Sequence[list[int]],
    decoding: DecodingConfig,
    *,
    max_new_tokens: int,
    should_stop: Callable[[], bool] = lambda: False,
    on_answers: Callable[[list[list[int]]], Any] = lambda answers: None,
) -> dict[str, Any] | None:
    """Greedy acceptance lengths over ``prompts``; None if ``should_stop`` became true half-way.

    The drafter copies the weights in the target's dtype, as a bundle is decoded. Returns ``acceptance_length`` (of
    ``decoding.shape``), ``chain`` and ``tree`` (tokens per target forward), ``acceptance_rate_at`` (chain, per slot)
    and the counts behind them. ``on_answers`` is given what was decoded: whatever the draft, the target's own answers.
    """
    drafter: Drafter = Eagle3Drafter(draft, target) if isinstance(draft, Eagle3Head) else BlockDrafter(draft, target)
    record: dict[str, Any] = {}

    def check(*_: Any) -> None:
        if should_stop():
            raise Stopped

    for shape in ("chain", "tree"):
        # The draft alone is measured: no policy, stages or scheduler of the run's own decoding.
        plain = without_controls(decoding)
        settings = dataclasses.replace(plain, shape=shape, drafting=True, sampling=SamplingConfig(), stop=[])
        decoder = Decoder(target, drafter, settings)
        try:
            generations = decoder.generate(list(prompts), max_new_tokens=max_new_tokens, on_tokens=check)
        except Stopped:
            return None
        stats = merge_stats([generation.stats for generation in generations])
        # Answers that end with the prefill's token take no decode forward: nothing was accepted, nothing refused.
        record[shape] = stats.emitted / stats.target_forwards if stats.target_forwards else 1.0
        record[f"{shape}_forwards"], record[f"{shape}_tokens"] = stats.target_forwards, stats.emitted
        if shape == "chain":
            on_answers([generation.tokens for generation in generations])
            slots = range(len(stats.drafted_by_depth))
            record["acceptance_rate_at"] = [round(stats.acceptance_rate_at(slot), 4) for slot in slots]
    return {"acceptance_length": record["chain" if decoding.shape == "chain" else "tree"], **record}

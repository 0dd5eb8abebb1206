"""The ratio rule in the decoder: the distribution of plain sampling, row by row, with lengths from confidence only."""

from __future__ import annotations

import numpy as np
import torch

from jetspec_train.config import SamplingConfig
from jetspec_train.decoding.cost_profile import CostProfile
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter, Companions
from jetspec_train.decoding.scheduler import AdaptiveScheduler
from jetspec_train.targets.sampling import process_logits
from tests.round_tools import FREE, tiny_verifier
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import NEW, SAMPLED, outputs, random_head, settings_for


def test_the_ratio_rule_has_the_distribution_of_plain_sampling():
    """First two decoded tokens over many seeds, against the target's exact probabilities (top-k keeps them few)."""
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    sampling = SamplingConfig(temperature=1.5, top_k=3)
    drafter = BlockDrafter(random_head(target), target)
    config = settings_for("chain", nodes=3, rule="ratio", sampling=sampling)
    decoder = Decoder(target, drafter, config)
    rows = 240
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2):
        for generation in decoder.generate([prompt] * rows, max_new_tokens=3, seed=seed):
            counts[tuple(generation.tokens)] = counts.get(tuple(generation.tokens), 0) + 1

    def chances(text: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1:]
        p_V = process_logits(logits, sampling).exp()[0]
        return {int(token): float(p_V[token]) for token in p_V.nonzero()[:, 0]}

    statistic, cells = 0.0, 0
    for first, p in chances(prompt).items():
        for second, q in chances([*prompt, first]).items():
            for third, r in chances([*prompt, first, second]).items():
                expected = 2 * rows * p * q * r
                seen = counts.pop((first, second, third), 0)
                if first not in target.eos_ids and second not in target.eos_ids and expected > 2:
                    statistic += (seen - expected) ** 2 / expected
                    cells += 1
    assert not [tokens for tokens in counts if not set(tokens) & set(target.eos_ids)]  # nothing impossible came out
    assert cells >= 8 and statistic < cells + 4 * np.sqrt(2 * cells), (statistic, cells)


def test_ratio_output_depends_on_the_row_alone():
    target = tiny_target("llama")
    prompts = tiny_prompts(3)
    drafter = BlockDrafter(random_head(target), target)
    config = settings_for("chain", nodes=4, rule="ratio", sampling=SAMPLED)
    together = outputs(Decoder(target, drafter, config), prompts, max_new_tokens=NEW, seed=5)
    alone = [
        outputs(Decoder(target, drafter, config), [prompt], max_new_tokens=NEW, seed=5, row_ids=[row])[0]
        for row, prompt in enumerate(prompts)
    ]
    assert together == alone
    stats = Decoder(target, drafter, config).generate(prompts, max_new_tokens=NEW, seed=5)[0].stats
    assert stats.drafted_tokens > 0 and stats.emitted == len(together[0]) - 1


def test_ratio_chains_are_cut_by_confidence_only():
    """With the scheduler on, lengths come from the confidence head; a costly machine sends nothing."""
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    head = random_head(target)
    dear = CostProfile({1: 1.0, 2: 50.0, 64: 50.0 * 64}, draft_seconds=0.1)
    for profile, sends in ((FREE, True), (dear, False)):
        drafter = BlockDrafter(head, target, Companions(tiny_verifier(head)))
        config = settings_for("chain", nodes=4, rule="ratio", sampling=SAMPLED, scheduler=True)
        decoder = Decoder(target, drafter, config)
        decoder.planner.scheduler = AdaptiveScheduler(profile, most_nodes=4)
        stats = decoder.generate([prompt], max_new_tokens=NEW)[0].stats
        assert (stats.drafted_tokens > 0) == sends

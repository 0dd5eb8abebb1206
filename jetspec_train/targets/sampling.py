"""How a token is chosen from logits: the same function for plain decoding, tree verification and distillation.

Sampled choices are *keyed*: the uniform number behind the token at an absolute position of a row is a function of
(seed, row, position) alone. Whatever is drafted, pruned or batched together, the row draws the same numbers, so sampled
output is token-identical to plain sampling (in fp32, where logits do not depend on the batch).

Shapes: N choices, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from jetspec_train.config import SamplingConfig

_MASK64 = (1 << 64) - 1


def is_greedy(sampling: SamplingConfig) -> bool:
    return sampling.temperature == 0


def process_logits(
    logits_NV: torch.Tensor, sampling: SamplingConfig, histories: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """Logits -> log-probabilities of the distribution that is sampled from, fp32 [N, V]; -inf where filtered.

    Order: repetition penalty, temperature, top-k, top-p, min-p, as transformers applies them. With temperature 0 only
    the repetition penalty acts. The most probable token always stays.

    Args:
        histories: per choice, the tokens before it (prompt included); needed by the repetition penalty only. In a tree
            each node has its own path.
    """
    logits_NV = logits_NV.float()
    if sampling.repetition_penalty != 1.0:
        logits_NV = _penalise(logits_NV, sampling.repetition_penalty, histories)
    if not is_greedy(sampling) and sampling.temperature != 1.0:
        logits_NV = logits_NV / sampling.temperature
    if is_greedy(sampling):
        return logits_NV.log_softmax(-1)
    vocabulary = logits_NV.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        smallest_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest_N1, float("-inf"))
    if sampling.top_p < 1.0:
        sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
        probability_NV = sorted_NV.softmax(-1)
        # A token stays while the probability *before* it has not reached top_p: the set is the smallest that does.
        drop_NV = probability_NV.cumsum(-1) - probability_NV >= sampling.top_p
        drop_NV[:, 0] = False
        logits_NV = logits_NV.masked_fill(torch.zeros_like(drop_NV).scatter_(1, order_NV, drop_NV), float("-inf"))
    if sampling.min_p > 0.0:
        probability_NV = logits_NV.softmax(-1)
        floor_N1 = sampling.min_p * probability_NV.amax(-1, keepdim=True)
        logits_NV = logits_NV.masked_fill(probability_NV < floor_N1, float("-inf"))
    return logits_NV.log_softmax(-1)


def _penalise(logits_NV: torch.Tensor, penalty: float, histories: Sequence[Sequence[int]] | None) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens already seen (CTRL, arXiv 1909.05858)."""
    if histories is None or len(histories) != logits_NV.shape[0]:
        raise ValueError("a repetition penalty needs the history of every choice")
    logits_NV = logits_NV.clone()
    for row, history in enumerate(histories):
        seen = torch.tensor(sorted(set(history)), dtype=torch.long, device=logits_NV.device)
        values = logits_NV[row, seen]
        logits_NV[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits_NV


def keyed_uniform(seed: int, row: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on nothing but its arguments (counter-based Philox, 53 bits)."""
    key = np.array([seed & _MASK64, row & _MASK64], dtype=np.uint64)
    counter = np.array([position & _MASK64, 0, 0, 0], dtype=np.uint64)
    return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53


def choose(
    logits_NV: torch.Tensor,
    sampling: SamplingConfig,
    seed: int,
    rows: Sequence[int],
    positions: Sequence[int],
    histories: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """The target's own choice for each of N places, int64 [N] on the logits' device.

    Greedy: argmax (the lowest id of equal logits). Sampled: one inverse-CDF draw in fp64 per place.

    Args:
        seed: of the run.
        rows: per choice, an id of its row that no batching changes (the request's number, not its place in a batch).
        positions: per choice, the absolute position of the token *to be chosen* in its row.
        histories: see ``process_logits``.
    """
    if is_greedy(sampling):
        if sampling.repetition_penalty != 1.0:
            logits_NV = _penalise(logits_NV.float(), sampling.repetition_penalty, histories)
        return _argmax(logits_NV)
    probability_NV = process_logits(logits_NV, sampling, histories).double().exp()
    uniform_N1 = torch.tensor(
        [[keyed_uniform(seed, row, position)] for row, position in zip(rows, positions)],
        dtype=torch.float64,
        device=logits_NV.device,
    )
    return invert_cdf(probability_NV, uniform_N1)


def _argmax(logits_NV: torch.Tensor) -> torch.Tensor:
    """The lowest id of the highest logit. On a CPU through numpy: torch's bf16 argmax takes ten times as long."""
    if logits_NV.device.type != "cpu":
        return logits_NV.argmax(-1)
    return torch.from_numpy(logits_NV.float().numpy().argmax(-1))


def invert_cdf(probability_NV: torch.Tensor, uniform_N1: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number; never one of probability zero."""
    cumulative_NV = probability_NV.cumsum(-1)
    # Scaled by the total, which rounding leaves a little off one.
    drawn_N1 = torch.searchsorted(cumulative_NV, uniform_N1 * cumulative_NV[:, -1:], right=True)
    last_N = probability_NV.shape[-1] - 1 - (probability_NV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(drawn_N1[:, 0], last_N)

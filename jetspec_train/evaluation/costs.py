"""The measured cost curve: seconds of one target forward by the number of tokens it carries.

Verification is cheap only while a forward over n tokens costs little more than one over a single
token; where that stops is a property of the machine, so it is measured, not assumed.
"""

from __future__ import annotations

import time
from typing import Any

from jetspec_train.evaluation.benchmark import synchronize
from jetspec_train.evaluation.statistics import median

SIZES = (1, 2, 4, 8, 16, 32)


def measure_cost_curve(
    target: Any, *, context: int = 256, sizes: tuple[int, ...] = SIZES, repeats: int = 7
) -> dict[int, float]:
    """Median seconds of forward + head over n tokens after ``context`` cached ones, for each n.

    The sizes are visited in turn, ``repeats`` times, so that a drift of the machine does not tilt the
    curve. The tokens are arbitrary (the cost of a dense model does not depend on them) and are never
    committed. A context that does not fit the target is shortened.
    """
    import torch

    largest = max(sizes)
    if target.max_positions is not None:
        context = max(1, min(context, target.max_positions - largest))
    capacity = context + largest
    cache = target.new_cache(1, capacity)
    tokens = torch.arange(capacity, device=target.device)[None] % max(1, target.vocab_size // 2)
    timings: dict[int, list[float]] = {size: [] for size in sizes}
    with torch.inference_mode():
        target.forward(tokens[:, :context], cache=cache)
        cache.commit([list(range(context))])
        for repeat in range(repeats + 1):
            for size in sizes:
                synchronize()
                start = time.perf_counter()
                output = target.forward(tokens[:, context : context + size], cache=cache)
                target.logits(output.hidden_BND[0])
                synchronize()
                if repeat:  # the first visit of each size pays for allocations and is dropped
                    timings[size].append(time.perf_counter() - start)
    return {size: median(values) or 0.0 for size, values in timings.items()}

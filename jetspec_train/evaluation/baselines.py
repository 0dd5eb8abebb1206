"""What others offer for the same target: transformers' ``generate``, prompt-lookup, assisted generation.

They run in the same interleaved loop, on the same weights, prompts, end tokens and limits. Their
acceptance length is counted from outside, by the forwards that the model really makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.evaluation.benchmark import ArrivalClock, Contender, Measurement

LOOKUP_TOKENS = 10  # the value that transformers' documentation shows
DESCRIPTIONS = {
    "generate": "transformers' generate() on the same weights",
    "prompt_lookup": f"transformers' generate(prompt_lookup_num_tokens={LOOKUP_TOKENS}): drafts n-grams of the context",
    "assisted": "transformers' assisted generation with a small draft model (evaluate.assistant)",
}


class ForwardCount:
    """Forwards of the target and the tokens that they carried, the first (the prefill) left out."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def note(self, _module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = named.get("input_ids", arguments[0] if arguments else None)
        self.sizes.append(int(tokens.shape[-1]) if tokens is not None else 1)

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        handle = model.register_forward_pre_hook(self.note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def transformers_contender(
    name: str, target: Any, *, sampling: Any, seed: int, stop: Sequence[str], assistant: Any = None
) -> Contender:
    """``generate``, ``prompt_lookup`` or ``assisted`` as a contender.

    ``assistant``: the draft model of ``assisted``. Raises UserError for an unknown name.
    """
    if name not in DESCRIPTIONS:
        raise UserError(f"evaluate.baselines={name!r} is not known. Allowed: {', '.join(DESCRIPTIONS)}.")
    if name == "assisted" and assistant is None:
        raise UserError(
            "evaluate.baselines=assisted needs a small draft model: set evaluate.assistant=HUB_ID_OR_FOLDER."
        )
    options: dict[str, Any] = {"eos_token_id": list(target.eos_ids), "pad_token_id": target.pad_id, "use_cache": True}
    if sampling.temperature > 0:
        options |= {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    else:
        options["do_sample"] = False
    if sampling.repetition_penalty != 1.0:
        options["repetition_penalty"] = sampling.repetition_penalty
    extra: dict[str, Any] = {}
    if name == "prompt_lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    if name == "assisted":
        extra["assistant_model"] = assistant
    if stop:
        options["stop_strings"] = list(stop)
        extra["tokenizer"] = target.chat.tokenizer

    def answer(tokens: list[int], row: int, max_new_tokens: int, clock: ArrivalClock) -> Measurement:
        import torch
        from transformers import GenerationConfig

        torch.manual_seed(seed + row)
        clock.prompt_expected = True
        count = ForwardCount()
        prompt = torch.tensor([tokens], device=target.device)
        # a fresh configuration: a model folder's own generation_config may hold penalties that ours has not
        config = GenerationConfig(max_new_tokens=max_new_tokens, **options)
        with count.watching(target.model), torch.inference_mode():
            output = target.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=clock,
                **extra,
            )
        produced = output[0, len(tokens) :].tolist()
        ended = bool(produced) and produced[-1] in target.eos_ids
        return Measurement(
            tokens=produced,
            seconds=0.0,
            finish_reason="stop" if ended else "length",
            target_forwards=len(count.sizes) - 1,
            target_tokens=sum(count.sizes[1:]),
            decoded=max(0, len(produced) - 1),
        )

    return Contender(name, answer, DESCRIPTIONS[name])

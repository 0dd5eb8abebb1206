"""Learns the facts of a loaded model by running it once on three tokens, and refuses what it cannot reproduce.

The model's own code says which window each layer uses, what shapes its keys have, what its first layer sees and how
logits follow from the last hidden state. Reading these off one forward holds for families that this project has never
heard of, and fails loudly - at load time - where an assumption breaks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from jetspec_train.artifacts.errors import UserError
from jetspec_train.targets import attention
from jetspec_train.targets.cache import LayerShape
from jetspec_train.targets.families import text_config


@dataclass(frozen=True)
class Facts:
    """What one forward showed.

    Attributes:
        decoder: the module that maps tokens to the post-final-norm hidden state.
        layers: its decoder layers in order.
        shapes: key/value shapes per layer.
        windows: attention window per layer, None where unlimited.
        embedding_scale: factor between the embedding table's output and the first layer's input.
        cache_argument: what the decoder calls its cache (``cache``, ``past_key_values`` in older versions).
    """

    decoder: torch.nn.Module
    layers: list[torch.nn.Module]
    attention_modules: list[torch.nn.Module]
    shapes: list[LayerShape]
    windows: list[int | None]
    embedding_scale: float
    cache_argument: str


def cache_argument(decoder: torch.nn.Module) -> str:
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def scaled_logits(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Soft cap (Gemma), multiplier (Cohere) or divisor (Granite) that a family applies after its head."""
    text = text_config(config)
    scale, divisor = getattr(text, "logit_scale", None), getattr(text, "logits_scaling", None)
    softcap = getattr(text, "final_logit_softcapping", None)
    if scale is not None:
        logits = logits * scale
    if divisor is not None:
        logits = logits / divisor
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


def _decoder_layers(decoder: torch.nn.Module, count: int) -> list[torch.nn.Module] | None:
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count:
            return list(layers)
    return None


@torch.no_grad()
def inspect_model(model: Any, name: str) -> Facts:
    """Run ``model`` (attention set to ours) on three tokens and collect the facts.

    Raises:
        UserError: the model does not use the common attention interface, hides its layers, or computes its logits in
            a way that ``scaled_logits`` does not reproduce.
    """

    def refuse(reason: str) -> UserError:
        kind = getattr(model.config, "model_type", "unknown")
        return UserError(f"target {name!r}: architecture {kind!r} is not supported: {reason}.")

    text = text_config(model.config)
    decoder = model.get_decoder()
    layers = _decoder_layers(decoder, text.num_hidden_layers)
    if layers is None:
        raise refuse("its decoder layers could not be found")
    head = model.get_output_embeddings()
    if head is None:
        raise refuse("it has no language-model head")

    first_input: list[torch.Tensor] = []

    def note_first_input(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        first_input.append(args[0] if args else kwargs["hidden_states"])

    table = model.get_input_embeddings()
    tokens_BN = torch.tensor([[1, 2, 3]], device=table.weight.device) % table.weight.shape[0]
    argument = cache_argument(decoder)
    cache: Any = DynamicCache()
    hook = layers[0].register_forward_pre_hook(note_first_input, with_kwargs=True)
    hidden: list[torch.Tensor] = []
    hook_hidden = decoder.register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    try:
        with attention.AttentionRecorder() as recorder:
            logits_BNV = model(input_ids=tokens_BN, use_cache=True, **{argument: cache}).logits
    finally:
        hook.remove()
        hook_hidden.remove()

    modules = [module for module, _ in recorder.calls]
    if [getattr(module, "layer_idx", None) for module in modules] != list(range(len(layers))):
        raise refuse("its layers do not use the common attention interface of transformers, one call per layer")
    windows = [kwargs.get("sliding_window") for _, kwargs in recorder.calls]
    for layer, layer_type in enumerate(getattr(text, "layer_types", None) or []):
        if layer_type == "sliding_attention" and windows[layer] is None:
            raise refuse(f"layer {layer} has a sliding window that it does not pass to its attention")
    if len(cache.layers) != len(layers):
        raise refuse("not every layer has keys and values of its own")

    ours_BNV = scaled_logits(model.config, head(hidden[0])).float()
    tolerance = 1e-4 if logits_BNV.dtype == torch.float32 else 3e-2
    if (ours_BNV - logits_BNV.float()).abs().max() > tolerance * (1 + logits_BNV.float().abs().max()):
        raise refuse("its logits are not its head applied to the last hidden state")

    return Facts(
        decoder=decoder,
        layers=layers,
        attention_modules=modules,
        shapes=[LayerShape(la.keys.shape[1], la.keys.shape[3], la.values.shape[3]) for la in cache.layers],
        windows=[int(window) if window is not None else None for window in windows],
        embedding_scale=_embedding_scale(table(tokens_BN), first_input[0]),
        cache_argument=argument,
    )


def _embedding_scale(embedded: torch.Tensor, seen: torch.Tensor) -> float:
    """The constant factor between both, or 1.0 where the difference is no factor (learned positions, for instance)."""
    embedded, seen = embedded.float(), seen.float()
    if torch.equal(embedded, seen):
        return 1.0
    scale = float((embedded * seen).sum() / (embedded * embedded).sum().clamp_min(1e-20))
    same = torch.allclose(embedded * scale, seen, rtol=2e-2, atol=1e-6 * float(seen.abs().max()))
    return scale if same else 1.0

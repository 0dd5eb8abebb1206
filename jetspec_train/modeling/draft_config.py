"""What a block draft head is: its fully resolved configuration, derived from the target's.

A head shares the target's embedding and lm_head, so its width and vocabulary are the target's; the
rest (heads, MLP width, rotary parameters) is taken over from the target unless the user says
otherwise. Nothing here imports torch: a wrong configuration is reported before anything is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DraftConfig

MASKS = ("causal", "bidirectional")
LAYOUTS = ("anchor", "in_place")
PARENTS = ("none", "vanilla", "gated")

# Rotary types whose frequencies do not depend on the length seen so far. The others would make the
# cached keys of a growing context disagree with each other; a draft then takes plain frequencies.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_PRESETS: dict[str, dict[str, Any]] = {
    # DFlash, arXiv 2602.06036: one bidirectional block, slot 0 holds the anchor and is discarded.
    "dflash": {"mask": "bidirectional", "layout": "in_place", "parent": "none", "clean_prefix": 0.0},
    # JetSpec, arXiv 2606.18394: the same with a causal block.
    "jetspec": {"mask": "causal", "layout": "in_place", "parent": "none", "clean_prefix": 0.0},
    # DSpark: bidirectional, every slot predicts, conditioned on the parent token ("Markov head").
    "dspark": {"mask": "bidirectional", "layout": "anchor", "parent": "vanilla", "clean_prefix": 0.0},
    "causal_markov": {"mask": "causal", "layout": "anchor", "parent": "vanilla", "clean_prefix": 0.25},
    # EAGLE-3, arXiv 2503.01840: autoregressive, one layer over three taps (modeling.eagle3).
    "eagle3": {"kind": "eagle3", "layers": 1, "taps": 3, "clean_prefix": 0.0},
}


def preset_settings(name: str) -> dict[str, Any]:
    """The ``DraftConfig`` fields that make this published family.

    Raises ``UserError`` for an unknown name.
    """
    if name not in _PRESETS:
        raise UserError(f"draft.preset={name!r} is unknown; known presets: {', '.join(_PRESETS)}.")
    return dict(_PRESETS[name])


@dataclass(frozen=True)
class DraftHeadConfig:
    """A resolved block draft head. Every field is plain JSON; the bundle stores it as it is.

    ``block`` counts slots. In the anchor layout each slot predicts; in the in-place layout slot 0
    repeats the anchor and the other ``block - 1`` predict.
    """

    layers: int
    block: int
    mask: str
    layout: str
    parent: str
    parent_rank: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]  # transformers' rope_parameters: rope_theta, rope_type, ...
    vocab_size: int
    target_hidden_size: int
    mask_token_id: int | None  # None: the MASK is a learned vector
    max_positions: int
    extra: dict[str, Any] = field(default_factory=dict)  # notes of a foreign format; never read by the head

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
        _check(self)

    @property
    def first_slot(self) -> int:
        """The first slot that predicts in a block without clean prefix."""
        return 0 if self.layout == "anchor" else 1

    @property
    def offset(self) -> int:
        """Slot ``j`` predicts the token at ``anchor + j + offset``."""
        return 1 if self.layout == "anchor" else 0

    @property
    def predictions(self) -> int:
        """Tokens drafted by one full block."""
        return self.block - self.first_slot

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["target_layer_ids"] = list(self.target_layer_ids)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DraftHeadConfig:
        """The inverse of ``to_dict``; raises ``UserError`` naming missing and unknown keys."""
        names = {f.name for f in fields(cls)}
        required = names - {"extra"}
        missing, unknown = sorted(required - data.keys()), sorted(data.keys() - names)
        if missing or unknown:
            raise UserError(
                f"A draft configuration cannot be read: missing keys {missing}, unknown keys {unknown}. "
                "It was written by another version of jetspec-train, or it is not a draft configuration."
            )
        return cls(**data)


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"draft.{key}={value!r} is not possible; allowed: {', '.join(allowed)}.")


def _check(config: DraftHeadConfig) -> None:
    _one_of("mask", config.mask, MASKS)
    _one_of("layout", config.layout, LAYOUTS)
    _one_of("parent", config.parent, PARENTS)
    for key in ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size"):
        if getattr(config, key) < 1:
            raise UserError(f"draft.{key}={getattr(config, key)} must be at least 1.")
    smallest = 1 if config.layout == "anchor" else 2
    if config.block < smallest:
        raise UserError(
            f"draft.block={config.block} leaves no slot that predicts: "
            f"draft.layout={config.layout} needs a block of at least {smallest}."
        )
    if config.parent != "none" and config.parent_rank < 1:
        raise UserError(
            f"draft.parent_rank={config.parent_rank} must be at least 1 with draft.parent={config.parent}; "
            "draft.parent=none switches the parent term off."
        )
    if config.heads % config.kv_heads:
        raise UserError(
            f"draft.heads={config.heads} is not a multiple of draft.kv_heads={config.kv_heads}; "
            "every key/value head serves the same number of query heads."
        )
    if config.head_dim % 2:
        raise UserError(f"draft.head_dim={config.head_dim} must be even: rotary positions turn pairs of features.")
    if not config.target_layer_ids:
        raise UserError("draft.target_layer_ids is empty; a draft head needs at least one target layer to read.")
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < config.vocab_size:
        raise UserError(
            f"draft.mask_token_id={config.mask_token_id} lies outside the target's vocabulary "
            f"(0 .. {config.vocab_size - 1})."
        )


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """``count`` target layers spread evenly from the second to the third last (as DFlash chooses them).

    A target with fewer layers is read at every layer that exists.
    """
    count = min(count, layers)
    first, last = (1, layers - 3) if layers - 3 >= count else (0, layers - 1)
    if count == 1:
        return (last,)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def draft_rope(rope: dict[str, Any] | None, rope_theta: float = 10000.0) -> dict[str, Any]:
    """The draft's rotary parameters from the target's.

    Models with one set per layer kind give those of full attention. Types whose frequencies change
    with the length (dynamic, longrope) and partial rotation become plain rotation with the same base.
    """
    rope = dict(rope or {"rope_type": "default", "rope_theta": rope_theta})
    per_kind = [value for value in rope.values() if isinstance(value, dict)]
    if per_kind:
        rope = dict(rope.get("full_attention") or per_kind[0])
    theta = float(rope.get("rope_theta") or rope_theta)
    if rope.get("rope_type", "default") not in _STATIC_ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    rope.pop("partial_rotary_factor", None)
    rope["rope_theta"] = theta
    rope.setdefault("rope_type", "default")
    return rope


def _value(hf_config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        value = getattr(hf_config, name, None)
        if value is not None:
            return value
    return default


def _target_layers(cfg: DraftConfig, layers: int) -> tuple[int, ...]:
    if cfg.target_layer_ids is None:
        if cfg.taps < 1:
            raise UserError(f"draft.taps={cfg.taps} must be at least 1.")
        return default_taps(layers, cfg.taps)
    ids = tuple(cfg.target_layer_ids)
    wrong = [i for i in ids if not 0 <= i < layers]
    if wrong or len(set(ids)) != len(ids):
        raise UserError(
            f"draft.target_layer_ids={list(ids)} must be different layers out of 0 .. {layers - 1} "
            f"(the target has {layers} layers; id i is the output of layer i)."
        )
    return ids


def resolve_draft_config(cfg: DraftConfig, hf_config: Any, *, mask_token_id: int | None) -> DraftHeadConfig:
    """Fill every open value of ``cfg`` from the target's transformers configuration.

    ``mask_token_id``: the reserved token that the target offers as MASK, None if it has none (the MASK
    is then a learned vector). Raises ``UserError`` on an impossible combination, naming key and value.
    """
    if hasattr(hf_config, "get_text_config"):
        hf_config = hf_config.get_text_config()
    width = int(hf_config.hidden_size)
    if cfg.hidden_size not in (None, width):
        raise UserError(
            f"draft.hidden_size={cfg.hidden_size} is not possible: the draft head shares embedding and lm_head "
            f"with the target, whose hidden size is {width}. Leave draft.hidden_size unset."
        )
    target_heads = int(hf_config.num_attention_heads)
    heads = cfg.heads or target_heads
    if cfg.kv_heads:
        kv_heads = cfg.kv_heads
    else:
        kv_heads = int(_value(hf_config, "num_key_value_heads", default=target_heads))
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
    head_dim = cfg.head_dim or int(_value(hf_config, "head_dim", default=width // target_heads))
    theta = float(_value(hf_config, "rope_theta", default=10000.0))
    return DraftHeadConfig(
        layers=cfg.layers,
        block=cfg.block,
        mask=cfg.mask,
        layout=cfg.layout,
        parent=cfg.parent,
        parent_rank=cfg.parent_rank if cfg.parent != "none" else 0,
        target_layer_ids=_target_layers(cfg, int(hf_config.num_hidden_layers)),
        hidden_size=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=cfg.intermediate_size or int(_value(hf_config, "intermediate_size", default=4 * width)),
        rms_norm_eps=float(_value(hf_config, "rms_norm_eps", default=1e-6)),
        rope=draft_rope(_value(hf_config, "rope_parameters"), theta),
        vocab_size=int(hf_config.vocab_size),
        target_hidden_size=width,
        mask_token_id=cfg.mask_token_id if cfg.mask_token_id is not None else mask_token_id,
        max_positions=int(_value(hf_config, "max_position_embeddings", default=2048)),
    )

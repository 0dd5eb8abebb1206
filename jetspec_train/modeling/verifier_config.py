"""What a verifier is: its fully resolved configuration, derived from the draft's and sized by the target's.

Nothing here imports torch: a wrong configuration is reported before anything is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import VerifierSettings
from jetspec_train.modeling.draft_config import DraftHeadConfig

# What the correctness head is told about a node as plain numbers; verifier.node_scalars makes them.
SCALARS = ("logit", "logprob", "path_logprob", "margin", "rank", "entropy", "depth")
# The acceptance rules whose outcome the heads predict (METHODS 4 and 7).
MODES = ("match_greedy", "match_sampled", "ratio")
_WIDTH_STEP = 32  # the MLP width is a multiple of it


@dataclass(frozen=True)
class VerifierConfig:
    """A resolved verifier. Every field is plain JSON; checkpoint and bundle store it as it is.

    ``block``: depths that a node can have. ``layers`` 0: an MLP over the node's own inputs, without attention.
    ``mode``: the acceptance rule that its probabilities speak of. ``detach``: whether its gradients stopped before
    the draft in training (no effect on what it computes).
    """

    draft_hidden_size: int
    target_hidden_size: int  # width of the target's embeddings
    parent_rank: int  # 0: the draft has no parent term
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    block: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_positions: int
    mode: str = "match_greedy"
    detach: bool = True
    scalars: tuple[str, ...] = SCALARS

    def __post_init__(self) -> None:
        object.__setattr__(self, "scalars", tuple(self.scalars))
        unknown = [name for name in self.scalars if name not in SCALARS]
        if unknown:
            raise UserError(f"A verifier configuration names unknown scalars {unknown}; known: {', '.join(SCALARS)}.")
        if self.mode not in MODES:
            raise UserError(f"verifier.mode={self.mode!r} is not possible; allowed: {', '.join(MODES)}.")
        if self.layers < 0:
            raise UserError(f"verifier.layers={self.layers} must be at least 0 (0: no attention).")
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise UserError(f"verifier.heads={self.heads} must be a multiple of verifier.kv_heads={self.kv_heads}.")
        if self.head_dim % 2:
            raise UserError(f"The verifier's head_dim={self.head_dim} must be even: rotary positions turn pairs.")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "scalars": list(self.scalars)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> VerifierConfig:
        """The inverse of ``to_dict``; raises ``UserError`` naming missing and unknown keys."""
        names = {f.name for f in fields(cls)}
        missing, unknown = sorted(names - data.keys()), sorted(data.keys() - names)
        if missing or unknown:
            raise UserError(
                f"A verifier configuration cannot be read: missing keys {missing}, unknown keys {unknown}. "
                "It was written by another version of jetspec-train, or it is not a verifier configuration."
            )
        return cls(**data)


def parameter_count(config: VerifierConfig) -> int:
    """Trained numbers of a verifier of this configuration, both heads together."""
    d, D = config.hidden_size, config.head_dim
    inputs = config.draft_hidden_size + config.parent_rank + config.target_hidden_size + len(config.scalars)
    mlp = 3 * d * config.intermediate_size + d
    attention = (
        2 * config.heads * D * d  # queries, output
        + 2 * config.kv_heads * D * d  # keys and values of the nodes
        + 2 * config.kv_heads * D * config.draft_hidden_size  # of the context
        + 2 * D  # norms of queries and keys
        + d
    )
    confidence = config.draft_hidden_size + config.parent_rank + 1
    body = config.layers * (attention + mlp) if config.layers else mlp
    return confidence + config.target_hidden_size + inputs * d + body + d + (d + 1) + len(config.scalars)


def resolve_verifier_config(
    settings: VerifierSettings, draft: DraftHeadConfig, *, target_parameters: int
) -> VerifierConfig:
    """Fill every open value: shapes of the draft, and an MLP width that makes the verifier ``settings.share`` of the
    target's parameters (between half of and eight times its own width).

    Raises ``UserError`` on an impossible combination, naming key and value.
    """
    width = settings.hidden_size or draft.hidden_size
    heads = settings.heads or draft.heads
    kv_heads = settings.kv_heads or (draft.kv_heads if heads % draft.kv_heads == 0 else heads)

    def with_mlp(size: int) -> VerifierConfig:
        return VerifierConfig(
            draft_hidden_size=draft.hidden_size,
            target_hidden_size=draft.target_hidden_size,
            parent_rank=draft.parent_rank if draft.parent != "none" else 0,
            layers=settings.layers,
            hidden_size=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=draft.head_dim,
            intermediate_size=size,
            block=draft.predictions,
            rms_norm_eps=draft.rms_norm_eps,
            rope=dict(draft.rope),
            max_positions=draft.max_positions,
            mode=settings.mode,
            detach=settings.detach,
        )

    if settings.intermediate_size:
        return with_mlp(settings.intermediate_size)
    smallest = max(_WIDTH_STEP, width // 2)
    left = settings.share * target_parameters - parameter_count(with_mlp(smallest))
    wanted = smallest + int(left / (3 * width * max(1, settings.layers)))
    rounded = -(-wanted // _WIDTH_STEP) * _WIDTH_STEP
    return with_mlp(min(max(smallest, rounded), 8 * width))

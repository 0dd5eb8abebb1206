"""What a user may state about a foreign draft that the folder itself leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ReadOptions:
    """``target_layer_ids``: the taps, counted from 0, for a form that does not write them. ``mask``: causal or
    bidirectional in-block attention. ``accept_keys``: unknown configuration keys that are harmless.
    ``norm_before_residual``: for an EAGLE-3 form that does not write it.
    """

    target_layer_ids: list[int] | None = None
    mask: str | None = None
    accept_keys: list[str] = field(default_factory=list)
    norm_before_residual: bool | None = None

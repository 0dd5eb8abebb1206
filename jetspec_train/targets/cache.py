"""Keys and values of the target, preallocated, with our own idea of what is committed.

A forward *stages* the N new tokens of each row behind the row's committed length; ``commit`` then says which of them
stay (the accepted path) and moves those to the front. Lengths are host integers: nothing here waits for a device.
Keys are returned as views of the buffer, never copied or concatenated.

Shapes: L layers, B rows, H key/value heads, C capacity in slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class LayerShape:
    """Key/value heads, key head size and value head size of one layer."""

    heads: int
    key_size: int
    value_size: int


class KVCache(Cache):
    """Preallocated keys and values; a drop-in ``cache`` for a transformers decoder.

    Layers of one shape live in one tensor [L, B, H, C, D] so that a compaction is one operation for all layers.

    Attributes:
        lengths: committed tokens per row.
        capacity: slots per row; grows by doubling.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * batch
        self.capacity = max(int(capacity), 1)
        self.staged = 0
        self._shapes = list(shapes)
        self._dtype = dtype
        self._device = torch.device(device)
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self._shapes):
            groups.setdefault(shape, []).append(layer)
        self._groups = [(shape, layers) for shape, layers in groups.items()]
        self._keys = [self._empty(shape.heads, shape.key_size, len(layers)) for shape, layers in self._groups]
        self._values = [self._empty(shape.heads, shape.value_size, len(layers)) for shape, layers in self._groups]
        self._index_layers()
        self._start: int | None = None
        self._rows_B1: torch.Tensor | None = None
        self._slots_BN: torch.Tensor | None = None

    def _empty(self, heads: int, size: int, layers: int) -> torch.Tensor:
        # Zeros, not empty: a masked slot is multiplied by zero, and zero times a stray NaN would be NaN.
        shape = (layers, len(self.lengths), heads, self.capacity, size)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _index_layers(self) -> None:
        self._layer_keys: list[torch.Tensor] = [torch.empty(0)] * len(self._shapes)
        self._layer_values: list[torch.Tensor] = [torch.empty(0)] * len(self._shapes)
        for (_, layers), keys, values in zip(self._groups, self._keys, self._values):
            for index, layer in enumerate(layers):
                self._layer_keys[layer], self._layer_values[layer] = keys[index], values[index]

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    @property
    def staged_keys(self) -> int:
        """Key slots a forward must look at: the longest row, staged tokens included."""
        return max(self.lengths) + self.staged

    def stage(self, new: int) -> None:
        """Reserve the next ``new`` slots of every row; what was staged before and not committed is forgotten."""
        self.staged = new
        self.reserve(self.staged_keys)
        first = self.lengths[0]
        if all(length == first for length in self.lengths):
            self._start = first
        else:
            self._start = None
            self._rows_B1 = torch.arange(self.batch, device=self._device)[:, None]
            starts_B1 = torch.tensor(self.lengths, device=self._device)[:, None]
            self._slots_BN = starts_B1 + torch.arange(new, device=self._device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the staged tokens of one layer, [B, H, N, D]; return views [B, H, S, D] up to the longest row."""
        keys, values = self._layer_keys[layer_idx], self._layer_values[layer_idx]
        end = self.staged_keys
        if self._start is not None:
            keys[:, :, self._start : end] = key_states
            values[:, :, self._start : end] = value_states
        else:
            # Two index tensors around a slice put the indexed axes first: [B, N, H, D].
            keys[self._rows_B1, :, self._slots_BN] = key_states.transpose(1, 2)
            values[self._rows_B1, :, self._slots_BN] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep, per row, the staged tokens with these indices (ascending, 0-based within the staged ones).

        The rest is dropped. Tokens that already lie where they belong (indices 0..m-1) are not copied.
        """
        if len(kept) != self.batch:
            raise ValueError(f"commit got {len(kept)} rows, the cache has {self.batch}")
        for row, indices in enumerate(kept):
            count = len(indices)
            if count and (indices[0] < 0 or indices[-1] >= self.staged):
                raise ValueError(f"row {row} commits token {indices[-1]} of {self.staged} staged ones")
            in_place = 0
            while in_place < count and indices[in_place] == in_place:
                in_place += 1
            start = self.lengths[row]
            if in_place < count:
                source = torch.tensor(list(indices[in_place:]), device=self._device) + start
                target = slice(start + in_place, start + count)
                for buffer in (*self._keys, *self._values):
                    # Indexing copies the sources first, so overlapping ranges are safe.
                    buffer[:, row, :, target] = buffer[:, row][:, :, source]
            self.lengths[row] = start + count
        self.staged = 0

    def commit_first(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[row]`` staged tokens of each row (a chain: prompt, or plain decoding)."""
        for row, count in enumerate(counts):
            if not 0 <= count <= self.staged:
                raise ValueError(f"row {row} commits {count} of {self.staged} staged tokens")
            self.lengths[row] += count
        self.staged = 0

    def truncate(self, row: int, length: int) -> None:
        """Forget the committed tokens of a row from ``length`` on."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"row {row} has {self.lengths[row]} tokens, cannot be cut to {length}")
        self.lengths[row] = length
        self.staged = 0

    def drop_rows(self, keep: Sequence[int]) -> None:
        """Keep only these rows, in this order; finished rows leave the batch."""
        if list(keep) != list(range(self.batch)):
            index = torch.tensor(list(keep), dtype=torch.long, device=self._device)
            self._keys = [buffer.index_select(1, index) for buffer in self._keys]
            self._values = [buffer.index_select(1, index) for buffer in self._values]
            self.lengths = [self.lengths[row] for row in keep]
            self._index_layers()
        self.staged = 0

    def copy_row_from(self, other: KVCache, source: int, row: int) -> None:
        """Overwrite a row with a row of another cache of the same target (a finished row's place is refilled)."""
        length = other.lengths[source]
        self.reserve(length)
        for mine, theirs in zip((*self._keys, *self._values), (*other._keys, *other._values)):
            mine[:, row, :, :length] = theirs[:, source, :, :length]
        self.lengths[row] = length
        self.staged = 0

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` tokens per row; grows by doubling, so that the copies stay rare."""
        if slots <= self.capacity:
            return
        used = max(self.lengths, default=0)
        self.capacity = max(slots, 2 * self.capacity)
        for buffers in (self._keys, self._values):
            for index, old in enumerate(buffers):
                buffers[index] = self._empty(old.shape[2], old.shape[4], old.shape[0])
                buffers[index][:, :, :, :used] = old[:, :, :, :used]
        self._index_layers()

    # What transformers may ask of a cache. Masks and positions are always handed to the model, so these only report.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self.lengths) + query_length, 0

    def __len__(self) -> int:
        return len(self._shapes)

    def __bool__(self) -> bool:
        return True

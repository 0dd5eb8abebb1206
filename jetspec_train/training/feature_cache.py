"""The target's taps and final states of every training sample, computed once and mapped from disk.

Online training repeats the target's forward in every epoch; where that is the larger part of a step (on a CPU) and
the data is small, storing what it gives pays from the second epoch on. One record per token - the concatenated taps,
then the post-final-norm hidden state, in the target's own dtype, so that nothing is rounded twice - without padding,
sample after sample, in shards of a bounded size. Price: ``(taps + 1) * width * itemsize`` bytes per token (SmolLM2-135M
with five taps in bf16: 6.9 kB), which is printed and checked against a limit and the free disk first (PITFALLS 16).

A shard is whole or absent, so a killed build goes on where it was. The folder belongs to one key (content, target,
taps, length); another key empties it. Ranks build disjoint shards and wait for files, never for each other's
messages, so that no collective can time out here.

Shapes: N samples, T tokens of a packed row, F concatenated taps, D width of the target.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import (
    atomic_json,
    make_folder,
    read_json,
    readable_bytes,
    require_free_space,
    writing,
)
from jetspec_train.targets.target import Target
from jetspec_train.training.ranks import Ranks
from jetspec_train.training.step import States, TrainBatch

SHARD_BYTES = 256 << 20
TOKENS_PER_FORWARD = 2048
KEY_FILE = "key.json"


@dataclass(frozen=True)
class CachedSamples:
    """What to run through the target: ``tokens[starts[i]:starts[i+1]]``, cut after ``longest`` tokens."""

    tokens: np.ndarray
    starts: np.ndarray  # int64 [N + 1]
    longest: int

    @property
    def lengths(self) -> np.ndarray:
        return np.minimum(np.diff(self.starts), self.longest)


class FeatureCache:
    """The stored states of ``samples``; ``build`` makes what is missing, ``states`` serves training."""

    def __init__(self, folder: Path, samples: CachedSamples, target: Target, taps: tuple[int, ...]) -> None:
        self.folder, self.samples, self.target, self.taps = folder, samples, target, taps
        self.features = len(taps) * target.hidden_size
        self.width = self.features + target.hidden_size
        self.bytes_per_token = self.width * target.dtype.itemsize
        lengths = samples.lengths
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)  # of each sample, in tokens
        per_shard = max(int(lengths.max()), SHARD_BYTES // self.bytes_per_token)
        first, self.firsts = 0, [0]  # first sample of each shard, and N
        while first < len(lengths):
            end = int(np.searchsorted(self.offsets, self.offsets[first] + per_shard, side="right")) - 1
            first = max(first + 1, end)
            self.firsts.append(first)
        identity = target.identity.to_dict()
        del identity["name"]  # a moved folder is the same target
        self.key = {
            "content": _content_hash(samples),
            "target": identity,
            "taps": list(taps),
            "dtype": str(target.dtype),
            "shard_bytes": SHARD_BYTES,
        }
        self._maps: dict[int, Tensor] = {}

    @property
    def total_bytes(self) -> int:
        return int(self.offsets[-1]) * self.bytes_per_token

    def build(self, ranks: Ranks, *, max_bytes: int, show_progress: bool = True) -> None:
        """Compute the shards that are missing. Raises UserError if the cache would be too large for the limit or the
        disk, before anything is computed."""
        size = readable_bytes(self.total_bytes)
        if self.total_bytes > max_bytes:
            raise UserError(
                f"train.features=cache needs {size} for {int(self.offsets[-1]):,} tokens, more than "
                f"train.features_max_bytes={max_bytes} ({readable_bytes(max_bytes)}). "
                f"Raise it, train on fewer tokens, or use train.features=online."
            )
        if ranks.is_main:
            self._claim()
        missing = [shard for shard in range(len(self.firsts) - 1) if not self._path(shard).exists()]
        if ranks.is_main:
            needed = sum(self._shard_tokens(shard) for shard in missing) * self.bytes_per_token
            require_free_space(self.folder, needed * 1.02, "The feature cache (train.features=cache)")
            state = f"{len(missing)} of {len(self.firsts) - 1} shards to compute" if missing else "complete"
            print(f"train: feature cache of {size} in {self.folder}, {state}", flush=True)
        self._wait_for(self.folder / KEY_FILE, ranks)
        mine = missing[ranks.rank :: ranks.world]
        with tqdm(
            total=sum(self._shard_tokens(shard) for shard in mine),
            desc="features",
            unit="token",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
            disable=not (show_progress and ranks.is_main and mine),
        ) as bar:
            for shard in mine:
                self._compute(shard, bar)
        for shard in range(len(self.firsts) - 1):
            self._wait_for(self._path(shard), ranks)

    def states(self) -> States:
        """Taps and final hidden states of packed rows, read from the shards (``TrainBatch.samples`` says which)."""

        def read(batch: TrainBatch, rows: slice) -> tuple[Tensor, Tensor]:
            members = batch.samples[rows]
            shape = (len(members), batch.tokens_BT.shape[1], self.width)
            packed = torch.zeros(shape, dtype=self.target.dtype)
            for line, samples in enumerate(members):
                at = 0
                for sample in samples.tolist():
                    record = self.sample(sample)
                    packed[line, at : at + len(record)] = record
                    at += len(record)
            packed = packed.to(self.target.device)
            return packed[..., : self.features], packed[..., self.features :]

        return read

    def sample(self, number: int) -> Tensor:
        """The stored records [length, F + D] of one sample."""
        shard = int(np.searchsorted(self.firsts, number, side="right")) - 1
        if shard not in self._maps:
            self._maps[shard] = self._open(shard)
        begin = int(self.offsets[number] - self.offsets[self.firsts[shard]])
        return self._maps[shard][begin : begin + int(self.offsets[number + 1] - self.offsets[number])]

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.bin"

    def _shard_tokens(self, shard: int) -> int:
        return int(self.offsets[self.firsts[shard + 1]] - self.offsets[self.firsts[shard]])

    def _claim(self) -> None:
        """Make the folder ours; one of other content is emptied (a cache can always be made again)."""
        path = self.folder / KEY_FILE
        if path.exists() and read_json(path, "The cache key") == self.key:
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink()
            return
        if self.folder.exists():
            if not path.exists() and any(self.folder.iterdir()):
                raise UserError(f"{self.folder} is not empty and not a feature cache; choose another folder.")
            shutil.rmtree(self.folder)
        make_folder(self.folder)
        atomic_json(path, self.key)

    def _wait_for(self, path: Path, ranks: Ranks) -> None:
        while not path.exists():
            if ranks.world == 1:
                raise RuntimeError(f"{path} disappeared")
            time.sleep(0.5)

    def _open(self, shard: int) -> Tensor:
        path, tokens = self._path(shard), self._shard_tokens(shard)
        expected = tokens * self.bytes_per_token
        if path.stat().st_size != expected:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes instead of {expected}. Delete {self.folder} to make it again."
            )
        count = tokens * self.width
        stored = torch.from_file(str(path), shared=False, size=count, dtype=self.target.dtype)
        return stored.view(tokens, self.width)

    def _compute(self, shard: int, bar: tqdm) -> None:
        first, end = self.firsts[shard], self.firsts[shard + 1]
        records = torch.empty((self._shard_tokens(shard), self.width), dtype=self.target.dtype)
        for group in _groups(self.samples.lengths[first:end], TOKENS_PER_FORWARD):
            numbers = [first + int(i) for i in group]
            for number, record in zip(numbers, self._forward(numbers), strict=True):
                begin = int(self.offsets[number] - self.offsets[first])
                records[begin : begin + len(record)] = record
                bar.update(len(record))
        path = self._path(shard)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with writing(path), open(temporary, "wb") as file:
            file.write(records.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def _forward(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """The records of some samples, from one forward with a row per sample."""
        lengths = self.samples.lengths[list(numbers)]
        shape = (len(numbers), int(lengths.max()))
        tokens_BT = torch.full(shape, self.target.pad_id)
        documents_BT = torch.full(shape, -1)
        for line, (number, length) in enumerate(zip(numbers, lengths.tolist(), strict=True)):
            begin = int(self.samples.starts[number])
            tokens_BT[line, :length] = torch.from_numpy(self.samples.tokens[begin : begin + length].astype(np.int64))
            documents_BT[line, :length] = 0
        positions_BT = torch.arange(shape[1]).expand(shape)
        output = self.target.forward_packed(tokens_BT, positions_BT, documents_BT, self.taps)
        assert output.features_BNF is not None
        together = torch.cat((output.features_BNF, output.hidden_BND), dim=-1).cpu()
        for line, length in enumerate(lengths.tolist()):
            yield together[line, :length]


def _content_hash(samples: CachedSamples) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(samples.tokens, dtype=np.int32).data)
    digest.update(np.ascontiguousarray(samples.starts, dtype=np.int64).data)
    digest.update(str(samples.longest).encode())
    return digest.hexdigest()


def _groups(lengths: np.ndarray, tokens: int) -> Iterator[list[int]]:
    """Samples of similar length together, each group at most ``tokens`` with padding (or one long sample)."""
    group: list[int] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        if group and (len(group) + 1) * int(lengths[group[0]]) > tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group

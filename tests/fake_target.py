"""A target without a model: its answers are a pure function of the prompt, so that data tests take milliseconds.

``install(monkeypatch)`` puts it where the distill stage looks for the real one. It keeps the contract of
``generate_stream``: requests are pulled lazily, rows finish out of order, freed places are refilled at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import stable_hash

IDENTITY = {
    "name": "fake",
    "revision": "1",
    "config_hash": "c",
    "tokenizer_hash": "t",
    "template_hash": "p",
}
EOS = 2


class FakeChat:
    eos_ids = (EOS,)

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        if any("refuse me" in message["content"] for message in messages):
            raise UserError("the chat template of target 'fake' refuses this conversation")
        return [10 + byte for message in messages for byte in (message["role"][:1] + message["content"]).encode()]

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{token}" for token in tokens if token != EOS)


class FakeTarget:
    def __init__(self, max_positions: int = 4096, delay: float = 0.0) -> None:
        self.chat, self.max_positions, self.delay, self.dtype = FakeChat(), max_positions, delay, "float32"
        self.calls = 0


def answer(tokens: list[int], limit: int) -> list[int]:
    """Deterministic: 1 to 12 tokens and an end, cut at ``limit``. One prompt in ten is answered by the end alone."""
    digest = bytes.fromhex(stable_hash(list(tokens)))
    length = digest[0] % 12 if digest[1] % 10 else 0
    return [*(20 + byte for byte in digest[2 : 2 + length]), EOS][:limit]


def fake_generate_stream(target: FakeTarget, requests: Iterator[Any], *, batch_size: int, **_: Any) -> Iterator[Any]:
    running: list[list[Any]] = []
    exhausted = False
    while True:
        while not exhausted and len(running) < batch_size:
            request = next(requests, None)
            if request is None:
                exhausted = True
            else:
                target.calls += 1
                running.append([request, answer(request.tokens, request.max_new_tokens), 0])
        if not running:
            return
        if target.delay:
            time.sleep(target.delay)
        for row in running:
            row[2] += 1
        for row in [row for row in running if row[2] >= len(row[1])]:
            running.remove(row)
            tokens = row[1]
            yield SimpleNamespace(
                request=row[0],
                tokens=tokens,
                logprobs=[-0.5] * len(tokens),
                entropies=[1.0] * len(tokens),
                margins=[0.25] * len(tokens),
                finish_reason="stop" if tokens[-1] == EOS else "length",
            )


def install(monkeypatch: Any, target: FakeTarget | None = None) -> FakeTarget:
    """Let ``stages.distill`` use the fake; returns it."""
    import jetspec_train.targets.generation as generation
    import jetspec_train.targets.loading as loading

    target = target or FakeTarget()
    monkeypatch.setattr(loading, "load_target", lambda cfg, **_: target)
    monkeypatch.setattr(loading, "target_identity", lambda cfg: SimpleNamespace(to_dict=lambda: dict(IDENTITY)))
    monkeypatch.setattr(generation, "generate_stream", fake_generate_stream)
    return target

"""The frozen main model as every other room sees it: tokens in, hidden states and taps out.

Nothing here trains. A forward stages keys and values in our own ``KVCache`` and leaves the decision of what to keep to
the caller, so that a chain, a tree, a ragged batch and plain decoding are the same call.

Shapes: B rows, N new tokens per row, T packed length, D hidden size, F = taps x D, V vocabulary, S key slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.targets import masks
from jetspec_train.targets.attention import PLAN_ATTRIBUTE, AttentionPlan
from jetspec_train.targets.cache import KVCache
from jetspec_train.targets.chat import ChatTokenizer
from jetspec_train.targets.families import text_config, usable_positions
from jetspec_train.targets.inspection import inspect_model, scaled_logits
from jetspec_train.targets.masks import TreeMask
from jetspec_train.targets.packing import PackedLinear, can_pack, pack_linears, unpack_linears


@dataclass(frozen=True)
class TargetIdentity:
    """What a trained draft is bound to. Hashes are sha256 hex digests.

    Attributes:
        name: hub id, path or ``embedded:...`` as configured.
        revision: hub commit, or a fingerprint of local weights.
        config_hash: architecture as the model sees it, library versions and dtype left out.
        tokenizer_hash: vocabulary, merges and normalisation.
        template_hash: chat template with its options.
    """

    name: str
    revision: str
    config_hash: str
    tokenizer_hash: str
    template_hash: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class TargetOutput:
    """One forward.

    Attributes:
        hidden_BND: hidden state *after* the final norm; ``Target.logits`` turns it into logits.
        features_BNF: hidden states after the tapped layers, before the final norm, in the order of ``taps``; None
            without taps.
    """

    hidden_BND: torch.Tensor
    features_BNF: torch.Tensor | None


class Target:
    """A loaded, frozen causal language model. Built by ``loading.load_target``."""

    def __init__(self, model: Any, chat: ChatTokenizer, identity: TargetIdentity) -> None:
        model.eval().requires_grad_(False)
        facts = inspect_model(model, identity.name)
        config = text_config(model.config)
        self.model = model
        self.config = config
        self.chat = chat
        self.identity = identity
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = len(facts.layers)
        self.windows = facts.windows
        self.head = model.get_output_embeddings()
        self.embedding = model.get_input_embeddings()
        self.vocab_size: int = self.head.weight.shape[0]
        self.embedding_scale = facts.embedding_scale
        self.eos_ids: tuple[int, ...] = chat.eos_ids
        self.pad_id: int = chat.pad_id
        self.mask_token_id = chat.mask_token_id
        self.max_positions = usable_positions(model.config)
        self.dtype: torch.dtype = self.embedding.weight.dtype
        self.device: torch.device = self.embedding.weight.device
        self.parameters: int = sum(parameter.numel() for parameter in model.parameters())
        self._facts = facts
        self._plan = AttentionPlan()
        for module in facts.attention_modules:
            setattr(module, PLAN_ATTRIBUTE, self._plan)
        self._packed_head: PackedLinear | None = None
        self._distinct_windows = sorted(set(facts.windows), key=lambda window: window or 0)
        # The decoder insists on a mask argument; ours reach attention through the plan, so it gets a placeholder.
        self._placeholder = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        self._hooks: dict[int, Any] = {}
        self._tapped: dict[int, torch.Tensor] = {}
        self._pack()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for ``batch`` rows of at first ``capacity`` tokens each (it grows when needed)."""
        return KVCache(self._facts.shapes, batch, capacity, dtype=self.dtype, device=self.device)

    def check_length(self, tokens: int, what: str = "prompt") -> None:
        """Raises UserError if ``tokens`` leave no position for a further one."""
        if tokens >= self.max_positions:
            raise UserError(
                f"{what} of {tokens} tokens does not fit target {self.identity.name!r}, whose context is "
                f"{self.max_positions} tokens. Shorten it, or choose a target with a longer context."
            )

    @torch.no_grad()
    def forward(
        self,
        tokens_BN: torch.Tensor,
        *,
        cache: KVCache,
        positions_BN: torch.Tensor | None = None,
        mask: TreeMask | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Stage N new tokens per row behind the committed ones; the caller commits what it keeps.

        Without ``mask`` the new tokens are a plain continuation. Shorter rows are padded on the right: later tokens
        are never seen by earlier ones, so padding changes nothing - just do not commit it. ``positions_BN`` defaults
        to length + index (chain) or length + depth (tree).
        """
        tokens_BN = tokens_BN.to(self.device)
        batch, new = tokens_BN.shape
        if batch != cache.batch:
            raise ValueError(f"{batch} rows of tokens for a cache of {cache.batch} rows")
        cache.stage(new)
        keys = cache.staged_keys
        if positions_BN is None:
            positions_BN = self._positions(cache.lengths, new, mask)
        positions_BN = positions_BN.to(self.device)
        even = min(cache.lengths) == max(cache.lengths)
        causal = mask is None and even and keys == new
        sees_all = even and new == 1
        by_window: dict[int | None, torch.Tensor | None] = {}
        allowed_BNS: torch.Tensor | None = None
        full_B1NS: torch.Tensor | None = None
        for window in self._distinct_windows:
            limited = window is not None and window < keys
            if (causal or sees_all) and not limited:
                by_window[window] = None
                continue
            if allowed_BNS is None:
                allowed_BNS = masks.cached_mask(cache.lengths, new, keys, mask, self.device)
            if limited and window is not None:
                key_positions_BS = masks.key_positions(cache.lengths, positions_BN, keys)
                within_BNS = masks.within_window(allowed_BNS, positions_BN, key_positions_BS, window)
                by_window[window] = masks.additive(within_BNS, self.dtype)[:, None]
            else:
                if full_B1NS is None:
                    full_B1NS = masks.additive(allowed_BNS, self.dtype)[:, None]
                by_window[window] = full_B1NS
        return self._run(tokens_BN, positions_BN, by_window, causal, tuple(taps), cache)

    @torch.no_grad()
    def forward_packed(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        documents_BT: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Whole sequences without a cache; several documents may share a row.

        Args:
            positions_BT: position of each token within its document.
            documents_BT: int; tokens see earlier tokens of the same document only. -1: padding.
        """
        documents_BT, positions_BT = documents_BT.to(self.device), positions_BT.to(self.device)
        allowed_BTT = masks.packed_mask(documents_BT)
        by_window: dict[int | None, torch.Tensor | None] = {}
        for window in self._distinct_windows:
            within_BTT = allowed_BTT
            if window is not None and window < tokens_BT.shape[1]:
                within_BTT = masks.within_window(allowed_BTT, positions_BT, positions_BT, window)
            by_window[window] = masks.additive(within_BTT, self.dtype)[:, None]
        return self._run(tokens_BT.to(self.device), positions_BT, by_window, False, tuple(taps), None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] after the final norm -> [..., V], soft cap and scaling included. Gradients reach ``hidden``."""
        if self._packed_head is not None and not (torch.is_grad_enabled() and hidden.requires_grad):
            return scaled_logits(self.config, self._packed_head(hidden))
        return scaled_logits(self.config, self.head(hidden))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., D] as the first layer sees them (Gemma scales its embeddings)."""
        embedded = self.embedding(tokens.to(self.device))
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    @torch.no_grad()
    def _pack(self) -> None:
        """Lay the frozen weights out for the CPU, one layer on trial: a family may read its weights in its own way."""
        if not can_pack(self.head.weight):
            return
        tokens_BN = torch.tensor([[1, 2, 3]]) % self.vocab_size
        before = self.forward(tokens_BN, cache=self.new_cache(1, 3)).hidden_BND.float()
        trial = pack_linears(self._facts.layers[0])
        try:
            after = self.forward(tokens_BN, cache=self.new_cache(1, 3)).hidden_BND.float()
            same = torch.allclose(before, after, atol=0.05 * float(before.abs().max()), rtol=0.05)
        except (AttributeError, RuntimeError):
            same = False
        if not same:
            unpack_linears(trial)
            return
        del trial
        for layer in self._facts.layers[1:]:
            pack_linears(layer)  # one after another, so that plain and packed weights exist twice for one layer only
        self._packed_head = PackedLinear(self.head.weight, self.head.bias)

    def _positions(self, lengths: Sequence[int], new: int, mask: TreeMask | None) -> torch.Tensor:
        if mask is not None:
            return torch.from_numpy(mask.positions_BN(lengths))
        return torch.tensor(lengths)[:, None] + torch.arange(new)

    def _run(
        self,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        by_window: dict[int | None, torch.Tensor | None],
        causal: bool,
        taps: tuple[int, ...],
        cache: KVCache | None,
    ) -> TargetOutput:
        self._set_taps(taps)
        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            arguments[self._facts.cache_argument] = cache
        self._plan.open(by_window, causal)
        try:
            output = self._facts.decoder(
                input_ids=tokens_BN, attention_mask=self._placeholder, position_ids=positions_BN, **arguments
            )
            features = torch.cat([self._tapped[layer] for layer in taps], dim=-1) if taps else None
        finally:
            self._plan.close()
            self._tapped.clear()
        return TargetOutput(hidden_BND=output[0], features_BNF=features)

    def _set_taps(self, taps: tuple[int, ...]) -> None:
        """Hooks stay in place while the taps do not change; registering them anew costs more than calling them."""
        if set(taps) == self._hooks.keys():
            return
        for layer in taps:
            if not 0 <= layer < self.num_layers:
                raise UserError(
                    f"tap {layer} does not exist: target {self.identity.name!r} has decoder layers "
                    f"0 to {self.num_layers - 1} (draft.target_layer_ids)."
                )
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {layer: self._hook(layer) for layer in set(taps)}

    def _hook(self, layer: int) -> Any:
        def note(module: torch.nn.Module, args: tuple, output: Any) -> None:
            self._tapped[layer] = output[0] if isinstance(output, tuple) else output

        return self._facts.layers[layer].register_forward_hook(note)

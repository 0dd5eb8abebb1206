"""What the draft would say right now, and what the target makes of it: the verifier's training material (METHODS 4).

The text of a training block is the target's own, so along it the target's state is known without another forward. As
long as the draft's own choices agree with the text, its greedy chain *is* the text, the parent of every slot is the
text's token, and the label of slot k follows from the target's distribution at k. ``draft_candidates`` walks all blocks
at once, slot by slot, over the blocks still on the path, and ends a path where it must:

* where the token judged next would hang on one that was rejected: it has no label;
* where the path leaves the text although the target accepts it (the text is a sample, or two logits tie in bf16): the
  target's state there is unknown. The accepted slot keeps its label; nothing after it is judged. The rule looks at the
  past only, so that it does not bias the labels before it.

Besides the greedy chain each slot on the path offers its next choices ("siblings"): as nodes of a tree they are judged
too, and where the text takes one of them the path goes on through it, as a tree's would.

``rate_paths`` reads the same facts for paths that are given, such as stored negatives.

Shapes: B rows, T tokens, A blocks, R = B * A, K slots, S candidates of a slot (the first is the greedy or drawn one),
d / D width of the draft / target state, r rank of the parent term, V vocabulary, M blocks on the path, m rows of a
chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Candidates:
    """Judged nodes of the blocks, S per slot. What is not on a path is zero (``followed`` -1).

    labels: probability that the target accepts the token, given that its path was accepted. labelled: which nodes have
    one; nodes on a path that have none are there as ancestors only. followed: index of the candidate through which the
    path goes on. chain: the slots of the drafted chain up to and including its first rejected one; chain_labels: of
    their first candidate, as the confidence head must predict it before the token is known; path_weights: how often
    the path gets there (1, except under the ratio rule).
    """

    tokens_BAKS: Tensor  # int64
    logprobs_BAKS: Tensor  # nats, under the draft's distribution given the parent
    margins_BAKS: Tensor  # log-probability of the first choice minus the token's own
    ranks_BAKS: Tensor  # int64, number of tokens the draft likes better, at most 3
    entropies_BAK: Tensor  # nats, of the slot without the parent term
    parent_entropies_BAK: Tensor  # nats, given the parent; only where asked for
    leads_BAK: Tensor  # log-probability of the first choice minus that of the second
    on_path_BAK: Tensor  # bool: judged
    followed_BAK: Tensor  # int64
    labels_BAKS: Tensor  # in [0, 1]
    labelled_BAKS: Tensor  # bool
    chain_BAK: Tensor  # bool
    chain_labels_BAK: Tensor  # in [0, 1]
    path_weights_BAK: Tensor

    def path_logprobs(self) -> Tensor:
        """Log-probability of each candidate's whole path, its own token included: [B, A, K, S]."""
        taken_BAK1 = self.followed_BAK.clamp(min=0).unsqueeze(-1)
        own_BAK = self.logprobs_BAKS.gather(-1, taken_BAK1).squeeze(-1) * (self.followed_BAK >= 0)
        before_BAK = own_BAK.cumsum(-1) - own_BAK
        return before_BAK.unsqueeze(-1) + self.logprobs_BAKS

    def ancestors(self) -> Tensor:
        """Ancestors-or-self of the nodes in the order of slots and candidates: bool [B, A, K * S, K * S]."""
        B, A, K, S = self.tokens_BAKS.shape
        candidate_S = torch.arange(S, device=self.tokens_BAKS.device)
        through_BAKS = self.followed_BAK.unsqueeze(-1) == candidate_S
        earlier_KK = torch.ones(K, K, dtype=torch.bool, device=candidate_S.device).tril(-1)
        above = earlier_KK[:, None, :, None] & through_BAKS[:, :, None, None]
        itself = torch.eye(K * S, dtype=torch.bool, device=candidate_S.device)
        return above.expand(B, A, K, S, K, S).reshape(B, A, K * S, K * S) | itself


@dataclass(frozen=True)
class Rule:
    """How a token is accepted, and how many are judged per slot.

    *match_greedy*: accepted if it is the target's argmax. *match_sampled*: with probability p_t(x); the text must be a
    sample of the target, so that a path goes on exactly as often as it is accepted. *ratio*: the token is drawn from
    the draft and accepted with min(1, p_t / p_d); the chain's label is sum_v min(p_t, p_d); a prefix of the text counts
    by prod min(1, p_d / p_t), the chance that it was drafted and accepted over the chance that it is the text.

    siblings: choices judged beside the first; none under the ratio rule. process: logits -> log-probabilities [m, V] of
    the sampled rules (temperature and filters); None: log-softmax. baselines: also fill ``parent_entropies``.
    """

    mode: str = "match_greedy"
    siblings: int = 2
    process: Logits | None = None
    baselines: bool = False

    def logprobs(self, logits_mV: Tensor) -> Tensor:
        return torch.log_softmax(logits_mV, dim=-1) if self.process is None else self.process(logits_mV)

    @property
    def width(self) -> int:
        """S: nodes per slot (ratio: the drawn token, and the text's own as an ancestor)."""
        return 2 if self.mode == "ratio" else 1 + self.siblings


@torch.no_grad()
def draft_candidates(
    hidden_BAKd: Tensor,
    parent_state_BAKr: Tensor | None,
    parent_weight_Vr: Tensor | None,
    *,
    labels_BAK: Tensor,
    valid_BAK: Tensor,
    judged_BA: Tensor,
    target_hidden_BTD: Tensor,
    sources_BAK: Tensor,
    draft_logits: Logits,
    target_logits: Logits,
    target_choice_BAK: Tensor | None = None,
    draws_BAK: Tensor | None = None,
    rule: Rule | None = None,
    chunk_rows: int = 256,
) -> Candidates:
    """Draft, judge and label the blocks of ``judged_BA``; no gradient.

    ``hidden``, ``parent_state``: the draft's forward on the text, with the text's parents. ``labels``, ``valid``,
    ``sources``: of ``modeling.blocks.Blocks`` without clean prefix. ``target_choice``: the target's argmax where it is
    known already (from the draft loss), -1 elsewhere. ``draws``: uniform numbers, for the ratio rule.
    """
    rule = rule or Rule()
    B, A, K = labels_BAK.shape
    found = _nothing(B * A, K, rule.width, hidden_BAKd)
    flat = {name: value.flatten(0, 1) for name, value in (("text", labels_BAK), ("source", sources_BAK))}
    hidden_RKd, valid_RK = hidden_BAKd.flatten(0, 1), valid_BAK.flatten(0, 1)
    state_RKr = None if parent_state_BAKr is None else parent_state_BAKr.flatten(0, 1)
    choice_RK = torch.full_like(flat["text"], -1) if target_choice_BAK is None else target_choice_BAK.flatten(0, 1)
    draws_RK = None if draws_BAK is None else draws_BAK.flatten(0, 1)

    path_R = judged_BA.flatten().clone()
    chain_R, weight_R = path_R.clone(), torch.ones_like(found["path_weights_BAK"][:, 0])
    for slot in range(K):
        live_M = (path_R & valid_RK[:, slot]).nonzero().squeeze(-1)
        # A path ends with the text; before the first predicting slot it has not begun.
        path_R &= valid_RK[:, slot] | (valid_RK[:, :slot].sum(-1) == 0)
        if not len(live_M):
            continue
        for near_m in live_M.split(chunk_rows):
            states_mD = target_hidden_BTD[near_m // A, flat["source"][near_m, slot]]
            rows = _Rows(
                plain=draft_logits(hidden_RKd[near_m, slot].to(target_hidden_BTD.dtype)),
                bias=_bias(state_RKr, parent_weight_Vr, near_m, slot),
                text=flat["text"][near_m, slot],
                draw=None if draws_RK is None else draws_RK[near_m, slot],
            )
            if rule.mode == "match_greedy":
                rows.choice = _choices(choice_RK[near_m, slot], rows.text, states_mD, target_logits)
            else:
                rows.target = target_logits(states_mD)
            for name, values in _by_pieces(rows, rule).items():
                found[name][near_m, slot] = values.to(found[name].dtype)
        found["on_path_BAK"][live_M, slot] = True
        found["chain_BAK"][live_M, slot] = chain_R[live_M]
        found["path_weights_BAK"][live_M, slot] = weight_R[live_M]
        followed_M = found["followed_BAK"][live_M, slot]
        path_R[live_M] = followed_M >= 0
        chain_R[live_M] &= followed_M == (1 if rule.mode == "ratio" else 0)
        weight_R[live_M] *= found["_share"][live_M, slot]
    return Candidates(**{f.name: found[f.name].unflatten(0, (B, A)) for f in fields(Candidates)})


@torch.no_grad()
def rate_paths(
    hidden_BAKd: Tensor,
    parent_state_BAKr: Tensor | None,
    parent_weight_Vr: Tensor | None,
    *,
    tokens_BAK: Tensor,
    labels_BAK: Tensor,
    labelled_BAK: Tensor,
    draft_logits: Logits,
    logits_dtype: torch.dtype,
    chunk_rows: int = 256,
) -> Candidates:
    """Given paths, one token per slot, as candidates (S = 1) with the draft's opinion of each; no gradient.

    ``parent_state``: of each slot's own parent on the path. ``labels``: 1 where the target accepts the token given its
    path; ``labelled``: bool, a contiguous run from the first predicting slot to the first rejected token at most.
    """
    B, A, K = tokens_BAK.shape
    found = _nothing(B * A, K, 1, hidden_BAKd)
    rule = Rule(siblings=0)
    state_RKr = None if parent_state_BAKr is None else parent_state_BAKr.flatten(0, 1)
    where_M2 = labelled_BAK.flatten(0, 1).nonzero()
    tokens_RK, hidden_RKd = tokens_BAK.flatten(0, 1), hidden_BAKd.flatten(0, 1)
    for near_m2 in where_M2.split(chunk_rows) if len(where_M2) else ():
        block_m, slot_m = near_m2.unbind(-1)
        token_m = tokens_RK[block_m, slot_m]
        rows = _Rows(
            plain=draft_logits(hidden_RKd[block_m, slot_m].to(logits_dtype)),
            bias=_bias(state_RKr, parent_weight_Vr, block_m, slot_m),
            text=token_m,
            choice=token_m,
            given=token_m,
        )
        for name, values in _by_pieces(rows, rule).items():
            found[name][block_m, slot_m] = values.to(found[name].dtype)
    made = {f.name: found[f.name].unflatten(0, (B, A)) for f in fields(Candidates)}
    labels = labels_BAK.to(found["labels_BAKS"].dtype) * labelled_BAK
    made |= {"labels_BAKS": labels.unsqueeze(-1), "labelled_BAKS": labelled_BAK.unsqueeze(-1)}
    made |= {"on_path_BAK": labelled_BAK, "followed_BAK": torch.where(labelled_BAK, 0, -1)}
    made["path_weights_BAK"] = labelled_BAK.to(labels.dtype)
    return Candidates(**made)


@dataclass
class _Rows:
    """Logits and tokens of m slots. ``plain``: U_k; ``bias``: the parent term; ``given``: judge this token alone."""

    plain: Tensor
    bias: Tensor | None
    text: Tensor
    choice: Tensor | None = None
    draw: Tensor | None = None
    given: Tensor | None = None
    target: Tensor | None = None

    def piece(self, part: slice) -> _Rows:
        cut = {f.name: getattr(self, f.name) for f in fields(self)}
        return _Rows(**{name: None if x is None else x[part] for name, x in cut.items()})  # type: ignore[arg-type]


def _bias(state_RKr: Tensor | None, weight_Vr: Tensor | None, block: Tensor, slot: int | Tensor) -> Tensor | None:
    if state_RKr is None or weight_Vr is None:
        return None
    return state_RKr[block, slot].to(weight_Vr.dtype) @ weight_Vr.t()


def _choices(known_m: Tensor, text_m: Tensor, states_mD: Tensor, target_logits: Logits) -> Tensor:
    """The target's argmax, computed where it is not known (-1). The text nearly always is it, which a maximum shows; an
    argmax over the vocabulary costs ten times as much."""
    choice_m = known_m.clone()
    unknown = (known_m < 0).nonzero().squeeze(-1)
    if len(unknown):
        logits_uV = target_logits(states_mD[unknown])
        text_u = text_m[unknown]
        is_text_u = logits_uV.gather(-1, text_u.unsqueeze(-1)).squeeze(-1) == logits_uV.amax(-1)
        choice_u = text_u.clone()
        other = (~is_text_u).nonzero().squeeze(-1)
        choice_u[other] = logits_uV[other].float().argmax(-1)
        choice_m[unknown] = choice_u
    return choice_m


def _by_pieces(rows: _Rows, rule: Rule) -> dict[str, Tensor]:
    """``_judge`` on as many rows at a time as a CPU's cache holds (see objectives.draft_loss)."""
    count, vocabulary = rows.plain.shape
    size = max(1, min(count, 800_000 // vocabulary)) if rows.plain.device.type == "cpu" else count
    made = [_judge(rows.piece(slice(first, first + size)), rule) for first in range(0, count, size)]
    return {name: torch.cat([piece[name] for piece in made]) for name in made[0]}


def _judge(rows: _Rows, rule: Rule) -> dict[str, Tensor]:
    """Candidates of m slots, the draft's opinion of them, and their labels, by the names of ``Candidates``."""
    wide = torch.promote_types(rows.plain.dtype, torch.float32)
    plain_mV = rows.plain.to(wide)
    logits_mV = plain_mV if rows.bias is None else plain_mV + rows.bias
    if rule.mode == "ratio":
        logits_mV = rule.logprobs(logits_mV)
    best_mS, top_mS = largest(logits_mV, max(2, rule.width))
    total_m1, parent_entropy_m = _log_sum(logits_mV, with_entropy=rule.baselines)
    if rows.given is not None:
        tokens_mS = rows.given.unsqueeze(-1)
    elif rule.mode == "ratio":
        assert rows.draw is not None, "the ratio rule draws its tokens: pass draws"
        reached_mV = logits_mV.double().exp().cumsum(-1)
        drawn_m1 = torch.searchsorted(reached_mV, rows.draw.unsqueeze(-1) * reached_mV[:, -1:], right=True)
        tokens_mS = torch.cat((drawn_m1.clamp(max=logits_mV.shape[-1] - 1), rows.text.unsqueeze(-1)), dim=-1)
    else:
        tokens_mS = top_mS[:, : rule.width]
    value_mS = logits_mV.gather(-1, tokens_mS)
    if rows.given is not None or rule.mode == "ratio":
        rank_mS = (logits_mV.unsqueeze(1) > value_mS.unsqueeze(-1)).sum(-1)
    else:
        rank_mS = torch.arange(rule.width, device=tokens_mS.device).expand(tokens_mS.shape)
    made = {
        "tokens_BAKS": tokens_mS,
        "logprobs_BAKS": (value_mS - total_m1).clamp(min=-1e4),
        "margins_BAKS": (best_mS[:, :1] - value_mS).clamp(max=1e4),
        "ranks_BAKS": rank_mS.clamp(max=3),
        "entropies_BAK": _log_sum(plain_mV, with_entropy=True)[1],
        "parent_entropies_BAK": parent_entropy_m,
        "leads_BAK": (best_mS[:, 0] - best_mS[:, 1]).clamp(max=1e4),
    }
    return made | _accept(rows, rule, logits_mV - total_m1 if rule.mode == "ratio" else logits_mV, tokens_mS)


def largest(values_mV: Tensor, count: int, chunk: int = 192) -> tuple[Tensor, Tensor]:
    """``topk`` over a vocabulary, in a tenth of its time on a CPU: the ``count`` largest entries lie in the chunks with
    the ``count`` largest maxima, and a maximum is vectorised where a selection is not."""
    rows, vocabulary = values_mV.shape
    chunks = vocabulary // chunk
    if values_mV.device.type != "cpu" or chunks < 4 * count:
        return values_mV.topk(count, dim=-1)
    whole = chunks * chunk
    chunked = values_mV[:, :whole].reshape(rows, chunks, chunk)
    best_mC = chunked.amax(dim=-1).topk(count, dim=-1).indices
    places = (best_mC.unsqueeze(-1) * chunk + torch.arange(chunk, device=values_mV.device)).flatten(1)
    rest = torch.arange(whole, vocabulary, device=values_mV.device).expand(rows, -1)
    places = torch.cat((places, rest), dim=-1)
    best_mS, index_mS = values_mV.gather(-1, places).topk(count, dim=-1)
    return best_mS, places.gather(-1, index_mS)


def _accept(rows: _Rows, rule: Rule, draft_mV: Tensor, tokens_mS: Tensor) -> dict[str, Tensor]:
    """Labels of the candidates, and through which of them the path goes on."""
    is_text_mS = tokens_mS == rows.text.unsqueeze(-1)
    labelled_mS, share_m = torch.ones_like(is_text_mS), draft_mV.new_ones(len(draft_mV))
    if rule.mode == "match_greedy":
        assert rows.choice is not None
        label_mS = (tokens_mS == rows.choice.unsqueeze(-1)).to(draft_mV.dtype)
        chain_label_m = label_mS[:, 0]
        is_text_mS = is_text_mS & (rows.text == rows.choice).unsqueeze(-1)
    else:
        assert rows.target is not None
        target_mV = rule.logprobs(rows.target.to(draft_mV.dtype)).exp().to(draft_mV.dtype)
        label_mS = target_mV.gather(-1, tokens_mS)
        chain_label_m = label_mS[:, 0]
        if rule.mode == "ratio":
            chances_mV = draft_mV.exp()
            label_mS = (label_mS / chances_mV.gather(-1, tokens_mS).clamp(min=1e-30)).clamp(max=1.0)
            chain_label_m = torch.minimum(target_mV, chances_mV).sum(-1)
            of_text_m2 = torch.stack((chances_mV, target_mV)).gather(-1, rows.text.expand(2, -1).unsqueeze(-1))[..., 0]
            share_m = (of_text_m2[0] / of_text_m2[1].clamp(min=1e-30)).clamp(max=1.0)
            labelled_mS[:, 1], is_text_mS[:, 0] = False, False  # the path goes through the text's own node
    return {
        "labels_BAKS": label_mS,
        "labelled_BAKS": labelled_mS,
        "followed_BAK": torch.where(is_text_mS.any(-1), is_text_mS.int().argmax(-1), -1),
        "chain_labels_BAK": chain_label_m,
        "_share": share_m,
    }


def _log_sum(logits_mV: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-sum-exp [m, 1] and, if asked for, the entropy of softmax(logits) [m], nats: log-sum-exp minus mean logit."""
    p_mV = torch.softmax(logits_mV, dim=-1)
    log_sum_m1 = logits_mV.amax(dim=-1, keepdim=True) - p_mV.amax(dim=-1, keepdim=True).log()
    if not with_entropy:
        return log_sum_m1, log_sum_m1.new_zeros(len(log_sum_m1))
    mean_m = torch.linalg.vecdot(p_mV, logits_mV)
    if not bool(mean_m.isfinite().all()):  # a filtered token: zero times minus infinity
        mean_m = torch.linalg.vecdot(p_mV, logits_mV.clamp(min=-1e4))
    return log_sum_m1, log_sum_m1.squeeze(-1) - mean_m


def _nothing(blocks: int, slots: int, width: int, like: Tensor) -> dict[str, Tensor]:
    """Empty results [R, K, ...] under the names of ``Candidates``."""
    numbers = torch.promote_types(like.dtype, torch.float32)
    kinds = {"tokens_BAKS": torch.int64, "ranks_BAKS": torch.int64, "followed_BAK": torch.int64}
    kinds |= {"on_path_BAK": torch.bool, "labelled_BAKS": torch.bool, "chain_BAK": torch.bool}
    made = {}
    for name in (*(f.name for f in fields(Candidates)), "_share"):
        shape = (blocks, slots, width) if name.endswith("S") else (blocks, slots)
        made[name] = torch.zeros(shape, dtype=kinds.get(name, numbers), device=like.device)
    made["followed_BAK"] -= 1
    return made

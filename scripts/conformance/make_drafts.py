"""Small drafts for the conformance check: a few minutes of training, so that servers have something to accept.

Random drafts are never accepted, and a check that accepts nothing proves nothing. Trains the four block presets and an
EAGLE-3 draft on the target's own answers, over features computed once, and exports every form that can express each.

    python scripts/conformance/make_drafts.py --out FOLDER [--steps 150] [--rows 96]
        [--answers ANSWERS.jsonl --questions QUESTIONS.jsonl --suffix TEXT]

``--answers``: lines with ``row`` (line number in the questions file) and ``answer_tokens``. Without it the target
answers the procedural recipe's prompts first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jetspec_train.artifacts.foreign import Draft, export_forms
from jetspec_train.config import DraftConfig, RecipeConfig, SamplingConfig, TargetConfig
from jetspec_train.decoding.foreign import target_facts
from jetspec_train.modeling.draft_config import preset_settings, resolve_draft_config
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
from jetspec_train.targets.loading import load_target
from jetspec_train.training.step import DraftStep, StepSettings, TrainBatch, plan_step

LENGTH = 384
PLACES = 64  # places of a batch whose next token an EAGLE-3 step is trained on
FORMS = {
    "dflash": ["vllm", "dflash"],
    "jetspec": ["vllm", "jetspec"],
    "dspark": ["vllm", "deepspec"],
    "causal_markov": ["vllm"],
    "eagle3": ["vllm", "eagle3"],
    "eagle3_reduced": ["vllm", "eagle3"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default=TargetConfig().name)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=96, help="packed rows of 384 tokens to train on")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--suffix", default="")
    parser.add_argument("--only", nargs="*", default=list(FORMS))
    options = parser.parse_args()
    torch.manual_seed(0)
    target = load_target(TargetConfig(name=options.target))
    if options.answers is None:
        pairs = answered_by_the_target(target)
    else:
        pairs = answers_of_files(target, options.answers, options.questions, options.suffix)
    data = pack(pairs, options.rows)
    taps = resolve_draft_config(DraftConfig(), target.config, mask_token_id=target.mask_token_id).target_layer_ids
    features, hidden = [], []
    for row in range(len(data.tokens_BT)):
        part = slice(row, row + 1)
        output = target.forward_packed(data.tokens_BT[part], data.positions_BT[part], data.documents_BT[part], taps)
        features.append(output.features_BNF)
        hidden.append(output.hidden_BND)
    states = (torch.cat(features), torch.cat(hidden))
    print(f"{len(data.tokens_BT)} rows, {int(data.supervised_BT.sum())} answer tokens", flush=True)
    for name in options.only:
        begun = time.monotonic()
        if name.startswith("eagle3"):
            draft = train_eagle3(target, data, states, taps, options.steps, reduced=name.endswith("reduced"))
        else:
            draft = train_block(name, target, data, states, options.steps)
        export_forms(
            draft,
            FORMS[name],
            options.out / name,
            target_facts(target),
            lambda: {"embed_tokens.weight": target.embedding.weight, "lm_head.weight": target.head.weight},
        )
        print(f"{name}: {options.steps} steps in {time.monotonic() - begun:.0f} s", flush=True)


def answers_of_files(target: Any, answers: Path, questions: Path, suffix: str) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt tokens, answer tokens) of a file of answers."""
    lines = questions.read_text("utf-8").splitlines()
    for line in answers.read_text("utf-8").splitlines():
        record = json.loads(line)
        question = json.loads(lines[record["row"]])["question"] + suffix
        yield target.chat.render([{"role": "user", "content": question}]), record["answer_tokens"]


def answered_by_the_target(target: Any) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt tokens, answer tokens) of the procedural recipe, greedy."""
    from jetspec_train.data.prompts import iterate_prompts
    from jetspec_train.data.recipes import load_recipe
    from jetspec_train.targets.generation import Request, generate_stream

    prompts = iterate_prompts(load_recipe(RecipeConfig()), ("train",))
    requests = (Request(tokens=target.chat.render(prompt.messages), max_new_tokens=160) for prompt in prompts)
    for done in generate_stream(target, requests, batch_size=32, sampling=SamplingConfig()):
        yield list(done.request.tokens), done.tokens


def pack(pairs: Iterator[tuple[list[int], list[int]]], rows: int) -> TrainBatch:
    """The first ``rows`` packed rows of ``LENGTH`` tokens, first come first packed; longer samples are cropped."""
    packed: list[list[tuple[list[int], int]]] = [[]]
    room = LENGTH
    for prompt, answer in pairs:
        sample = (prompt + answer)[:LENGTH]
        if len(sample) > room:
            if len(packed) == rows:
                break
            packed.append([])
            room = LENGTH
        packed[-1].append((sample, len(prompt)))
        room -= len(sample)
    shape = (len(packed), LENGTH)
    tokens, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    documents, supervised = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
    for row, samples in enumerate(packed):
        start = 0
        for number, (sample, prompt) in enumerate(samples):
            end = start + len(sample)
            tokens[row, start:end], documents[row, start:end] = torch.tensor(sample), number
            positions[row, start:end] = torch.arange(len(sample))
            supervised[row, start + prompt : end] = True
            start = end
    return TrainBatch(tokens, positions, documents, supervised, samples=[])


def rows_of(data: TrainBatch, rows: torch.Tensor) -> TrainBatch:
    return TrainBatch(
        data.tokens_BT[rows], data.positions_BT[rows], data.documents_BT[rows], data.supervised_BT[rows], samples=[]
    )


def batches(count: int, steps: int, size: int = 3) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(count, generator=generator)
        yield order[:size]
        order = order[size:]


def optimise(module: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=steps, pct_start=0.1)


def train_block(name: str, target: Any, data: TrainBatch, states: tuple[Any, Any], steps: int) -> Draft:
    """One of the block presets, through the project's own training step."""
    chosen = {**preset_settings(name), "preset": name, "layers": 2, "block": 8}
    config = resolve_draft_config(DraftConfig(**chosen), target.config, mask_token_id=target.mask_token_id)
    settings = StepSettings(
        block=config.block,
        layout=config.layout,
        anchors=10,
        clean_prefix=chosen["clean_prefix"],
        gamma=4.0,
        ce=1.0,
        l1=0.0,
        kl=0.0,
        autocast=torch.bfloat16 if target.dtype == torch.bfloat16 else None,
    )
    torch.manual_seed(0)
    head = DraftHead(config)
    module = DraftStep(head, target, settings)
    optimizer, scheduler = optimise(module, steps)
    for step, rows in enumerate(batches(len(data.tokens_BT), steps)):
        batch = rows_of(data, rows)
        plan = plan_step(batch, settings, seed=0, step=step)
        blocks, weights = plan.rows(slice(0, len(rows)))
        result = module(blocks, weights, batch.text(rows), states[0][rows], states[1][rows], plan.total_weight)
        result.loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step + 1 == steps:
            print(f"  {name} step {step}: loss {result.loss.item():.3f}", flush=True)
    return Draft("block", config.to_dict(), head.state_dict(), provenance={"made_by": "scripts/conformance"})


def train_eagle3(
    target: Any, data: TrainBatch, states: tuple[Any, Any], taps: tuple[int, ...], steps: int, *, reduced: bool
) -> Draft:
    """EAGLE-3 by training-time test of three steps, on the first, middle and last of the taps computed already."""
    facts, count = target_facts(target), target.hidden_size
    chosen = [0, len(taps) // 2, len(taps) - 1]
    features = torch.cat([states[0][..., i * count : (i + 1) * count] for i in chosen], dim=-1)
    block = resolve_draft_config(DraftConfig(), target.config, mask_token_id=target.mask_token_id)
    kept = draft_vocabulary(data, facts.vocab_size, 8000) if reduced else None
    config = Eagle3Config(
        layers=1,
        hidden_size=count,
        target_hidden_size=count,
        heads=block.heads,
        kv_heads=block.kv_heads,
        head_dim=block.head_dim,
        intermediate_size=block.intermediate_size,
        rms_norm_eps=block.rms_norm_eps,
        rope=block.rope,
        vocab_size=facts.vocab_size,
        draft_vocab_size=facts.vocab_size if kept is None else len(kept),
        target_layer_ids=tuple(taps[i] for i in chosen),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        qk_norm=False,
        max_positions=block.max_positions,
    )
    torch.manual_seed(0)
    head = Eagle3Head(config)
    with torch.no_grad():
        weight = target.head.weight.float()
        head.lm_head.weight.copy_(weight if kept is None else weight[kept])
        if kept is not None:
            head.d2t = kept - torch.arange(len(kept))
    head.lm_head.requires_grad_(False)
    optimizer, scheduler = optimise(head, steps)
    to_draft = torch.full((facts.vocab_size,), -100)
    to_draft[torch.arange(facts.vocab_size) if kept is None else kept] = torch.arange(config.draft_vocab_size)
    low = target.dtype == torch.bfloat16
    for step, rows in enumerate(batches(len(data.tokens_BT), steps)):
        batch = rows_of(data, rows)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = eagle3_loss(head, target, batch, features[rows], to_draft)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step + 1 == steps:
            print(f"  eagle3 step {step}: loss {loss.item():.3f}", flush=True)
    return Draft("eagle3", config.to_dict(), head.state_dict(), provenance={"made_by": "scripts/conformance"})


def draft_vocabulary(data: TrainBatch, size: int, wanted: int) -> torch.Tensor:
    """The most frequent tokens of the answers, ascending, filled up with the first ids."""
    counts = torch.bincount(data.tokens_BT[data.supervised_BT], minlength=size).double()
    counts -= torch.arange(size) * 1e-9
    return counts.topk(wanted).indices.sort().values


def eagle3_loss(
    head: Eagle3Head, target: Any, batch: TrainBatch, features: torch.Tensor, to_draft: torch.Tensor
) -> Any:
    """Cross-entropy of three training-time-test steps, weights 0.8^s.

    Input q joins state q with token q+1+s and predicts token q+2+s; at step s the state is the output of step s-1 at
    q-1, and input q sees the first-step inputs up to q-s and its own later-step ancestors on the diagonals.
    """
    batch_size, length = batch.tokens_BT.shape
    same = batch.documents_BT[:, :, None] == batch.documents_BT[:, None, :]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    states, past, loss = head.fuse(features), None, 0.0
    diagonals: list[torch.Tensor] = []
    places = torch.arange(length)
    for step in range(3):
        index = (places + 1 + step).clamp(max=length - 1)
        tokens = batch.tokens_BT[:, index]
        label_index = (places + 2 + step).clamp(max=length - 1)
        labels = to_draft[batch.tokens_BT[:, label_index]]
        inside = (places + 2 + step < length) & (batch.documents_BT[:, label_index] == batch.documents_BT)
        supervised = inside & batch.supervised_BT[:, label_index] & (batch.documents_BT >= 0)
        labels = labels.masked_fill(~supervised, -100)
        # rows are numbered by the place of the true state that a path starts from, so that the true inputs which a
        # path sees are those up to its own number, and each drafted one sees those of its own path alone
        own = torch.eye(length, dtype=torch.bool)[None].expand(batch_size, -1, -1)
        mask = torch.cat([same & earlier, *diagonals, *([own] if step else [])], dim=-1)
        if step:
            diagonals.append(own)
        hidden, states, new = head(target.embed(tokens), states, batch.positions_BT + step, past, mask)
        past = (
            new
            if past is None
            else [
                (torch.cat((old[0], keys), 2), torch.cat((old[1], values), 2)) for old, (keys, values) in zip(past, new)
            ]
        )
        # the head over the whole vocabulary is most of the work: a sample of the places is enough here
        chosen = (labels >= 0).flatten().nonzero().squeeze(-1)
        chosen = chosen[torch.randperm(len(chosen))[:PLACES]]
        logits = head.lm_head(hidden.flatten(0, 1)[chosen])
        loss = loss + 0.8**step * nn.functional.cross_entropy(logits.float(), labels.flatten()[chosen])
    return loss


if __name__ == "__main__":
    main()

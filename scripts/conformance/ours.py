"""What our own decoder does with each exported folder: the reference that other engines are compared with.

For every draft and prompt, in float32: the target's plain greedy text, and our chain walked along that text from anchor
to anchor, K drafted tokens each time, as vLLM walks (its last round may run past the end of the answer; so does this).

    python scripts/conformance/ours.py --drafts FOLDER --out ours.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from jetspec_train.config import DecodingConfig, TargetConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.foreign import foreign_drafter
from jetspec_train.targets.loading import load_target

QUESTIONS = (
    "Tom has 14 apples. He gives 5 to Ann and buys 9 more. How many apples does Tom have now?",
    "A train travels 60 miles per hour for 3 hours and then 40 miles per hour for 2 hours. How far does it travel?",
    "Write a short list of three things that one should take to the beach.",
    "What is the capital of France, and what is it known for?",
    "A shop sells pens at 2 dollars each. Mia buys 7 and pays with a 20 dollar bill. How much change does she get?",
)
NEW_TOKENS = 48
AHEAD = 12  # the last round of a chain looks past the end of the answer
EAGLE3_TOKENS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default=TargetConfig().name)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    options = parser.parse_args()
    target = load_target(TargetConfig(name=options.target), dtype="float32")
    prompts = [target.chat.render([{"role": "user", "content": question}]) for question in QUESTIONS[: options.prompts]]
    plain = Decoder(target, None, DecodingConfig(drafting=False))
    texts = [g.tokens for g in plain.generate(prompts, max_new_tokens=NEW_TOKENS + AHEAD)]
    whole = [i for i, text in enumerate(texts) if len(text) == NEW_TOKENS + AHEAD]
    prompts, texts = [prompts[i] for i in whole], [texts[i] for i in whole]
    print(f"{len(whole)} of {options.prompts} answers are longer than {NEW_TOKENS + AHEAD} tokens and are used")
    result: dict[str, Any] = {"prompts": prompts, "texts": [text[:NEW_TOKENS] for text in texts], "drafts": {}}
    for folder in sorted(path.parent for path in options.drafts.glob("*/*/config.json")):
        name = f"{folder.parent.name}/{folder.name}"
        drafter: Any = foreign_drafter(folder, target)
        width = getattr(drafter.config, "predictions", EAGLE3_TOKENS)
        settings = DecodingConfig(shape="chain", nodes=width, depth=width)
        decoded = Decoder(target, drafter, settings).generate(prompts, max_new_tokens=NEW_TOKENS)
        rounds = [walk(drafter, target, prompt, text, width, settings) for prompt, text in zip(prompts, texts)]
        result["drafts"][name] = {
            "width": width,
            "identical": [g.tokens for g in decoded] == result["texts"],
            "rounds": rounds,
            **counts(rounds, width),
        }
        facts = result["drafts"][name]
        print(f"{name}: width {width}, identical {facts['identical']}, accepted per position {facts['accepted']}")
    options.out.write_text(json.dumps(result))


@torch.inference_mode()
def walk(
    drafter: Any, target: Any, prompt: list[int], text: list[int], width: int, settings: DecodingConfig
) -> list[dict[str, Any]]:
    """Every round of a chain along the known text: {anchor, drafted, accepted}."""
    tokens = prompt + text
    tokens_1T = torch.tensor([tokens])
    features = target.forward_packed(
        tokens_1T, torch.arange(len(tokens))[None], torch.zeros_like(tokens_1T), drafter.taps
    ).features_BNF
    drafter.start(1, len(tokens), None)
    done, rounds = 0, []
    anchor = len(prompt)  # the first token comes from the prefill
    while anchor - len(prompt) + 1 < NEW_TOKENS:
        new = tokens[done:anchor]
        drafter.observe([new], features[:, done:anchor], [list(range(len(new)))])
        (tree,) = drafter.propose([tokens[anchor]], [width], settings)
        drafted = [int(token) for token in tree.tokens]
        follows = tokens[anchor + 1 : anchor + 1 + width]
        accepted = next((i for i, pair in enumerate(zip(drafted, follows)) if pair[0] != pair[1]), width)
        rounds.append({"anchor": anchor, "drafted": drafted, "accepted": accepted})
        done, anchor = anchor, anchor + accepted + 1
    return rounds


def counts(rounds: list[list[dict[str, Any]]], width: int) -> dict[str, Any]:
    """Rounds, and how many accepted each position."""
    every = [record["accepted"] for answer in rounds for record in answer]
    return {"drafts": len(every), "accepted": [sum(n > k for n in every) for k in range(width)]}


if __name__ == "__main__":
    main()

"""Runs one exported draft in vLLM on a CPU, float32, greedy; the text and the acceptance counters go to a JSON file.

Runs in vLLM's own environment and imports nothing of this project.

    python check_vllm.py --target FOLDER --draft FOLDER --reference ours.json --name jetspec/vllm --out result.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    reference = json.loads(options.reference.read_text())
    width = reference["drafts"][options.name]["width"]
    config = json.loads((Path(options.draft) / "config.json").read_text())
    inner = {"DFlashDraftModel": "dflash", "LlamaForCausalLMEagle3": "eagle3"}
    method = config.get("speculators_model_type") or inner[config["architectures"][0]]
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=options.target,
        speculative_config={"method": method, "model": options.draft, "num_speculative_tokens": width},
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    new_tokens = len(reference["texts"][0])
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    texts = [
        list(engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in reference["prompts"]
    ]
    found = {"drafts": 0, "accepted": [0] * width}
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)[:width]
    options.out.write_text(json.dumps({"method": method, "texts": texts, **found}))


if __name__ == "__main__":
    main()

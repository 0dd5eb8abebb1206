"""The stages by name. A stage's module is imported only when it is asked for, so that ``--help``
and configuration errors come at once.

Every module here has ``run(cfg) -> None`` and ``plan(cfg) -> dict`` (what would be done, without
doing it or loading anything heavy).
"""

from __future__ import annotations

import importlib
from types import ModuleType

STAGES = {
    "pipeline": "run the stages below that a trained draft needs, in order; finished ones are skipped",
    "distill": "let the target answer the recipe's prompts; writes run_dir/distill/samples-*.parquet",
    "select": "choose the answers worth training on within the budget; writes run_dir/select/summary.html",
    "negatives": "hard negatives for the verifier, judged by the target (bundle= mines); writes run_dir/negatives/",
    "train": "train the draft on those answers; writes run_dir/train/checkpoints/",
    "calibrate": "find out what the verifier's probabilities are worth; writes run_dir/calibrate/calibration.json",
    "export": "turn the best checkpoint into a bundle that loads by itself; writes run_dir/export/bundle/",
    "evaluate": "measure plain against speculative decoding; writes run_dir/evaluate/report.json and report.html",
    "adapt": "teach a bundle another domain: a small adapter that the decoder swaps; writes run_dir/adapt/",
    "generate": "answer a prompt (prompt=, prompt_file= or standard input) with a bundle, streaming",
    "import": "make a bundle of another project's draft (foreign.path=FOLDER); says what it assumed",
    "compare": "compare evaluation reports: reports=[a.json,b.json]",
    "status": "show how far each stage of run_dir has come",
    "doctor": "show what this machine can do and what this configuration will cost",
}


def load_stage(name: str) -> ModuleType:
    """Import the module of a stage; ``name`` must be a key of STAGES."""
    return importlib.import_module(f"jetspec_train.stages.{name}")

"""draft.kind=standalone in stage=train and stage=export: a small language model instead of a draft head.

Training reads ``run_dir/distill`` and writes ``run_dir/train/model/`` (a plain model folder), ``metrics.jsonl`` and the
manifest; killed or stopped it goes on from its last checkpoint. The export is that folder with a ``bundle.json`` of
kind "standalone", which stage=evaluate and stage=generate load like any other bundle.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.bundle import BUNDLE, CARD, FORMAT, FORMAT_VERSION, STANDALONE, read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json, atomic_write, make_folder, publish_folder, read_json
from jetspec_train.artifacts.manifest import (
    check_identity,
    describe_outputs,
    differing_keys,
    is_current,
    read_manifest,
    require_manifest,
    verify_outputs,
    write_manifest,
)
from jetspec_train.artifacts.provenance import git_revision, package_versions
from jetspec_train.config import Config, to_dict

IDENTITY = "identity.json"  # what the checkpoints belong to, before there is a manifest


def plan(cfg: Config, stage: str) -> dict[str, Any]:
    """What would be done. Raises UserError for a start model that cannot be used: a pipeline asks before it distils."""
    from jetspec_train.training.standalone import check_start

    if stage == "train":
        check_start(cfg.standalone, cfg.target)
    folder = Path(cfg.run_dir) / stage
    return {
        "stage": stage,
        "draft": STANDALONE,
        "target": cfg.target.name,
        "start": cfg.standalone.model or f"{cfg.standalone.prune_layers} of the target's layers",
        "standalone": to_dict(cfg.standalone),
        "writes": [str(folder / name) for name in (["bundle/"] if stage == "export" else ["model/", "metrics.jsonl"])],
    }


def train(cfg: Config) -> None:
    """Distil the small model, or go on, or find that there is nothing to do.

    Raises UserError for missing or changed data, no or two start models, tokenizers that differ, another
    configuration's folder; SystemExit(85) after a stop signal, KeyboardInterrupt after Ctrl-C, both saved.
    """
    from jetspec_train.targets.loading import load_tokenizer, target_identity
    from jetspec_train.training.ranks import Ranks
    from jetspec_train.training.signals import exit_code_for, stop_on_signals
    from jetspec_train.training.standalone import check_start, distil, sample_facts, save_model, training_rows
    from jetspec_train.training.tracking import Tracker

    folder, begun = Path(cfg.run_dir) / "train", time.monotonic()
    data = require_manifest(Path(cfg.run_dir) / "distill", "distill")
    verify_outputs(Path(cfg.run_dir) / "distill", data)
    target = target_identity(cfg.target).to_dict()
    identity = {
        "target": {key: value for key, value in target.items() if key != "name"},
        "data": data.digest(),
        "kind": STANDALONE,
        "standalone": {
            key: value for key, value in to_dict(cfg.standalone).items() if key not in ("save_every", "depth")
        },
        "tokens": cfg.train.tokens,
        "seed": cfg.seed,
    }
    if is_current(folder, identity):
        print(f"train: finished before, nothing to do ({folder})")
        return
    check_start(cfg.standalone, cfg.target)
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) > 1:
        raise UserError("draft=standalone is trained by one process; start it without torchrun or srun -n.")
    make_folder(folder)
    from jetspec_train.stages.train import only_trainer
    from jetspec_train.stages.training_inputs import load_data

    with only_trainer(folder, Ranks()), stop_on_signals() as stop:
        if (folder / IDENTITY).exists():
            check_identity(folder, read_json(folder / IDENTITY, "The training's identity"), identity, "train")
        atomic_json(folder / IDENTITY, identity)
        store, left_out = load_data(cfg)
        rows, dropped = training_rows(store, cfg.standalone.sequence_length)
        if not rows:
            raise UserError(
                f"No sample has a prompt shorter than standalone.sequence_length={cfg.standalone.sequence_length}. "
                "Raise it."
            )
        facts = sample_facts(rows, dropped)
        print(
            f"train: {len(rows):,} samples, {facts['supervised_tokens']:,} supervised tokens"
            + (f", {dropped:,} with too long a prompt" if dropped else "")
            + f"; {cfg.standalone.steps} steps of GKD, lmbda {cfg.standalone.lmbda:g}, beta {cfg.standalone.beta:g}",
            flush=True,
        )
        chat = load_tokenizer(cfg.target)
        run_config = {**to_dict(cfg), "git_revision": git_revision(), "total_steps": cfg.standalone.steps}
        tracker = Tracker(folder, cfg.tracking, resumed_step=_resumed_step(folder), run_config=run_config)

        def record(step: int, numbers: dict[str, Any]) -> None:
            tracker.log("train", step, numbers)
            print(f"train: step {step}/{cfg.standalone.steps} loss {numbers['loss']:.4f}", flush=True)

        model, step = distil(
            cfg.standalone,
            cfg.target,
            chat,
            rows,
            folder / "checkpoints",
            seed=cfg.seed,
            log_every=cfg.train.log_every,
            on_record=record,
            should_stop=lambda: bool(stop),
        )
        if step < cfg.standalone.steps:
            tracker.close({"step": step})
            if stop.signal_number == signal.SIGINT:
                raise KeyboardInterrupt
            print("train: stopped and saved; the same command continues", file=sys.stderr)
            raise SystemExit(exit_code_for(stop.signal_number))
        temporary = folder / f".model.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        save_model(model, chat, temporary)
        saved = publish_folder(temporary, folder / "model")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        measured = acceptance(cfg, saved)
        tracker.log("evaluation", step, measured)
        tracker.close({"step": step, **measured})
        outputs = [file for file in saved.rglob("*") if file.is_file()]
        write_manifest(
            folder,
            stage="train",
            identity=identity,
            inputs={"distill": str(identity["data"])},
            outputs=[*outputs, folder / "metrics.jsonl"],
            counts={
                **facts,
                "beyond_train_tokens": left_out,
                "steps": step,
                "token_visits": step * cfg.standalone.batch_size,
                "trainable_parameters": parameters,
                **measured,
            },
            seconds=time.monotonic() - begun,
        )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the optimiser of a finished training
    print(f"train: {saved} ({parameters:,} parameters), acceptance length {_shown(measured)}")


def _resumed_step(folder: Path) -> int:
    from jetspec_train.training.standalone import last_checkpoint

    found = last_checkpoint(folder / "checkpoints")
    return 0 if found is None else int(found.rsplit("-", 1)[1])


def _shown(measured: Mapping[str, Any]) -> str:
    return f"{measured['chain']:.2f} (chain)" if "chain" in measured else "not measured (train.eval_prompts=0)"


def acceptance(cfg: Config, model: Path) -> dict[str, Any]:
    """Greedy acceptance length on dev prompts, as a chain of ``standalone.depth`` tokens; the target's size."""
    from jetspec_train.decoding.decoder import Decoder
    from jetspec_train.decoding.standalone import standalone_from_folder
    from jetspec_train.decoding.stats import merge_stats
    from jetspec_train.stages.training_inputs import dev_prompts
    from jetspec_train.targets.loading import load_target

    target = load_target(cfg.target)
    facts: dict[str, Any] = {"target_parameters": target.parameters}
    if not cfg.train.eval_prompts:
        return facts
    prompts = [prompt.tokens for prompt in dev_prompts(cfg, target)]
    settings = dataclasses.replace(
        type(cfg.decoding)(), shape="chain", nodes=cfg.standalone.depth, depth=cfg.standalone.depth
    )
    decoder = Decoder(target, standalone_from_folder(model, target, cfg.standalone.depth), settings)
    answers = decoder.generate(prompts, max_new_tokens=cfg.train.eval_max_new_tokens)
    stats = merge_stats([answer.stats for answer in answers])
    facts["chain"] = stats.emitted / stats.target_forwards if stats.target_forwards else 1.0
    facts["chain_forwards"], facts["chain_tokens"] = stats.target_forwards, stats.emitted
    return facts


def export(cfg: Config) -> None:
    """The trained folder becomes a bundle; read back and checked. Does nothing when it is there already.

    Raises UserError if stage=train has not finished, for another target, and for forms of other engines.
    """
    from jetspec_train.artifacts.files import sha256_file
    from jetspec_train.targets.loading import target_identity

    begun, folder = time.monotonic(), make_folder(Path(cfg.run_dir) / "export")
    forms = [form for form in cfg.export.formats if form != "bundle"]
    if forms:
        raise UserError(
            f"export.formats={forms}: a standalone draft is a plain model folder, which servers load as it is."
        )
    trained = require_manifest(Path(cfg.run_dir) / "train", "train")
    if trained.identity.get("kind") != STANDALONE:
        raise UserError(f"{cfg.run_dir}/train holds a draft head, not a standalone draft. Leave draft=standalone out.")
    verify_outputs(Path(cfg.run_dir) / "train", trained)
    target = target_identity(cfg.target)
    own = {key: value for key, value in target.to_dict().items() if key != "name"}
    differing = differing_keys(trained.identity["target"], own)
    if differing:
        raise UserError(
            f"The draft was trained for another target than {cfg.target.name!r}; these differ: {differing}."
        )
    identity = {"train": trained.digest(), "depth": cfg.standalone.depth}
    current = read_manifest(folder)
    if current is not None and not differing_keys(current.identity, identity):
        print(f"export: {folder} is up to date, nothing to do")
        return
    final = folder / "bundle"
    temporary = folder / f".bundle.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(Path(cfg.run_dir) / "train" / "model", temporary)
    parameters, target_parameters = trained.counts["trainable_parameters"], trained.counts["target_parameters"]
    meta = {
        "kind": STANDALONE,
        "target": {
            **target.to_dict(),
            "parameters": target_parameters,
            "gguf_file": cfg.target.gguf_file,
            "template": cfg.target.template,
            "template_options": dict(cfg.target.template_options),
            "system_prompt": cfg.target.system_prompt,
        },
        "architecture": f"standalone language model, {_layers(temporary)} layers, chains of {cfg.standalone.depth}",
        "draft": {"trainable_parameters": parameters, "ratio_to_target": parameters / target_parameters},
        "taps": [],
        "block": cfg.standalone.depth,
        "training": {
            "budget_tokens": cfg.budget.tokens,
            **{key: trained.counts.get(key) for key in ("supervised_tokens", "steps", "chain")},
            "seconds": trained.seconds,
            "settings": trained.identity["standalone"],
        },
        "provenance": {"git_revision": git_revision(), "versions": package_versions()},
    }
    atomic_write(temporary / CARD, _card(meta))
    files = describe_outputs(temporary, [path.name for path in temporary.iterdir()])
    atomic_json(temporary / BUNDLE, {"format": FORMAT, "format_version": FORMAT_VERSION, **meta, "files": files})
    publish_folder(temporary, final)
    read_bundle(final)
    write_manifest(
        folder,
        stage="export",
        identity=identity,
        inputs={"train": sha256_file(Path(cfg.run_dir) / "train" / "manifest.json")},
        outputs=[path for path in final.rglob("*") if path.is_file()],
        counts={"parameters": parameters},
        seconds=time.monotonic() - begun,
    )
    print(f"export: {final} (a standalone draft of {parameters:,} parameters)")


def _layers(folder: Path) -> Any:
    return read_json(folder / "config.json", "The model's configuration").get("num_hidden_layers", "?")


def _card(meta: Mapping[str, Any]) -> str:
    target, draft = meta["target"], meta["draft"]
    return f"""# A standalone draft for {target["name"]}

A small language model that drafts tokens for speculative decoding with the target named above: {meta["architecture"]},
{draft["trainable_parameters"]:,} parameters ({draft["ratio_to_target"]:.1%} of the target's). Distilled with GKD on the
target's own answers. It is an ordinary model folder; `bundle.json` says which target it belongs to.

```
python -m jetspec_train stage=generate bundle=THIS_FOLDER "prompt=What's up?"
python -m jetspec_train stage=evaluate bundle=THIS_FOLDER run_dir=runs/evaluation
```
"""

"""From a domain's samples to an adapter that the decoder swaps, and from samples to a standalone draft; tiny models."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jetspec_train.artifacts.adapter import read_adapter
from jetspec_train.artifacts.bundle import read_bundle, write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import (
    AdaptConfig,
    Config,
    DecodingConfig,
    DistillConfig,
    DraftConfig,
    RecipeConfig,
    StandaloneConfig,
    TrainConfig,
    VerifierSettings,
)
from jetspec_train.decoding.adapters import adapted_bundle
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.modeling.draft_config import resolve_draft_config
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.verifier import Verifier
from jetspec_train.modeling.verifier_config import resolve_verifier_config
from jetspec_train.stages import adapt, distill, export, train
from jetspec_train.training import loop
from jetspec_train.training.tracking import read_metrics
from tests.tiny import tiny_prompts, tiny_target, tiny_target_config, tiny_target_dir

STEPS = 16


def write_recipe(folder: Path, name: str, ask: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"{ask} {n} and {n * 7 % 13}?"} for n in range(30)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": name, "path": f"{name}.jsonl", "columns": {"question": "question"}}
    shares = {"train": 0.5, "dev": 0.2, "report": 0.3}
    (folder / f"{name}.yaml").write_text(json.dumps({"shares": shares, "sources": [source]}))
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A distilled domain, a bundle with draft and verifier, and the recipe that the bundle is said to come from."""
    folder = tmp_path_factory.mktemp("adapt")
    target = tiny_target("llama")
    cfg = Config(
        run_dir=str(folder / "run"),
        bundle=str(folder / "base"),
        target=tiny_target_config("llama"),
        recipe=RecipeConfig(path=str(write_recipe(folder, "new", "What is"))),
        distill=DistillConfig(max_new_tokens=12, batch_size=8),
        draft=DraftConfig(layers=1, block=4, taps=2, parent_rank=8, clean_prefix=0.5),
        verifier=VerifierSettings(layers=1, share=0.2, blocks=4, siblings=1),
        train=TrainConfig(
            sequence_length=64,
            sequences=2,
            anchors=8,
            precision="float32",
            eval_every=0,
            eval_prompts=2,
            eval_max_new_tokens=6,
            save_every=4,
            log_every=1,
        ),
        adapt=AdaptConfig(
            rank=2,
            steps=STEPS,
            learning_rate=1e-2,
            old_recipe=str(write_recipe(folder, "old", "Tell me")),
            prompts=2,
            max_new_tokens=6,
            merge=True,
        ),
        standalone=StandaloneConfig(prune_layers=1, steps=2, batch_size=2, max_new_tokens=4, depth=3, save_every=1),
        decoding=DecodingConfig(nodes=4, shortlist=8),
    )
    draft = resolve_draft_config(cfg.draft, target.config, mask_token_id=target.mask_token_id)
    judge = resolve_verifier_config(cfg.verifier, draft, target_parameters=target.parameters)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        modules = {"draft": DraftHead(draft), "verifier": Verifier(judge)}
    write_bundle(
        folder / "base",
        bundle={"target": target.identity.to_dict(), "training": {}},
        config={"draft": draft.to_dict(), "verifier": judge.to_dict()},
        tensors={f"{part}.{name}": t for part, module in modules.items() for name, t in module.state_dict().items()},
        card="A test.",
    )
    distill.run(cfg)
    return cfg


def fresh(domain: Config, folder: Path) -> Config:
    shutil.copytree(Path(domain.run_dir) / "distill", folder / "distill")
    return replace(domain, run_dir=str(folder))


@pytest.fixture(scope="module")
def adapted(domain: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    cfg = fresh(domain, tmp_path_factory.mktemp("adapted") / "run")
    adapt.run(cfg)
    return cfg


def test_what_an_adaptation_leaves(adapted: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(adapted.run_dir) / "adapt"
    report = json.loads((folder / "report.json").read_text())
    assert set(report["domains"]) == {"new", "old"}
    for row in report["domains"].values():
        assert row["prompts"] == 2 and row["before"]["acceptance_length"] >= 1 <= row["after"]["acceptance_length"]
        assert row["change"] == row["after"]["acceptance_length"] / row["before"]["acceptance_length"] - 1
    adapter, bundle = read_adapter(folder / "adapter"), read_bundle(adapted.bundle)
    assert {name.split(".")[0] for name in adapter.tensors} == {"draft", "verifier"}
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.tensors.items() if "lora_B" in name)
    # a few numbers per layer, and the checkpoint holds no more than they
    numbers = sum(tensor.numel() for tensor in adapter.tensors.values())
    assert numbers == report["counts"]["trainable_parameters"] < sum(t.numel() for t in bundle.tensors.values()) / 3
    losses = [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert len(losses) == STEPS and sum(losses[-4:]) < sum(losses[:4])
    assert read_manifest(folder) is not None
    adapt.run(adapted)
    assert "nothing to do" in capsys.readouterr().out


def test_the_merged_bundle_is_the_bundle_with_the_adapter(adapted: Config) -> None:
    folder = Path(adapted.run_dir) / "adapt"
    merged = read_bundle(folder / "bundle")
    expected = adapted_bundle(read_bundle(adapted.bundle), folder / "adapter").tensors
    assert merged.tensors.keys() == expected.keys()
    assert all(torch.equal(merged.tensors[name], expected[name]) for name in expected)
    target, prompts = tiny_target("llama"), tiny_prompts(2)
    decoders = [Decoder.from_bundle(path, target, adapted.decoding) for path in (adapted.bundle, folder / "bundle")]
    decoders[0].load_adapter(folder / "adapter")
    results = [decoder.generate(prompts, max_new_tokens=8) for decoder in decoders]
    plain = Decoder(target).generate(prompts, max_new_tokens=8)
    for swapped, built_in, expected_answer in zip(*results, plain):
        assert swapped.tokens == built_in.tokens == expected_answer.tokens
        assert swapped.stats.target_forwards == built_in.stats.target_forwards
    with pytest.raises(UserError, match="was made for a bundle with weights"):
        decoders[1].load_adapter(folder / "adapter")


def test_a_stopped_adaptation_continues_bit_for_bit(
    domain: Config, adapted: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = fresh(domain, tmp_path / "run")
    original, calls = loop.add_sums, []

    def stop_in_step_3(window, sums):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        original(window, sums)

    monkeypatch.setattr(loop, "add_sums", stop_in_step_3)
    with pytest.raises(SystemExit):
        adapt.run(cfg)
    adapt.run(cfg)
    found, expected = (read_adapter(Path(c.run_dir) / "adapt" / "adapter").tensors for c in (cfg, adapted))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_what_cannot_be_adapted_is_refused(domain: Config, adapted: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs bundle="):
        adapt.run(replace(domain, bundle=None))
    with pytest.raises(UserError, match="was made for target"):
        adapt.run(replace(domain, target=tiny_target_config("qwen3")))
    with pytest.raises(UserError, match=r"no linear layer named nothing"):
        adapt.run(replace(fresh(domain, tmp_path / "run"), adapt=replace(domain.adapt, modules=["nothing"])))
    with pytest.raises(UserError, match="rank"):
        adapt.run(replace(adapted, adapt=replace(adapted.adapt, rank=3)))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_standalone_draft_from_training_to_decoding(domain: Config, tmp_path: Path, lora_rank: int) -> None:
    """Two steps of GKD on a one-layer copy of the target; the export decodes losslessly, batch 1 and 3."""
    settings = replace(domain.standalone, lora_rank=lora_rank, lmbda=0.5 if lora_rank else 1.0)
    cfg = replace(fresh(domain, tmp_path / "run"), draft=DraftConfig(kind="standalone"), standalone=settings)
    train.run(cfg)
    manifest = read_manifest(Path(cfg.run_dir) / "train")
    assert manifest is not None and manifest.counts["steps"] == 2 and manifest.counts["chain"] >= 1.0
    train.run(cfg)
    export.run(cfg)
    folder = Path(cfg.run_dir) / "export" / "bundle"
    meta = read_bundle(folder).meta
    assert meta["kind"] == "standalone" and meta["block"] == 3 and meta["draft"]["ratio_to_target"] < 1
    target = tiny_target("llama")
    decoder = Decoder.from_bundle(folder, target, replace(cfg.decoding, shape="chain"))
    assert decoder.drafter.model.num_layers == 1
    for batch in (1, 3):
        prompts = tiny_prompts(batch, seed=batch)
        found = [g.tokens for g in decoder.generate(prompts, max_new_tokens=10)]
        assert found == [g.tokens for g in Decoder(target).generate(prompts, max_new_tokens=10)]
    # it is an ordinary model folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_standalone_refusals(domain: Config, tmp_path: Path) -> None:
    cfg = replace(fresh(domain, tmp_path / "run"), draft=DraftConfig(kind="standalone"))
    both = replace(cfg, standalone=replace(cfg.standalone, model=str(tiny_target_dir("qwen3"))))
    for refused in (train.run, train.plan):  # a pipeline asks for the plan before it distils
        with pytest.raises(UserError, match="needs one start"):
            refused(both)
    with pytest.raises(UserError, match=r"prune_layers=9: the target has 3 layers"):
        train.run(replace(cfg, standalone=replace(cfg.standalone, prune_layers=9)))
    with pytest.raises(UserError):
        export.run(cfg)  # nothing was trained

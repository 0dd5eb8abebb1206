"""stage=calibrate: what the verifier's probabilities are worth, and from which one on a check may be skipped.

Decodes prompts of the splits ``calibrate_fit`` and ``calibrate_certify`` with the checkpoint that export would take,
and writes ``run_dir/calibrate/``: calibration.json (export puts it into the bundle), reliability.png, the records
behind them, and the manifest. Four passes:

1. fit: greedy chains -> temperatures of both heads, slot by slot;
2. fit: every stage deferred, the target's coarse forward as its shadow -> pattern profile, grid of thresholds;
3. certify: the trusting policy itself at one threshold after another, strictest first, until one fails;
4. certify: greedy chains -> how well calibrated the result is on prompts that it has not seen.

Each batch is kept as it is done, so that a kill costs one batch. Without a verifier there is nothing to calibrate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json, atomic_write, make_folder, readable_seconds, sha256_file
from jetspec_train.artifacts.manifest import is_current_or_replaced, write_manifest
from jetspec_train.config import Config
from jetspec_train.stages.calibration_inputs import CERTIFY, FIT

if TYPE_CHECKING:
    from jetspec_train.decoding.calibration import Calibration
    from jetspec_train.evaluation.calibration import Certificate, ThresholdResult
    from jetspec_train.evaluation.shadow import ShadowPrompt

STAGE = "calibrate"
CALIBRATION, FIGURE, RECORDS = "calibration.json", "reliability.png", "records"


def plan(cfg: Config) -> dict[str, Any]:
    """What would be calibrated, and what a certificate takes; loads nothing."""
    if not cfg.verifier.enabled or cfg.draft.kind != "block":
        return {"stage": STAGE, "skipped": "this configuration trains no verifier"}
    from jetspec_train.evaluation.calibration import trials_needed

    settings = cfg.calibrate
    return {
        "stage": STAGE,
        "checkpoint": cfg.export.checkpoint,
        "fit_prompts": settings.fit_prompts,
        "certify_prompts": settings.certify_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "stage_length": settings.stages,
        "risk": settings.risk,
        "prompts_needed": {
            f"with {errors} errors": trials_needed(errors, settings.risk, settings.confidence)
            for errors in (0, 1, 2, 5)
        },
        "writes": str(Path(cfg.run_dir) / STAGE),
    }


def run(cfg: Config) -> None:
    """Calibrate; does nothing when the same checkpoint was calibrated with the same settings.

    Raises UserError for a split without prompts, a target other than the checkpoint's, and stages that the draft cannot
    be deferred at.
    """
    from jetspec_train.data.recipes import load_recipe
    from jetspec_train.training.checkpoint import find_trained, load_verifier_config

    folder = Path(cfg.run_dir) / STAGE
    if cfg.draft.kind != "block":
        print(f"calibrate: a draft of kind {cfg.draft.kind} has no verifier, nothing to calibrate")
        return
    checkpoint = find_trained(Path(cfg.run_dir), cfg.export.checkpoint)
    if load_verifier_config(checkpoint) is None:
        print(f"calibrate: {checkpoint.name} holds no verifier, nothing to calibrate")
        return
    identity = identity_of(cfg, sha256_file(checkpoint / "manifest.json"), load_recipe(cfg.recipe).hash())
    if is_current_or_replaced(folder, identity, "calibrate: calibrating again"):
        print(f"calibrate: {folder} is up to date, nothing to do")
        return
    _Work(cfg, folder, checkpoint, identity).run()


def identity_of(cfg: Config, checkpoint: str, recipe: str) -> dict[str, Any]:
    """What determines the result."""
    decoding = dataclasses.asdict(cfg.decoding)
    for key in ("trace", "scheduler", "utilisation", "cache", "cache_max_bytes", "max_new_tokens"):
        del decoding[key]  # not in use here
    return {
        "checkpoint": checkpoint,
        "recipe": recipe,
        "target": dataclasses.asdict(cfg.target),
        "decoding": decoding,
        "calibrate": dataclasses.asdict(cfg.calibrate),
        "max_prompt_tokens": cfg.distill.max_prompt_tokens,
    }


class _Work:
    """One calibration: what all of its passes share."""

    def __init__(self, cfg: Config, folder: Path, checkpoint: Path, identity: dict[str, Any]) -> None:
        from jetspec_train.evaluation.passes import Passes

        self.cfg, self.folder, self.checkpoint, self.identity = cfg, make_folder(folder), checkpoint, identity
        self.passes = Passes(folder / RECORDS, identity)

    def run(self) -> None:
        from jetspec_train.evaluation.calibration import certify, threshold_grid
        from jetspec_train.evaluation.calibrator import (
            fit_heads,
            fit_stages,
            pattern_of,
            quality,
            reliability_tables,
            threshold_of,
        )
        from jetspec_train.evaluation.shadow import EVERY_PATTERN, chain_settings, staged_settings
        from jetspec_train.stages.calibration_inputs import load_checkpoint, read_prompts

        cfg, settings = self.cfg, self.cfg.calibrate
        self.target, self.head, self.verifier, calibration = load_checkpoint(cfg, self.checkpoint)
        mode = _mode(cfg, calibration.mode)
        prompts, self.skipped = read_prompts(cfg, self.target)
        fit, self.certify_prompts = prompts[FIT], prompts[CERTIFY]

        chain = chain_settings(cfg.decoding, mode)
        rounds = self._chains("fit-chains", fit, chain, calibration)
        calibration = dataclasses.replace(
            calibration, temperatures={head: tuple(values) for head, values in fit_heads(rounds).items()}
        )
        if "correctness" not in calibration.temperatures:
            raise UserError(
                f"None of the {len(fit)} prompts of the split {FIT} gave a round with a drafted token that the "
                "verifier could judge. Raise calibrate.fit_prompts or calibrate.max_new_tokens, or train longer."
            )
        everything = staged_settings(
            cfg.decoding, mode, stages=settings.stages, policy="lossless", threshold="0.0", prune=0.0
        )
        watched = dataclasses.replace(calibration, pattern=EVERY_PATTERN)
        stages = self._stages("fit-stages", fit, everything, watched)
        calibration = dataclasses.replace(calibration, pattern=pattern_of(stages, settings.pattern_coverage))
        grid = threshold_grid(
            fit_stages(stages, calibration.pattern, len(fit)),
            len(self.certify_prompts),
            risk=settings.risk,
            confidence=settings.confidence,
            size=settings.grid,
        )
        found = certify(
            grid,
            lambda threshold: self._test(threshold, mode, calibration),
            risk=settings.risk,
            confidence=settings.confidence,
        )
        unseen = self._chains("certify-chains", self.certify_prompts, chain, calibration)
        self._finish(
            dataclasses.replace(
                calibration,
                threshold=threshold_of(
                    found,
                    risk=settings.risk,
                    confidence=settings.confidence,
                    stages=settings.stages,
                    mix=_mix(self.certify_prompts),
                ),
                reliability=reliability_tables(unseen, calibration.temperatures),
                quality=quality(unseen, calibration.temperatures),
                fitted_on={
                    "rounds": len(rounds),
                    "stages": len(stages),
                    "prompts": {FIT: len(fit), CERTIFY: len(self.certify_prompts)},
                    "mix": _mix(fit),
                    "skipped_prompts": self.skipped,
                    "settings": dataclasses.asdict(settings),
                },
            ),
            found,
        )

    def _chains(
        self, name: str, prompts: Sequence[ShadowPrompt], settings: Any, calibration: Calibration
    ) -> list[dict[str, Any]]:
        from jetspec_train.evaluation.shadow import chain_round

        def rounds_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            return [found for record in records if (found := chain_round(record)) is not None]

        # Raw logits: nothing here depends on temperatures, so that neither does the name of the records.
        bare = dataclasses.replace(calibration, temperatures={}, pattern=None)
        return [r for batch in self._pass(name, prompts, settings, bare, rounds_of) for r in batch]

    def _stages(
        self, name: str, prompts: Sequence[ShadowPrompt], settings: Any, calibration: Calibration
    ) -> list[dict[str, Any]]:
        return [s for batch in self._pass(name, prompts, settings, calibration, _screened) for s in batch]

    def _test(self, threshold: float, mode: str, calibration: Calibration) -> ThresholdResult:
        """The trusting policy at this threshold, with a certificate lent to it for the test."""
        from jetspec_train.decoding.calibration import Threshold
        from jetspec_train.evaluation.calibrator import count_errors
        from jetspec_train.evaluation.shadow import staged_settings

        cfg, settings, prompts = self.cfg, self.cfg.calibrate, self.certify_prompts
        lent = dataclasses.replace(calibration, threshold=Threshold(threshold, True, stage_length=settings.stages))
        policy = staged_settings(
            cfg.decoding, mode, stages=settings.stages, policy="trusting", threshold="auto", stream_unverified=False
        )
        print(f"calibrate: testing the threshold {threshold:.4f} on {len(prompts)} prompts", flush=True)
        size = settings.batch_size
        ids = [[prompt.id for prompt in prompts[at : at + size]] for at in range(0, len(prompts), size)]
        return count_errors(
            zip(ids, self._pass("certify-policy", prompts, policy, lent, _screened)),
            prompts=len(prompts),
            seed=settings.seed,
            risk=settings.risk,
            confidence=settings.confidence,
        )

    def _pass(
        self,
        name: str,
        prompts: Sequence[ShadowPrompt],
        settings: Any,
        calibration: Calibration,
        reduce: Callable[[Sequence[dict[str, Any]]], Sequence[dict[str, Any]]],
    ) -> Iterator[list[dict[str, Any]]]:
        """One pass over the prompts, batch by batch; the model runs only for batches that are not on disk yet."""
        from tqdm import tqdm

        from jetspec_train.evaluation.shadow import ShadowRun

        def work(batch: Sequence[ShadowPrompt]) -> Sequence[dict[str, Any]]:
            # A drafter learns while it drafts (successors of tokens); a fresh one makes a batch's result its own.
            run = ShadowRun(self.target, self.head, self.verifier, calibration, settings)
            return reduce(run.run(batch, max_new_tokens=self.cfg.calibrate.max_new_tokens)[0])

        size = self.cfg.calibrate.batch_size
        batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        relevant = [calibration.to_dict(), dataclasses.asdict(settings)]
        with tqdm(total=len(prompts), desc=f"calibrate: {name}", unit="prompt") as bar:
            for batch, records in zip(batches, self.passes.run(name, batches, work, relevant)):
                bar.update(len(batch))
                yield records

    def _finish(self, calibration: Calibration, found: Certificate) -> None:
        from jetspec_train.evaluation.calibrator import describe_threshold, domain_table
        from jetspec_train.evaluation.verifier_figures import reliability_png

        settings = self.cfg.calibrate
        content = calibration.to_dict()
        content["threshold"]["domains"] = domain_table(found.test, settings.confidence)
        outputs = [
            atomic_json(self.folder / CALIBRATION, content),
            atomic_write(self.folder / FIGURE, reliability_png(calibration.reliability)),
        ]
        write_manifest(
            self.folder,
            stage=STAGE,
            identity=self.identity,
            inputs={"checkpoint": self.identity["checkpoint"]},
            outputs=outputs,
            counts={
                "fit_prompts": calibration.fitted_on["prompts"][FIT],
                "certify_prompts": calibration.fitted_on["prompts"][CERTIFY],
                "skipped_prompts": sum(self.skipped.values()),
                "thresholds_tested": len(found.rows),
            },
            seconds=self.passes.seconds(),
        )
        print_summary(calibration, describe_threshold(found, settings.risk, len(self.certify_prompts)), self.folder)
        print(f"calibrate: {readable_seconds(self.passes.seconds())} of decoding")


def _screened(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    from jetspec_train.evaluation.shadow import screened_stages

    return [stage for record in records for stage in screened_stages(record)]


def _mix(prompts: Sequence[ShadowPrompt]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
    return dict(sorted(counts.items()))


def _mode(cfg: Config, mode: str) -> str:
    """The verifier's own mode, refused where the configuration cannot decode in it."""
    if mode == "ratio":
        raise UserError(
            "The verifier was trained for verifier.mode=ratio, whose chains are not deferred stage by stage; there is "
            "no threshold to calibrate. Leave calibrate out of `pipeline`, or train with verifier.mode=match_greedy."
        )
    if mode == "match_sampled" and cfg.decoding.sampling.temperature == 0:
        raise UserError(
            "The verifier was trained for verifier.mode=match_sampled, but decoding.sampling.temperature=0 is greedy. "
            "Set the temperature that will be decoded with."
        )
    return mode


def print_summary(calibration: Calibration, threshold: str, folder: Path) -> None:
    """What was found, in a few lines."""
    for head, values in calibration.temperatures.items():
        print(f"calibrate: temperatures of the {head} head: " + " ".join(f"{value:.2f}" for value in values))
    overall = calibration.quality["overall"]
    if overall is not None and overall["ece_after"] is not None:
        print(
            f"calibrate: calibration error of the survival {100 * overall['ece_before']:.1f} % -> "
            f"{100 * overall['ece_after']:.1f} %, on {calibration.quality['rounds']} rounds of "
            f"{calibration.quality['prompts']} prompts that were not fitted on"
        )
    print(f"calibrate: {threshold}")
    print(f"calibrate: {folder / CALIBRATION}, {folder / FIGURE}")

"""The README.md of a bundle: what it is, what was measured of it, how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_card(
    meta: Mapping[str, Any],
    draft: Mapping[str, Any],
    training: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
) -> str:
    """README.md of the bundle: what it is, what was measured, how to use it."""
    target, head = meta["target"], meta["draft"]
    rows = [
        ("target", f"{target['name']} (revision {target['revision']})"),
        ("architecture", meta["architecture"]),
        ("taps", ", ".join(map(str, meta["taps"])) + " (0-based, output of decoder layer i)"),
        ("parameters", f"{head['trainable_parameters']:,} ({100 * head['ratio_to_target']:.1f} % of the target's)"),
    ]
    if meta.get("verifier"):
        judge = meta["verifier"]
        rows.append(
            (
                "verifier",
                f"{judge['parameters']:,} parameters ({100 * judge['ratio_to_target']:.1f} % of the target's, "
                f"{100 * judge['ratio_with_draft']:.1f} % with the draft), rule {judge['mode']}",
            )
        )
    if training.get("supervised_tokens"):
        rows.append(
            ("supervised tokens", f"{training['supervised_tokens']:,} (seen {training['token_visits']:,} times)")
        )
    rows.append(("training", f"{training.get('step')} steps, {float(training.get('seconds') or 0):.0f} s"))
    dev = training.get("dev") or {}
    if dev.get("acceptance_length") is not None:
        rows.append(("acceptance length on dev prompts (greedy)", f"{dev['acceptance_length']:.3f}"))
    if calibration is not None:
        threshold = calibration["threshold"]
        tested = f"{threshold['errors']} wrong of {threshold['prompts']} stages tested, risk {threshold['risk']:g}"
        value = f"{threshold['value']:.4f} ({tested})" if threshold["certified"] else f"none ({tested})"
        rows.append(("certified threshold of skipped checks", value))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""# A draft for {target["name"]}

Drafts tokens for speculative decoding with the target named below and no other: loading it with a target of another
configuration, tokenizer or chat template is refused. Output stays the target's own; the draft changes the speed only.

| | |
| --- | --- |
{table}

Speed depends on the machine and is measured by `stage=evaluate`, whose report stands beside this bundle.

## Use

```
python -m jetspec_train stage=generate bundle=THIS_FOLDER "prompt=What's up?"
python -m jetspec_train stage=evaluate bundle=THIS_FOLDER run_dir=runs/evaluation
```

```python
from jetspec_train.decoding.decoder import Decoder

decoder = Decoder.from_bundle("THIS_FOLDER")
prompt = decoder.target.chat.render([{{"role": "user", "content": "What's up?"}}])
print(decoder.target.chat.decode(decoder.generate([prompt])[0].tokens))
```

Weights: safetensors only; embedding and head are the target's. Trained with jetspec-train
(revision {meta["provenance"]["git_revision"] or "of the installed package"}); settings, data and versions are
in `bundle.json`.
"""

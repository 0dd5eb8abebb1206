"""Any known draft folder -> ``ForeignDraft``. The form is told by the configuration, never by the folder's name."""

from __future__ import annotations

from pathlib import Path

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign import blocks, eagle3, speculators
from jetspec_train.artifacts.foreign.checkpoint import read_config, read_tensors
from jetspec_train.artifacts.foreign.draft import ForeignDraft, TargetFacts
from jetspec_train.artifacts.foreign.options import ReadOptions

READABLE = (
    "speculators (eagle3, dflash, dspark), z-lab DFlash and JetSpec (DFlashDraftModel), DeepSpec (Qwen3DSparkModel), "
    "EAGLE-3 of SafeAILab, SpecForge and SGLang (LlamaForCausalLMEagle3)"
)


def read_foreign(
    folder: str | Path, target: TargetFacts | None = None, options: ReadOptions | None = None
) -> ForeignDraft:
    """Read a draft of another project.

    ``target``: checked against when given (hidden size, vocabulary, number of layers). ``options``: what the user
    states beyond the folder. Raises UserError with the reason for everything that cannot be honoured.
    """
    path = Path(folder)
    options = options or ReadOptions()
    if options.mask not in (None, "causal", "bidirectional"):
        raise UserError(f"foreign.mask={options.mask!r} is not possible; allowed: causal, bidirectional.")
    config = read_config(path)
    where = str(path)
    kind = config.get("speculators_model_type")
    architectures = [str(name) for name in config.get("architectures") or []]
    if kind is not None:
        readers = {
            "eagle3": eagle3.read_speculators,
            "dflash": speculators.read_block,
            "dspark": speculators.read_block,
        }
        reader = readers.get(kind)
    elif "DFlashDraftModel" in architectures:
        reader = blocks.read_dflash
    elif "Qwen3DSparkModel" in architectures:
        reader = blocks.read_deepspec
    elif any(name in architectures for name in eagle3.ARCHITECTURES):
        reader = eagle3.read_safeailab
    elif architectures == ["LlamaForCausalLM"] and config.get("draft_vocab_size") is not None:
        reader = eagle3.read_safeailab  # SafeAILab's own training configurations keep the target's name
    else:
        reader = None
    if reader is None:
        named = f"speculators_model_type={kind!r}" if kind is not None else f"architectures={architectures}"
        raise UserError(f"{where} has {named}, which is not a draft form read here. Readable: {READABLE}.")
    layers = config.get("num_target_layers")
    if target is not None and isinstance(layers, int) and layers != target.num_layers:
        raise UserError(
            f"{where} was made for a target of {layers} layers, but {target.name} has {target.num_layers}. "
            "Load it with the target it was trained for."
        )
    draft = reader(config, read_tensors(path), target, options, where)
    draft.path = path
    return draft

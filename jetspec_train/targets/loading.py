"""From a name in the configuration to a loaded target: hub id, local folder, GGUF file, or the embedded default.

Everything that can be wrong with a source is said before weights are read, in words that name the file or the value.
Remote code is never run.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import stable_hash
from jetspec_train.config import TargetConfig
from jetspec_train.targets.chat import ChatTokenizer
from jetspec_train.targets.families import check_architecture, text_config
from jetspec_train.targets.target import Target, TargetIdentity

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Keys of config.json that say how or where a model was saved, not what it computes.
VOLATILE_CONFIG_KEYS = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache", "architectures")


@dataclass(frozen=True)
class Source:
    """A target that can be read: ``location`` is a folder, or a hub id with ``revision``."""

    name: str
    location: str
    revision: str | None
    local: bool
    fingerprint: str | None


def load_target(cfg: TargetConfig, *, dtype: str | None = None) -> Target:
    """Load the frozen target.

    Args:
        cfg: the ``target`` section of the configuration.
        dtype: overrides ``cfg.dtype`` (the fp32 identity check loads the same target a second time).

    Raises:
        UserError: the source is missing, incomplete, unreachable, or of an unsupported architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from jetspec_train.targets import attention

    source = resolve(cfg)
    config = _load_config(source)
    check_architecture(config, cfg.name)
    chat = _chat(cfg, source, config)
    if source.local:
        check_weights(Path(source.location), cfg.name)
    device = pick_device(cfg)
    chosen = pick_dtype(cfg, device) if dtype is None else _checked_dtype(dtype)
    attention.register()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            revision=source.revision,
            dtype=getattr(torch, chosen),
            config=config,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error
    _use_our_attention(model)
    return Target(model.to(device), chat, _identity(cfg, source, config, chat))


def load_tokenizer(cfg: TargetConfig) -> ChatTokenizer:
    """The target's tokenizer and template without its weights. Raises UserError as ``load_target``."""
    source = resolve(cfg)
    return _chat(cfg, source, _load_config(source))


def target_identity(cfg: TargetConfig) -> TargetIdentity:
    """What ``load_target(cfg).identity`` would be, without reading weights."""
    source = resolve(cfg)
    config = _load_config(source)
    return _identity(cfg, source, config, _chat(cfg, source, config))


def resolve(cfg: TargetConfig) -> Source:
    """Find the target; converts a GGUF file (or the embedded one) into a folder of the user cache on first use."""
    from jetspec_train.targets import embedded

    if cfg.name.startswith("embedded:"):
        folder, fingerprint = embedded.embedded_folder(cfg.name)
        return Source(cfg.name, str(folder), None, True, fingerprint)
    path = Path(cfg.name).expanduser()
    if cfg.gguf_file is not None and path.is_dir():
        path = path / cfg.gguf_file
    if path.suffix == ".gguf":
        folder, fingerprint = embedded.gguf_folder(path)
        return Source(cfg.name, str(folder), None, True, fingerprint)
    if cfg.gguf_file is not None:
        folder, fingerprint = embedded.gguf_folder(_download_gguf(cfg))
        return Source(cfg.name, str(folder), None, True, fingerprint)
    looks_local = cfg.name.startswith(("/", "./", "../", "~")) or path.exists()
    if not looks_local and len(cfg.name.split("/")) <= 2:
        return Source(cfg.name, cfg.name, cfg.revision, False, None)
    if not path.is_dir():
        raise UserError(
            f"target folder {cfg.name!r} does not exist (target.name). Give a folder with config.json and weights, a "
            ".gguf file, a hub id such as 'Qwen/Qwen3-0.6B', or the embedded default."
        )
    if not (path / "config.json").is_file():
        raise UserError(f"target folder {cfg.name!r} has no config.json; it is not a Hugging Face model folder.")
    return Source(cfg.name, str(path), None, True, None)


def check_weights(folder: Path, name: str) -> None:
    """Raises UserError naming the weight files that are missing or cut off in a local folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise UserError(f"target {name!r}: {index} is not a readable weight index: {error}") from error
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif list(folder.glob("pytorch_model*.bin")):
        return
    else:
        partial = [path.name for path in folder.iterdir() if path.suffix in (".incomplete", ".part", ".tmp")]
        hint = f" (found unfinished downloads: {', '.join(sorted(partial))})" if partial else ""
        raise UserError(f"target {name!r}: no model.safetensors in the folder{hint}. Download it again.")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise UserError(
            f"target {name!r} is half-downloaded: its index names {len(files)} weight files, missing are "
            f"{', '.join(missing)}. Download them again."
        )
    short = [file for file in files if not _is_whole(folder / file)]
    if short:
        raise UserError(f"target {name!r}: weight files are cut off: {', '.join(short)}. Download them again.")


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", prefix)
        if 8 + header_bytes > size:
            return False
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            return False
    end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    return size == 8 + header_bytes + end


def pick_device(cfg: TargetConfig) -> str:
    """``auto`` is a CUDA device where there is one."""
    import torch

    if cfg.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = cfg.device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UserError(f"target.device is {cfg.device!r}; allowed: auto, cpu, cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"target.device is {cfg.device!r}, but this torch sees no CUDA device. Say target.device=auto.")
    return cfg.device


def pick_dtype(cfg: TargetConfig, device: str) -> str:
    """``auto`` is bfloat16 where the hardware multiplies it natively, else float32."""
    import torch

    chosen = _checked_dtype(cfg.dtype)
    if chosen != "auto":
        return chosen
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def cpu_multiplies_bfloat16() -> bool:
    """True with AMX or AVX512-BF16 (Linux); elsewhere bfloat16 is emulated and slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _checked_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UserError(f"target.dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    return dtype


def _use_our_attention(model: Any) -> None:
    from jetspec_train.targets import attention

    # Set on the configs directly: set_attn_implementation refuses models that merely lack the *sdpa* variant
    # (Gemma 2, GPT-OSS), whose soft caps and sinks our function computes.
    model.config._attn_implementation = attention.NAME
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention.NAME


def _load_config(source: Source) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.location, revision=source.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error


def _chat(cfg: TargetConfig, source: Source, config: Any) -> ChatTokenizer:
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, revision=source.revision, trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        if source.local:
            raise UserError(
                f"target {source.name!r}: its tokenizer cannot be read ({_first_line(error)}). The folder needs "
                "tokenizer.json (or tokenizer.model) and tokenizer_config.json."
            ) from error
        raise _unreadable(source, error) from error
    ends = _as_list(getattr(text_config(config), "eos_token_id", None))
    try:
        generation = GenerationConfig.from_pretrained(source.location, revision=source.revision or "main")
        ends += _as_list(generation.eos_token_id)
    except OSError:
        pass  # Many folders have no generation_config.json; the ids above then have to do.
    return ChatTokenizer(
        tokenizer,
        name=cfg.name,
        vocab_size=text_config(config).vocab_size,
        template=cfg.template,
        template_options=cfg.template_options,
        system_prompt=cfg.system_prompt,
        eos_ids=ends,
    )


def _identity(cfg: TargetConfig, source: Source, config: Any, chat: ChatTokenizer) -> TargetIdentity:
    revision = getattr(config, "_commit_hash", None) or source.fingerprint
    if revision is None:
        revision = weights_fingerprint(Path(source.location)) if source.local else str(source.revision)
    # to_diff_dict leaves out defaults, which differ between library versions.
    facts = {key: value for key, value in config.to_diff_dict().items() if key not in VOLATILE_CONFIG_KEYS}
    return TargetIdentity(cfg.name, revision, stable_hash(facts), chat.tokenizer_hash, chat.template_hash)


def weights_fingerprint(folder: Path) -> str:
    """A digest of local weights from samples of their bytes: reading 100 GB to name them would take minutes."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for part in range(64):
                file.seek(size * part // 64)
                digest.update(file.read(16384))
    return digest.hexdigest()


def _download_gguf(cfg: TargetConfig) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(cfg.name, str(cfg.gguf_file), revision=cfg.revision))
    except Exception as error:
        raise _unreadable(Source(cfg.name, cfg.name, cfg.revision, False, None), error) from error


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else [int(value)]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _unreadable(source: Source, error: BaseException) -> UserError:
    if source.local:
        return UserError(f"target {source.name!r} cannot be read from {source.location}: {_first_line(error)}")
    if "trust_remote_code" in str(error):
        return UserError(
            f"target {source.name!r} needs code of its own from the hub, which this project never runs. Choose a "
            "target whose architecture is part of transformers."
        )
    return UserError(
        f"target {source.name!r} is no local folder, and the model hub did not give it: {_first_line(error)} "
        "Check the spelling (target.name) and the network; for gated models log in with `hf auth login`; without a "
        "network give a local folder, a .gguf file, or use the embedded default target."
    )

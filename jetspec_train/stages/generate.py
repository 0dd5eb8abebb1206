"""stage=generate: answer one prompt with a bundle, streaming the text as it is accepted.

The prompt comes from ``prompt=``, ``prompt_file=`` or standard input. The answer goes to standard
output and nothing else does; figures go to standard error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.bundle import read_meta
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import Config, TargetConfig

STAGE = "generate"
CONTEXT_TOKENS = 6  # shown to the tokenizer before new tokens: spaces and joined characters depend on them


def plan(cfg: Config) -> dict[str, Any]:
    """What would be generated; reads the bundle's description only."""
    bundle = find_bundle(cfg)
    target = target_for(cfg.target, read_meta(bundle))
    source = "prompt=" if cfg.prompt is not None else cfg.prompt_file or "standard input"
    return {
        "stage": STAGE,
        "bundle": str(bundle),
        "target": dataclasses.asdict(target),
        "prompt": source,
        "decoding": dataclasses.asdict(cfg.decoding),
    }


def run(cfg: Config) -> None:
    """Stream an answer; raises UserError for a missing prompt or bundle and for a target that does not fit."""
    bundle = find_bundle(cfg)
    meta = read_meta(bundle)
    prompt = read_prompt(cfg)
    from jetspec_train.decoding.decoder import Decoder

    decoder = Decoder.from_bundle(bundle, settings=cfg.decoding, target_config=target_for(cfg.target, meta))
    if cfg.adapter is not None:
        decoder.load_adapter(cfg.adapter)
    chat = decoder.target.chat
    stream = TextStream(chat.decode, _write, stop=cfg.decoding.stop)
    tokens = chat.render([{"role": "user", "content": prompt}])
    generation = decoder.generate([tokens], on_tokens=lambda _, new: stream.add(new))[0]
    stream.finish()
    _write("\n")
    print(figures(generation), file=sys.stderr)


def find_bundle(cfg: Config) -> Path:
    """``bundle=`` if given, else what stage=export left in the run directory."""
    if cfg.bundle is not None:
        return Path(cfg.bundle)
    path = Path(cfg.run_dir) / "export" / "bundle"
    if not path.is_dir():
        raise UserError(f"Give bundle=FOLDER; the default, {path} of run_dir={cfg.run_dir}, does not exist.")
    return path


def target_for(asked: TargetConfig, meta: Mapping[str, Any]) -> TargetConfig:
    """How to load the bundle's own target: as the bundle says, except where the user asked for something.

    ``target.dtype`` and ``target.device`` are always the user's; a name (a local copy, say) and the
    template settings are when they differ from the defaults.
    """
    from jetspec_train.decoding.bundles import target_config_of

    own, defaults = target_config_of(dict(meta)), TargetConfig()
    changes: dict[str, Any] = {"dtype": asked.dtype, "device": asked.device}
    for field in dataclasses.fields(TargetConfig):
        if getattr(asked, field.name) != getattr(defaults, field.name):
            changes[field.name] = getattr(asked, field.name)
    if changes.get("name", own.name) != own.name:
        changes.setdefault("revision", asked.revision)
        changes.setdefault("gguf_file", asked.gguf_file)
    return dataclasses.replace(own, **changes)


def read_prompt(cfg: Config) -> str:
    """The prompt's text, unchanged. Raises UserError when there is none, or when it is not UTF-8."""
    if cfg.prompt is not None:
        text, source = cfg.prompt, "prompt="
    elif cfg.prompt_file is not None and cfg.prompt_file != "-":
        source = f"prompt_file={cfg.prompt_file}"
        try:
            data = Path(cfg.prompt_file).read_bytes()
        except OSError as error:
            raise UserError(f"{source} cannot be read: {error.strerror}.") from error
        text = _utf8(data, source)
    else:
        source = "standard input"
        if sys.stdin.isatty():
            print("Type the prompt, then Ctrl-D on a line of its own:", file=sys.stderr)
        text = _utf8(sys.stdin.buffer.read(), source)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # undecodable bytes of the command line arrive as lone surrogates
        raise UserError(f"The prompt from {source} is not valid UTF-8 text.") from error
    if not text.strip():
        raise UserError(f"The prompt from {source} is empty. Give prompt=TEXT, prompt_file=FILE or standard input.")
    return text


def _utf8(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"The prompt from {source} is not valid UTF-8 text (byte {error.start}).") from error


def _write(text: str) -> None:
    """To standard output at once, in whatever encoding the terminal has."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


class TextStream:
    """Turns accepted tokens into text that never has to be taken back.

    A character whose bytes are not complete yet waits, and so does text that may turn out to be the
    beginning of a stop string; a stop string itself is not shown.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None], stop: Sequence[str] = ()
    ) -> None:
        self._decode, self._write = decode, write
        self._stop = [text for text in stop if text]
        self._context: list[int] = []
        self._pending: list[int] = []
        self._held = ""
        self._stopped = False

    def add(self, tokens: Sequence[int]) -> None:
        """Show what has become certain with these tokens."""
        self._pending.extend(tokens)
        self._advance(final=False)

    def finish(self) -> None:
        """Show what was still held back."""
        self._advance(final=True)

    def _advance(self, final: bool) -> None:
        text = self._decode([*self._context, *self._pending])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return
        self._held += text[len(self._decode(self._context)) :]
        self._context = [*self._context, *self._pending][-CONTEXT_TOKENS:]
        self._pending = []
        places = [self._held.find(text) for text in self._stop if text in self._held]
        if places and not self._stopped:
            self._emit(self._held[: min(places)])
            self._stopped = True
        if not self._stopped:
            keep = 0 if final else self._possible_stop()
            self._emit(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]

    def _possible_stop(self) -> int:
        """How many of the held characters may be the beginning of a stop string."""
        longest = max((len(text) - 1 for text in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0

    def _emit(self, text: str) -> None:
        if text:
            self._write(text)


def figures(generation: Any) -> str:
    """One line: tokens, speed, acceptance length, where the time went."""
    stats = generation.stats
    count, seconds = len(generation.tokens), stats.seconds
    total = seconds.get("total", 0.0)
    decoding = total - seconds.get("prefill", 0.0)
    parts = [f"{count} tokens in {total:.2f} s ({generation.finish_reason})"]
    if decoding > 0 and count > 1:
        parts.append(f"{(count - 1) / decoding:.1f} tokens/s after the first ({stats.first_token_seconds:.2f} s)")
        shares = (f"{kind} {seconds.get(kind, 0.0) / decoding:.0%}" for kind in ("target", "draft", "host"))
        parts.append("time " + ", ".join(shares))
    if stats.target_forwards:
        parts.insert(2, f"acceptance length {stats.acceptance_length:.2f} over {stats.target_forwards} target forwards")
    return "; ".join(parts)

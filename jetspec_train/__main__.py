"""The command line: ``python -m jetspec_train stage=... key=value ...``.

Reads the arguments, shows help or the plan, runs one stage, and turns what can go wrong into one
line and an exit code:

    0    done (or nothing left to do)
    1    a defect of this project: a traceback is shown
    2    something the user can put right: one line says what
    85   a scheduler asked to stop; everything is saved, start the same command again
    130  interrupted with Ctrl-C; the same command continues the work
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from jetspec_train.artifacts.errors import UserError

if TYPE_CHECKING:
    from jetspec_train.config import Config

DONE, DEFECT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
STAGES_THAT_WRITE = ("pipeline", "distill", "train", "calibrate", "export", "evaluate")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. ``arguments`` default to the process's own."""
    words = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log file shows each line at once, as a terminal does
    # The deepspeed launcher adds this word; the rank is taken from the environment.
    words = [word for word in words if not word.startswith("--local_rank")]
    try:
        return _run(words)
    except UserError as error:
        print(f"jetspec_train: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("\nInterrupted. Finished work is kept; the same command continues it.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`... | head`). Python would complain again while closing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _run(words: list[str]) -> int:
    from jetspec_train import stages

    if not words or any(word in ("-h", "--help", "help") for word in words):
        from jetspec_train.stages.overview import help_text

        print(help_text())
        return DONE
    if words == ["--version"]:
        from jetspec_train.artifacts.provenance import package_version

        print(package_version("jetspec-train") or "not installed")
        return DONE
    from jetspec_train.config import load_config

    cfg = load_config(words)
    stage = stages.load_stage(cfg.stage)
    if cfg.plan:
        from jetspec_train.stages.overview import as_yaml

        print(as_yaml(stage.plan(cfg)), end="")
        return DONE
    if cfg.stage in STAGES_THAT_WRITE:
        _record(cfg, overwrite=False)
    stage.run(cfg)
    if cfg.stage in STAGES_THAT_WRITE:
        _record(cfg, overwrite=True)
    return DONE


def _record(cfg: Config, *, overwrite: bool) -> None:
    """Keep the resolved configuration as run_dir/config.yaml: that of the first, then of the last finished call.

    Only the first process of a distributed run writes.
    """
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        return
    from pathlib import Path

    from jetspec_train.artifacts.files import atomic_write
    from jetspec_train.config import to_dict
    from jetspec_train.stages.overview import as_yaml

    path = Path(cfg.run_dir) / "config.yaml"
    if overwrite or not path.exists():
        atomic_write(path, as_yaml(to_dict(cfg)))


if __name__ == "__main__":
    sys.exit(main())

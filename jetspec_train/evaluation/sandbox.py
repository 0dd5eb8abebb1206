"""Running a model's code against tests, in a process that can do little: for ``evaluate.run_code=true`` alone.

The process has no network (a network namespace of its own where the system allows one, and in any case no sockets),
limited memory, processor time and file size, an empty environment and a temporary folder as its only home, and it is
killed with its children when time is up. That stops accidents; it is no prison for code that means harm: run it in a
container where the model is not trusted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

SECONDS = 10  # of processor time, and of the clock
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PREAMBLE = """\
import socket, math, re, sys, collections, itertools, functools, heapq, string
from typing import *
def _no_network(*arguments, **options):
    raise OSError("no network here")
socket.socket = socket.create_connection = socket.getaddrinfo = _no_network
"""


def code_of(answer: str) -> str:
    """The Python program of an answer: its fenced blocks one after the other, or all of it without a fence."""
    blocks = _FENCE.findall(answer)
    return "\n".join(blocks) if blocks else answer


def passes_tests(answer: str, tests: str, seconds: float = SECONDS) -> bool:
    """Whether the answer's code, followed by ``tests``, ends without an error within ``seconds``."""
    program = f"{_PREAMBLE}\n{code_of(answer)}\n\n{tests}\n"
    with tempfile.TemporaryDirectory(prefix="jetspec-code-") as folder:
        process = subprocess.Popen(
            [*_without_network(), sys.executable, "-I", "-c", program],
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limits(seconds),
        )
        try:
            return process.wait(timeout=seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            _kill_group(process)


def _limits(seconds: float) -> Callable[[], None]:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }

    def apply() -> None:
        for kind, limit in limits.items():
            resource.setrlimit(kind, (limit, limit))

    return apply


@functools.cache
def _without_network() -> tuple[str, ...]:
    """Words that start a program in a network namespace of its own; none where this system does not allow that."""
    words = ("unshare", "--map-root-user", "--net")
    if shutil.which(words[0]) is None:
        return ()
    tried = subprocess.run([*words, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return words if tried.returncode == 0 else ()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

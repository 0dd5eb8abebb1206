"""Files are whole or absent; records survive torn lines; hashes depend on content alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.artifacts import files
from jetspec_train.artifacts.errors import UserError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_atomic_write_replaces_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    files.atomic_write(path, "old")
    files.atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_failed_write_keeps_the_old_content(tmp_path, monkeypatch):
    path = files.atomic_write(tmp_path / "file.txt", "old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(UserError, match="disk is full"):
        files.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_writer_killed_at_any_instant_leaves_a_whole_file(tmp_path):
    path = tmp_path / "state.json"
    files.atomic_json(path, {"n": -1, "pad": "x" * 100_000})
    code = (
        "import sys; from jetspec_train.artifacts.files import atomic_json\n"
        "print('up', flush=True)\n"
        "for n in range(10**6): atomic_json(sys.argv[1], {'n': n, 'pad': 'x' * 100000})"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
    for _ in range(200):
        assert len(json.loads(path.read_text())["pad"]) == 100_000
    writer.kill()
    writer.wait()
    assert len(json.loads(path.read_text())["pad"]) == 100_000


def test_nan_is_refused_in_json(tmp_path):
    with pytest.raises(ValueError):
        files.atomic_json(tmp_path / "x.json", {"a": float("nan")})


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_stable_hash_ignores_the_order_of_keys_only(value):
    shuffled = dict(reversed(list(value.items())))
    assert files.stable_hash(value) == files.stable_hash(shuffled)
    assert files.stable_hash({**value, "one more": 1}) != files.stable_hash(value)


@settings(max_examples=50, deadline=None)
@given(st.lists(JSON, max_size=5), st.integers(0, 200))
def test_records_before_a_torn_line_survive_and_appending_goes_on(records, cut):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        for record in records:
            files.append_jsonl(path, record)
        assert list(files.read_jsonl(path)) == records
        if not records:
            return
        lines = path.read_bytes().splitlines(keepends=True)
        last = lines[-1]
        torn = b'{"torn": "' + last[: cut % len(last)].replace(b"\n", b"")
        path.write_bytes(b"".join(lines) + torn)
        files.append_jsonl(path, "after")
        assert list(files.read_jsonl(path)) == [*records, "after"]


def test_too_little_disk_names_need_and_place(tmp_path):
    with pytest.raises(UserError, match=r"The cache needs about .* on the disk of .*absent.* are free"):
        files.require_free_space(tmp_path / "absent" / "below", 1e21, "The cache")
    files.require_free_space(tmp_path, 1, "The cache")


def test_a_file_where_a_folder_is_needed(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="is a file"):
        files.make_folder(tmp_path / "runs")
    with pytest.raises(UserError, match="a part of the path is a file"):
        files.make_folder(tmp_path / "runs" / "one")


def test_publish_folder_replaces_the_old_one(tmp_path):
    for content in ("old", "new"):
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / content).write_text(content)
        files.publish_folder(tmp_path / "made", tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"]
    assert os.listdir(tmp_path / "final") == ["new"]

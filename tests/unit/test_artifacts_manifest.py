"""A stage counts as done only by its manifest, and only for the settings it was done with."""

import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import (
    MANIFEST,
    is_current,
    read_manifest,
    require_manifest,
    verify_outputs,
    write_manifest,
)

IDENTITY = {"draft": {"layers": 2, "block": 8}, "seed": 0, "betas": (0.9, 0.95)}


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.bin").write_bytes(b"12345")
    (tmp_path / "b.json").write_text("{}")
    write_manifest(
        tmp_path,
        stage="train",
        identity=IDENTITY,
        inputs={"samples": "abc"},
        outputs=["part/a.bin", tmp_path / "b.json"],
        counts={"in": 3, "out": 3},
        seconds=1.5,
    )
    return tmp_path


def test_round_trip(stage):
    manifest = read_manifest(stage)
    assert manifest is not None and manifest.counts == {"in": 3, "out": 3} and manifest.inputs == {"samples": "abc"}
    assert sorted(manifest.outputs) == ["b.json", "part/a.bin"] and manifest.outputs["part/a.bin"]["bytes"] == 5
    assert manifest.versions["python"] and manifest.created
    verify_outputs(stage, manifest)
    assert is_current(stage, IDENTITY)
    assert is_current(stage, {**IDENTITY, "betas": [0.9, 0.95]})  # JSON knows no tuples


def test_without_a_manifest_nothing_is_done(stage):
    (stage / MANIFEST).unlink()
    assert read_manifest(stage) is None and not is_current(stage, IDENTITY)
    with pytest.raises(UserError, match="run stage=train"):
        require_manifest(stage, "train")


def test_another_configuration_is_refused_with_the_differing_keys(stage):
    with pytest.raises(UserError) as caught:
        is_current(stage, {"draft": {"layers": 3, "block": 8}, "seed": 0, "betas": (0.9, 0.95), "new": 1})
    message = str(caught.value)
    assert "draft.layers: 2 there, 3 asked" in message and "new: nothing there, 1 asked" in message
    assert "block" not in message and "seed" not in message and "run_dir" in message


def test_a_missing_or_changed_output_is_named(stage):
    manifest = read_manifest(stage)
    (stage / "part" / "a.bin").write_bytes(b"12346")
    assert is_current(stage, IDENTITY)  # sizes only: instant
    with pytest.raises(UserError, match=r"a\.bin was changed"):
        verify_outputs(stage, manifest)
    (stage / "part" / "a.bin").write_bytes(b"123456")
    with pytest.raises(UserError, match="has 6 bytes, its manifest says 5"):
        is_current(stage, IDENTITY)
    (stage / "part" / "a.bin").unlink()
    with pytest.raises(UserError, match="listed in the manifest but missing"):
        is_current(stage, IDENTITY)


def test_a_broken_manifest_is_named(stage):
    (stage / MANIFEST).write_text('{"stage": "tr')
    with pytest.raises(UserError, match="not valid JSON"):
        read_manifest(stage)
    (stage / MANIFEST).write_text("[]")
    with pytest.raises(UserError, match="lacks its fields"):
        read_manifest(stage)


def test_digest_follows_content_not_time(stage):
    first = read_manifest(stage)
    again = write_manifest(stage, stage="train", identity=IDENTITY, outputs=first.outputs, seconds=99)
    assert again.digest() == first.digest()
    assert write_manifest(stage, stage="train", identity={}, outputs=first.outputs).digest() != first.digest()

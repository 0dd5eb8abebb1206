"""A bundle loads bit for bit, or is refused with the reason; a hostile one reaches nothing."""

import hashlib
import json
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from jetspec_train.artifacts.bundle import check_safetensors, check_target, read_bundle, read_meta, write_bundle
from jetspec_train.artifacts.errors import UserError

TARGET = {"name": "org/target", "revision": None, "config_hash": "c" * 64, "tokenizer_hash": "t" * 64}
TARGET["template_hash"] = "m" * 64


def make(path, **changes):
    tensors = {"draft.fc.weight": torch.randn(3, 4), "draft.tied": torch.arange(4).to(torch.bfloat16)}
    tensors["draft.view"] = tensors["draft.fc.weight"].T  # shares memory and is not contiguous
    arguments = {
        "bundle": {"target": TARGET},
        "config": {"draft": {"layers": 1}, "verifier": None},
        "tensors": tensors,
        "calibration": {"temperatures": [1.0]},
        "card": "# a card",
        **changes,
    }
    write_bundle(path, **arguments)
    return tensors


@pytest.fixture
def bundle(tmp_path):
    make(tmp_path / "bundle")
    return tmp_path / "bundle"


def relist(bundle, name, **described):
    """Change what bundle.json says of one file, keeping the rest right."""
    meta = json.loads((bundle / "bundle.json").read_text())
    file = bundle / name
    facts = {}
    if file.is_file():
        facts = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    meta["files"][name] = {**facts, **described}
    (bundle / "bundle.json").write_text(json.dumps(meta))


def refused(bundle, match):
    with pytest.raises(UserError, match=match):
        read_bundle(bundle)


def test_round_trip_is_bit_exact(tmp_path):
    tensors = make(tmp_path / "bundle")
    read = read_bundle(tmp_path / "bundle")
    assert read.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read.tensors[name].dtype == tensor.dtype and torch.equal(read.tensors[name], tensor)
    assert read.config == {"draft": {"layers": 1}, "verifier": None}
    assert read.calibration == {"temperatures": [1.0]} and read.cost_profile is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle"]


def test_writing_again_replaces_the_whole_bundle(bundle):
    make(bundle, calibration=None)
    assert read_bundle(bundle).calibration is None and not (bundle / "calibration.json").exists()


def test_an_interrupted_write_leaves_the_old_bundle(bundle, monkeypatch):
    before = read_meta(bundle)
    monkeypatch.setattr("jetspec_train.artifacts.bundle.publish_folder", lambda *_: (_ for _ in ()).throw(OSError()))
    with pytest.raises(OSError):
        make(bundle)
    assert read_meta(bundle) == before and [p.name for p in bundle.parent.iterdir()] == ["bundle"]


def test_not_a_bundle(tmp_path, bundle):
    refused(tmp_path / "absent", "is not a folder")
    refused(tmp_path, r"Did you mean bundle=.*bundle\?")
    (bundle / "bundle.json").write_text("{")
    refused(bundle, "not valid JSON")


@pytest.mark.parametrize("key, value", [("format_version", 2), ("format_version", None), ("format", "other")])
def test_an_unknown_format_is_refused_with_both_values(bundle, key, value):
    meta = json.loads((bundle / "bundle.json").read_text())
    meta[key] = value
    (bundle / "bundle.json").write_text(json.dumps(meta))
    refused(bundle, str(value))


@pytest.mark.parametrize("name", ["../secret.json", "/etc/hostname.json", "a/../../secret.json", "..\\secret.json", ""])
def test_an_entry_outside_the_folder_is_refused(bundle, name):
    (bundle.parent / "secret.json").write_text("{}")
    relist(bundle, name, sha256="0", bytes=2)
    refused(bundle, "outside the bundle's folder")


def test_a_link_that_leads_outside_is_refused(bundle):
    outside = bundle.parent / "outside.safetensors"
    (bundle / "model.safetensors").rename(outside)
    (bundle / "model.safetensors").symlink_to(outside)
    refused(bundle, "leads outside")


def test_absent_wrong_size_wrong_hash(bundle):
    weights = (bundle / "model.safetensors").read_bytes()
    (bundle / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    refused(bundle, "SHA-256")
    (bundle / "model.safetensors").write_bytes(weights + b"0")
    refused(bundle, f"has {len(weights) + 1} bytes, bundle.json says {len(weights)}")
    (bundle / "model.safetensors").unlink()
    refused(bundle, "the file is missing")


def test_a_pickle_is_refused_and_never_loaded(bundle):
    class Explodes:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    (bundle / "more.bin").write_bytes(pickle.dumps(Explodes()))
    relist(bundle, "more.bin")
    refused(bundle, "only safetensors are read")


def test_a_file_of_an_unknown_kind_is_refused(bundle):
    (bundle / "more.py").write_text("")
    relist(bundle, "more.py")
    refused(bundle, "kind '.py' are refused")


def test_a_pickle_under_the_name_of_the_weights_is_refused(bundle):
    (bundle / "model.safetensors").write_bytes(pickle.dumps({"a": 1}) * 50)
    relist(bundle, "model.safetensors")
    refused(bundle, "not a safetensors file")


def test_a_configuration_that_names_code_is_refused(bundle):
    (bundle / "config.json").write_text(json.dumps({"draft": {"auto_map": {"AutoModel": "evil.Model"}}}))
    relist(bundle, "config.json")
    refused(bundle, "auto_map")


def header_file(path, header, body=b"\0" * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


@pytest.mark.parametrize(
    "header, match",
    [
        ({"w": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]}}, "needs"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 60]}}, "place in the file"),
        ({"w": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, "place in the file"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "gap"),
        ({"w": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}}, "malformed"),
        ({"w": {"dtype": "F32", "shape": "four", "data_offsets": [0, 16]}}, "malformed"),
        ({"w": {"shape": [4]}}, "malformed"),
        ({"w": 3}, "malformed"),
        ([1], "not an object"),
        (b"{" * 5000, "does not parse"),
    ],
)
def test_a_malformed_weight_header_is_refused_before_loading(tmp_path, header, match):
    with pytest.raises(UserError, match=match):
        check_safetensors(header_file(tmp_path / "w.safetensors", header))


def test_an_absurd_header_length_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(UserError, match="claims"):
        check_safetensors(path)


def test_the_header_check_agrees_with_the_library(tmp_path):
    tensors = {"a": torch.zeros(0, 3), "b": torch.ones(2, 3, dtype=torch.float16), "c": torch.tensor(5)}
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    found = check_safetensors(tmp_path / "w.safetensors")
    assert {name: shape for name, (_, shape) in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_be_refused(data):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        path.write_bytes(data)
        with pytest.raises(UserError):
            check_safetensors(path)


def test_another_target_is_refused_with_both_values():
    meta = {"target": TARGET}
    check_target(meta, {**TARGET, "name": "/a/local/copy"})
    for key, word in [("config_hash", "configuration"), ("tokenizer_hash", "tokenizer"), ("template_hash", "template")]:
        with pytest.raises(UserError) as caught:
            check_target(meta, {**TARGET, "name": "other", key: "f" * 64})
        message = str(caught.value)
        assert "org/target" in message and "other" in message and word in message
        assert str(TARGET[key])[:12] in message and "f" * 12 in message
    with pytest.raises(UserError, match="does not say which target"):
        check_target({}, TARGET)

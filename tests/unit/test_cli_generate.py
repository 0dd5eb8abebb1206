"""stage=generate: where prompts come from, and text that is never taken back."""

import io
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import Config, TargetConfig
from jetspec_train.stages import generate


def stdin(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))


def test_the_three_sources_of_a_prompt(monkeypatch, tmp_path):
    stdin(monkeypatch, b" from standard input\n")
    (tmp_path / "p q.txt").write_bytes("from a file \r\n日".encode())
    assert generate.read_prompt(Config(prompt=" as typed ")) == " as typed "
    assert generate.read_prompt(Config(prompt_file=str(tmp_path / "p q.txt"))) == "from a file \r\n日"
    assert generate.read_prompt(Config()) == " from standard input\n"


def test_bad_prompts_are_refused(monkeypatch, tmp_path):
    stdin(monkeypatch, b"\xff\xfe")
    for cfg, match in [
        (Config(prompt=" \n"), "prompt= is empty"),
        (Config(prompt_file=str(tmp_path / "absent")), "No such file"),
        (Config(), "standard input is not valid UTF-8"),
        (Config(prompt="broken \udcff"), "not valid UTF-8"),
    ]:
        with pytest.raises(UserError, match=match):
            generate.read_prompt(cfg)


def test_without_a_bundle(tmp_path):
    with pytest.raises(UserError, match="Give bundle=FOLDER"):
        generate.find_bundle(Config(run_dir=str(tmp_path)))
    (tmp_path / "export" / "bundle").mkdir(parents=True)
    assert generate.find_bundle(Config(run_dir=str(tmp_path))) == tmp_path / "export" / "bundle"


def test_the_bundle_says_how_its_target_is_loaded_unless_the_user_does():
    target = {"name": "org/model", "revision": "abc", "template": "plain", "template_options": {"a": 1}}
    own = generate.target_for(TargetConfig(dtype="float32"), {"target": target})
    assert own == TargetConfig(
        name="org/model", revision="abc", template="plain", template_options={"a": 1}, dtype="float32"
    )
    local = generate.target_for(TargetConfig(name="/models/copy", device="cpu"), {"target": target})
    assert (local.name, local.revision, local.device, local.template) == ("/models/copy", None, "cpu", "plain")


def stream(text: str, sizes: list[int], stop: list[str]) -> tuple[str, list[str]]:
    """Feed the bytes of a text as tokens, ``sizes`` at a time."""
    shown: list[str] = []
    reader = generate.TextStream(lambda tokens: bytes(tokens).decode("utf-8", "replace"), shown.append, stop)
    data, place = list(text.encode()), 0
    for size in sizes:
        if place < len(data):
            reader.add(data[place : place + size])
            place += size
    reader.add(data[place:])
    reader.finish()
    return "".join(shown), shown


# A replacement character in the text itself may wait for its successor; it is not lost either.
TEXT = st.text(st.sampled_from("ab \n日é🎉\N{REPLACEMENT CHARACTER}"), max_size=30)


@settings(deadline=None)
@given(TEXT, st.lists(st.integers(1, 7), max_size=40))
def test_streamed_text_is_the_text(text, sizes):
    whole, shown = stream(text, sizes, [])
    assert whole == text and all(shown)


@settings(deadline=None)
@given(TEXT, st.lists(st.integers(1, 7), max_size=40), st.lists(st.text("ab \n", min_size=1, max_size=3), max_size=2))
def test_streaming_stops_where_the_stop_string_begins(text, sizes, stop):
    places = [text.find(word) for word in stop if word in text]
    assert stream(text, sizes, stop)[0] == (text[: min(places)] if places else text)


def test_text_comes_as_early_as_it_is_certain():
    shown: list[str] = []
    reader = generate.TextStream(lambda tokens: bytes(tokens).decode("utf-8", "replace"), shown.append, ["STOP"])
    reader.add(b"one ")
    assert shown == ["one "]
    reader.add("é".encode()[:1])
    assert shown == ["one "]
    reader.add("é".encode()[1:] + b" ST")
    assert shown == ["one ", "é "]
    reader.add(b"AR")
    assert shown == ["one ", "é ", "STAR"]

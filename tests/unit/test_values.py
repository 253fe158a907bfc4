"""Amounts as users write them, hashes that are the same everywhere, and files that are never seen half-written."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from autocompile.errors import UserError
from autocompile.values import (
    Value,
    digest,
    nearest,
    parse_duration,
    parse_percent,
    parse_tokens,
    parse_yaml,
    read_text,
    shown,
    write_aside,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        pytest.param("90s", 90, id="seconds"),
        pytest.param("30m", 1800, id="minutes"),
        pytest.param("1.5h", 5400, id="part of an hour"),
        pytest.param("1h30m", 5400, id="hours and minutes"),
        pytest.param("1d", 86400, id="a day"),
    ],
)
def test_a_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "30 m", "-5m", "5m!", "1h-30m", "0s", "0h0m"])
def test_what_is_no_duration(text):
    with pytest.raises(UserError, match="budget: expected") as caught:
        parse_duration(text)
    assert f'found "{text}"' in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("1000000", 1_000_000, id="a plain number"),
        pytest.param("200k", 200_000, id="thousands"),
        pytest.param("50M", 50_000_000, id="millions"),
        pytest.param("1.5B", 1_500_000_000, id="part of a billion"),
    ],
)
def test_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "M", "-5M", "5T", "5 M", "1e6"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(UserError, match="tokens: expected a number such as 50M or 200k"):
        parse_tokens(text)


@pytest.mark.parametrize(("text", "share"), [("8%", 0.08), ("0%", 0), ("12.5%", 0.125)])
def test_a_percentage(text, share):
    assert parse_percent(text) == share


@pytest.mark.parametrize("text", ["", "8", "0.08", "%", "-8%", "100%", "8 %"])
def test_what_is_no_percentage(text):
    with pytest.raises(UserError, match="memory headroom: expected a percentage such as 8%"):
        parse_percent(text)


class Pair(Value):
    left: int
    right: str


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, id="the order of keys"),
        pytest.param(Pair(left=1, right="x"), {"right": "x", "left": 1}, True, id="a value and its plain data"),
        pytest.param([1, 2], [2, 1], False, id="the order of a list"),
        pytest.param({"a": 1}, {"a": "1"}, False, id="a number and its text"),
        pytest.param({"a": 1}, {"a": True}, False, id="a number and a boolean"),
    ],
)
def test_equal_values_hash_alike(left, right, same):
    assert (digest(left) == digest(right)) is same


def test_the_digest_is_of_the_canonical_json():
    assert digest({"b": [1, None], "a": "x"}) == hashlib.sha256(b'{"a":"x","b":[1,null]}').hexdigest()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param("layr", "did you mean layer?", id="a slip of the pen"),
        pytest.param("LAYER", "did you mean layer?", id="other capitals"),
        pytest.param("qwen", "did you mean Qwen?", id="capitals of the known name"),
        pytest.param("zzz", "known: layer, Qwen", id="nothing near"),
    ],
)
def test_nearest(name, hint):
    assert nearest(name, ["layer", "Qwen"]) == hint


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(None, "nothing", id="nothing"),
        pytest.param(True, "true", id="a boolean as YAML writes it"),
        pytest.param(1.5, "1.5", id="a number"),
        pytest.param("a\nb", '"a\\nb"', id="text stays on one line"),
        pytest.param([1], "a list", id="a list"),
        pytest.param([], "an empty list", id="an empty list"),
        pytest.param({"a": 1}, "a mapping", id="a mapping"),
    ],
)
def test_shown(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("a:\n  - b\n c: d", "f.yaml:3: not YAML: ", id="a broken list"),
        pytest.param("a: 1\nb: \0", "f.yaml:2: not YAML: expected text, found character U+0000", id="a NUL"),
        pytest.param("a: 1\n---\nb: 1", "f.yaml:2: not YAML: but found another document", id="two documents"),
        pytest.param("a: 2026-02-30", "f.yaml: not YAML: day is out of range for month", id="no date"),
    ],
)
def test_what_is_no_yaml(text, complaint):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, source="f.yaml")
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


def test_a_text_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_text(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_a_file_written_aside_is_readable_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "best.yaml"
    write_aside(path, "one")
    write_aside(path, "two")
    assert (path.read_text(), os.listdir(tmp_path)) == ("two", ["best.yaml"])
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_keeps_the_old_text_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "best.yaml"
    write_aside(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_aside(path, "new \ud800")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["best.yaml"])


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "progress.json"
    texts = ["a" * 300_000, "b" * 200_000]
    write_aside(path, texts[0])
    written = threading.Event()

    def write() -> None:
        for number in range(100):
            write_aside(path, texts[number % 2])
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not written.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= set(texts)

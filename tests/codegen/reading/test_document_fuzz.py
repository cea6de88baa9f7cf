"""Files that are nearly right: every loader reads what is whole, and refuses the rest by the file's name.

Hypothesis changes a file that is right, in its bytes, in the words of its text or in its arrays, and shrinks what
fails.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.loaders import HEADER, LOADERS, PARTS, Loader, archive

MINUTES = float(os.environ.get("EMBFORGE_FUZZ_MINUTES", "10"))
"""How long `make soak` looks for a file that fails."""

WORDS = re.compile(rb'"(?:\\.|[^"\\\n])*"|[\w.+-]+|[\[\]{}=:,]')
ODD_WORDS = [
    b"", b"0", b"-1", b"1e6", b"1e400", b"-0.0", b"9" * 30, b"9" * 5000, b"1e-999", b"0x10", b"1_0", b"nan", b"-inf",
    b"NaN", b"Infinity", b"true", b"null", b"1979-05-27", b"07:32:00", b'""', b'"\\u0000"', b'"\\ud800"', b'"a/b"',
    b'".."', b'"self"', b"'''x'''", b'"""\n"""', b"\xc3\xa9", b"\xff", b"\0", b"\n", b"#", b"[]", b"{}", b"[[]]",
    b"[1, [2, {}]]", b'{"a": 1}', b"{a = 1}", b"[" * 40 + b"]" * 40, b"[" * 2000 + b"]" * 2000, b"a." * 300 + b"a = 1",
    b'"' + b"x" * 1000 + b'"', b"[[table]]", b"[table]", b'"fp32"', b'"kind"', b"1" + b"0" * 18, b"9223372036854775808",
]  # fmt: skip
"""What replaces a word, or is put between two."""
ODD_ARRAYS: list[Any] = [
    np.zeros(0), np.zeros(0, np.int64), np.zeros((2, 3), np.int64), np.array(5), np.array([-1, 2]), np.array([True]),
    np.array([2**62] * 4 + [1]), np.array([2**63 - 1, 1, 1]), np.array([1.5, np.nan]), np.array([1j]),
    np.array([1, 2], ">i8"), np.array([1, 2], np.int8), np.array([2**64 - 1], np.uint64), np.array(["a"]),
    np.array("{}"),
    np.array(b"bytes"), np.array([(1, 2)], [("a", "i4"), ("b", "i8")]), np.array("2026-01-01", "datetime64[s]"),
    np.full(5, np.nan, np.float32), np.ones(5, np.float16), np.array([0] * 6), np.array([5, 0, 0, 0, 0, 0]),
]  # fmt: skip


@st.composite
def other_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """A few bytes are changed, missing, doubled or new."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["flip", "drop", "double", "new", "cut"]))
        if kind == "flip" and begin < len(data):
            data[begin] ^= 1 << draw(st.integers(0, 7))
        elif kind == "drop":
            del data[begin:end]
        elif kind == "double":
            data[begin:begin] = data[begin:end]
        elif kind == "new":
            data[begin:begin] = draw(st.binary(max_size=8))
        elif kind == "cut":
            del data[begin:]
    return bytes(data)


@st.composite
def other_words(draw: st.DrawFn, good: bytes) -> bytes:
    """A few words are replaced by odd ones or by other words of the file."""
    for _ in range(draw(st.integers(1, 3))):
        words = list(WORDS.finditer(good))
        if not words:
            return good
        place = draw(st.sampled_from(words))
        word = draw(st.sampled_from(ODD_WORDS) | st.sampled_from([w[0] for w in words]))
        begin = place.start() if draw(st.booleans()) else place.end()
        good = good[:begin] + word + good[place.end() :]
    return good


@st.composite
def other_arrays(draw: st.DrawFn) -> bytes:
    """A trace in which arrays are odd or missing, or words of the header are odd."""
    parts = dict(PARTS)
    for name in draw(st.lists(st.sampled_from(list(parts)), min_size=1, max_size=2, unique=True)):
        kind = draw(st.sampled_from(["drop", "odd", "numbers", "words"]))
        if kind == "drop":
            del parts[name]
        elif kind == "odd":
            parts[name] = draw(st.sampled_from(ODD_ARRAYS))
        elif kind == "numbers":
            numbers = draw(st.lists(st.integers(-2, 30) | st.integers(-(2**63), 2**63 - 1), max_size=7))
            parts[name] = np.array(numbers, np.int64)
        else:
            text = draw(other_words(HEADER.encode())).decode("utf-8", "replace").replace("\0", " ")
            parts["header"] = np.array(text)
    return archive(**parts)


@st.composite
def other_members(draw: st.DrawFn) -> bytes:
    """A trace one of whose arrays is damaged before it is packed, so that the archive is whole."""
    data = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(LOADERS["trace"].good)) as source, zipfile.ZipFile(data, "w") as made:
        damaged = draw(st.sampled_from(source.namelist()))
        for name in source.namelist():
            good = source.read(name)
            made.writestr(name, draw(other_bytes(good[:160]) | other_words(good[:160])) if name == damaged else good)
    return data.getvalue()


def files(kind: str) -> st.SearchStrategy[bytes]:
    good = LOADERS[kind].good
    if kind == "trace":
        return other_bytes(good) | other_arrays() | other_members()
    return other_bytes(good) | other_words(good)


def read(loader: Loader, data: bytes) -> None:
    """Reads the file and asserts that an error is one of embforge's own, short and printable, and names the file."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / loader.file
        path.write_bytes(data)
        try:
            loader.read(path)
        except loader.error as error:
            assert folder in str(error)
            assert len(str(error)) < 5000
            str(error).encode()


def search(kind: str, examples: int, anew: bool) -> None:
    loader = LOADERS[kind]

    @settings(max_examples=examples, derandomize=not anew, database=None, suppress_health_check=list(HealthCheck))
    @given(data=files(kind))
    def run(data: bytes) -> None:
        read(loader, data)

    run()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_few_files_are_read_or_refused(kind: str) -> None:
    search(kind, 30, anew=False)


@pytest.mark.soak
def test_files_are_read_or_refused() -> None:
    end = time.monotonic() + MINUTES * 60
    while time.monotonic() < end:
        for kind in LOADERS:
            search(kind, 200, anew=True)

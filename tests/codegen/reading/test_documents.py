"""Files with wrong content or of a wrong kind: the error is one sentence that names the file."""

from __future__ import annotations

import io
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.loaders import LOADERS, PARTS, archive

from embforge.codegen.errors import MissingKernelError, WorkloadError
from embforge.codegen.reading.documents import MOST_DEPTH, DocumentError, parse_json, parse_toml, read_file, shown
from embforge.trace.file_format import read_trace


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe\x00",
    "half of a pair": rb'{"schema": "\ud800", "name": "\ud800"}',
    "a list": b"[1, 2]",
    "a text": b'"text"',
    "null": b"null",
    "a number of 5000 digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "deep": deep(100_000),
    "deep, but not too deep for Python": deep(300),
    "deep in TOML": b"table = " + deep(300),
    "deep keys": b"a." * 500 + b"a = 1",
    "NaN": b'{"schema": NaN, "nodes": NaN}',
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", LOADERS)
def test_content_of_any_kind_is_refused_by_name(kind: str, content: str, tmp_path: Path) -> None:
    loader, path = LOADERS[kind], tmp_path / LOADERS[kind].file
    path.write_bytes(CONTENTS[content])
    if not loader.error:
        loader.read(path)
    else:
        with pytest.raises(loader.error) as caught:
            loader.read(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 1500


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [Path.mkdir, _pipe, _socket, _loop, _device])
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "plan text"])
def test_a_path_that_is_no_regular_file_is_refused_by_name(
    kind: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    loader, path = LOADERS[kind], Path(LOADERS[kind].file)
    make(path)
    if not loader.error:
        loader.read(path)
    else:
        with pytest.raises(loader.error, match=path.name):
            loader.read(path)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_good_file_is_read_directly_and_through_a_link(kind: str, tmp_path: Path) -> None:
    loader = LOADERS[kind]
    (tmp_path / "real").write_bytes(loader.good)
    (tmp_path / loader.file).symlink_to(tmp_path / "real")
    if kind == "manifest":  # its kernel is not there, and only that is wrong
        with pytest.raises(MissingKernelError, match="whose source for this plan differs"):
            loader.read(tmp_path / loader.file)
    else:
        loader.read(tmp_path / loader.file)


LARGE = 2**62
WRAPPING: dict[str, tuple[dict[str, Any], str]] = {
    "lengths whose sum goes around": (
        {"lengths": np.array([LARGE, LARGE, LARGE, LARGE, 4, 1])},
        f"bags hold {4 * LARGE + 5} ids",
    ),
    "negative lengths that add up": ({"lengths": np.array([-1, 2, 2, 0, 1, 1])}, "bags hold 5 ids"),
    "sizes whose sum goes around": (
        {"sizes": np.array([LARGE, LARGE, LARGE, LARGE, 3])},
        f"5 batches of {4 * LARGE + 3} samples",
    ),
    "sizes whose bags go around": ({"sizes": np.array([LARGE * 2 - 1, 4])}, "do not fit 2 features"),
    "negative sizes that add up": ({"sizes": np.array([-1, 4])}, "do not fit 2 features"),
    "unsigned lengths": ({"lengths": np.array([1, 0, 2, 0, 1, 1], np.uint64)}, "lengths is uint64"),
    "no features": (
        {"header": np.array('{"schema": 1, "features": [], "rows": [], "shape": ""}'), "lengths": np.zeros(0, int)},
        r"its features are \[\]",
    ),
    "a feature twice": (
        {"header": np.array('{"schema": 1, "features": ["f", "f"], "rows": [10, 20], "shape": ""}')},
        "not different names",
    ),
    "rows that are no number": (
        {"header": np.array('{"schema": 1, "features": ["f", "g"], "rows": [true, 20], "shape": ""}')},
        "lacks features, rows or shape",
    ),
    "rows without end": (
        {"header": np.array(f'{{"schema": 1, "features": ["f", "g"], "rows": [{"9" * 99}, 20], "shape": ""}}')},
        "its tables have",
    ),
    "characters that do not exist": ({"header": np.array(0x7FFFFFFF, np.uint32).view("<U1")}, "header cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPING)
def test_arrays_whose_sums_wrap_around_are_refused(name: str, tmp_path: Path) -> None:
    change, named = WRAPPING[name]
    (tmp_path / "t.npz").write_bytes(archive(**PARTS | change))
    with pytest.raises(WorkloadError, match=f"t.npz: .*{named}"):
        read_trace(tmp_path / "t.npz")


def npy(shape: str, data: bytes = b"", kind: str = "<i8") -> bytes:
    """An array's file whose header may contradict its data."""
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


BOMBS: dict[str, tuple[bytes, str]] = {
    "a terabyte of shape": (npy("(1099511627776,)"), "0 bytes for an array of shape"),
    "a shape that goes around": (npy("(4294967296, 4294967296)"), "0 bytes for an array of shape"),
    "a negative shape": (npy("(-1, -1)", b"12345678"), "8 bytes for an array of shape"),
    "fewer bytes": (npy("(2,)", b"12345678"), "8 bytes for an array of shape"),
    "objects": (npy("(1,)", b"12345678", "|O"), "Python objects"),
    "nested parentheses": (npy("(" * 3000), "Error"),
    "no array": (b"PK", "ValueError"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_arrays_whose_header_claims_too_much_are_refused(name: str, tmp_path: Path) -> None:
    member, named = BOMBS[name]
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as file:
        file.writestr("header.npy", member)
    with pytest.raises(WorkloadError, match=f"t.npz: cannot be read as a trace .*({named})"):
        read_trace(tmp_path / "t.npz")


def test_an_archive_that_unpacks_to_terabytes_is_refused(tmp_path: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("values.npy", bytes(2**16))
    patched = bytearray(data.getvalue())
    directory = patched.rindex(b"PK\x01\x02")
    patched[directory + 24 : directory + 28] = (2**32 - 2).to_bytes(4, "little")  # its size, as the archive's list says
    patched = patched[:directory] + patched[directory:]
    (tmp_path / "t.npz").write_bytes(patched)
    with pytest.raises(WorkloadError, match=r"t\.npz: cannot be read as a trace"):
        read_trace(tmp_path / "t.npz")


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **PARTS | {"values": np.array([_Bomb()], object)}, allow_pickle=True)
    with pytest.raises(WorkloadError, match="Python objects, which could run code"):
        read_trace(tmp_path / "t.npz")


class _Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def test_a_mistake_is_reported_with_its_line() -> None:
    for text, parse, line in (
        ("a = 1\nb = \n", parse_toml, 2),
        ("a = 1\n\nb = [\n1\n\n", parse_toml, 4),
        ('{\n"a": 1,\n}', parse_json, 3),
    ):
        with pytest.raises(DocumentError) as caught:
            parse(text)
        assert caught.value.line == line


def test_depth_and_size_are_bounded(tmp_path: Path) -> None:
    parse_json(deep(MOST_DEPTH - 1))
    with pytest.raises(DocumentError, match="nested deeper"):
        parse_json(deep(MOST_DEPTH + 1))
    (tmp_path / "f").write_bytes(b"12345")
    assert read_file(tmp_path / "f", 5) == b"12345"
    with pytest.raises(DocumentError, match="more than 4 bytes"):
        read_file(tmp_path / "f", 4)
    with pytest.raises(DocumentError, match="null"):
        read_file(Path("a\0b"))


def test_values_are_shown_in_few_words() -> None:
    assert shown("a") == "'a'"
    assert shown("a" * 1000) == "'" + "a" * 76 + "..."
    assert shown(10**5000) == "an integer of 16610 bits"


def test_a_parsers_error_about_a_long_key_is_short_and_has_the_line() -> None:
    key = "9" * 5000
    with pytest.raises(DocumentError, match=r"Cannot declare .* \.\.\. .*twice \(at line 2, column") as caught:
        parse_toml(f"[[{key}]]\n[{key}]\n")
    assert len(str(caught.value)) < 250
    assert caught.value.line == 2

"""Arrays in a `.npz` file, read without believing it: nothing is unpickled, and no more memory is taken than is there.

An archive may say that a few bytes are a terabyte, in the table of its files or in the head of an array. The table is
compared with what is allowed before anything is unpacked, and the head with the bytes that follow it.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from embforge.codegen.reading.documents import DocumentError, read_file

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_arrays(path: Path, most: int) -> dict[str, NDArray[Any]]:
    """All arrays of the archive by their names, at most so many bytes of them.

    `FileNotFoundError` if there is no file, `DocumentError` if it is anything else.
    """
    data = read_file(path, most)
    if data.startswith(npy.MAGIC_PREFIX):
        raise DocumentError("it is one array, and no archive of several")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if total > most:
                raise DocumentError(f"it unpacks to {total:,} bytes; allowed: {most:,}")
            return {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}
    except DocumentError:
        raise
    except Exception as error:  # zipfile and numpy say nowhere what damage makes them raise
        raise DocumentError(f"{type(error).__name__}: {error}") from error


def _array(data: bytes) -> NDArray[Any]:
    """One array; `ValueError` if its head and its bytes do not agree."""
    file = io.BytesIO(data)
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"an array of format {version}")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which could run code")
    begin, count = file.tell(), math.prod(shape)
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(data) - begin:
        raise ValueError(f"{len(data) - begin} bytes for an array of shape {shape} and type {dtype}")
    return np.frombuffer(data, dtype, count, begin).reshape(shape, order="F" if fortran else "C").copy()

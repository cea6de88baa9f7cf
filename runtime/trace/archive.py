"""Reads arrays from an untrusted `.npz` file: nothing is unpickled, and memory use is limited.

An archive may claim that a few bytes are a terabyte, in its list of files or in the header of an array. The sizes in
the list are compared with the limit before anything is unpacked, and each header with the bytes that follow it.
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
    """All arrays of an archive by name. `most`: the limit in bytes, of the file and of its arrays together.

    `FileNotFoundError` if there is no file, `DocumentError` if it is not such an archive or is over the limit.
    """
    data = read_file(path, most)
    if data.startswith(npy.MAGIC_PREFIX):
        raise DocumentError("it is a single array, not an archive of arrays")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if total > most:
                raise DocumentError(f"it unpacks to {total:,} bytes; allowed: {most:,}")
            return {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}
    except DocumentError:
        raise
    except Exception as error:  # zipfile and numpy do not document what they raise for damaged files
        raise DocumentError(f"{type(error).__name__}: {error}") from error


def _array(data: bytes) -> NDArray[Any]:
    """One array. `ValueError` if its header does not agree with its bytes."""
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

"""A trace: batches that a collection has served, in one `.npz` file that is read without pickle. Its arrays:

    header    JSON text: schema, names of features, rows of their tables, digest of the spec's shape
    sizes     the number of samples of each batch
    lengths   the number of ids of each bag: batch by batch, feature-major within a batch
    values    ids, in the order of their bags
    weights   one weight per id; empty if no call had weights

`read_trace` checks everything that it reads, so that every trace that it returns is consistent.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from embforge.codegen.cache import write_atomically
from embforge.codegen.errors import WorkloadError
from embforge.codegen.reading.documents import DocumentError, parse_json, shown
from embforge.codegen.spec import MAX_ROWS
from embforge.trace.archive import read_arrays

TRACE_SCHEMA = 1
FILE_VARIABLE, BATCHES_VARIABLE = "EMBFORGE_RECORD", "EMBFORGE_RECORD_BATCHES"
"""Environment variables: the file to which every new collection records its calls, and the number of batches."""
BATCHES = 100
"""The number of batches that a recording has by default."""
MOST_BYTES = 2**32
"""The limit in bytes of a file and of its arrays. A recording ends at a quarter of it."""
REMEDY = "record it again with `embforge record` or ef.record(module, path)"

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded batches of one collection."""

    features: tuple[str, ...]
    rows: tuple[int, ...]
    """For each feature, the number of rows of its table."""
    shape: str
    """The digest of the recorded spec's shape, see `codegen/tuned/shape.py`."""
    sizes: Ints
    lengths: Ints
    values: Ints
    weights: Floats | None

    def __len__(self) -> int:
        """The number of batches."""
        return self.sizes.size

    @property
    def samples(self) -> int:
        """The number of samples in all batches."""
        return int(self.sizes.sum())

    @cached_property
    def digest(self) -> str:
        """A digest of everything in the trace except names: equal digests mean equal traffic."""
        hashed = hashlib.sha256(repr((TRACE_SCHEMA, self.rows)).encode())
        for part in (self.sizes, self.lengths, self.values, self.weights):
            hashed.update(b"none" if part is None else part.tobytes())
        return hashed.hexdigest()[:16]

    @cached_property
    def borders(self) -> Ints:
        """The positions in `values` at which the ids of each bag begin, and at which those of the last bag end."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @cached_property
    def first_bags(self) -> Ints:
        """The number of the first bag of each batch, and then the number of all bags."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)]) * len(self.features)

    def lengths_of(self, feature: int) -> Ints:
        """The lengths of all bags of one feature, in recorded order."""
        first, size = self.first_bags, self.sizes
        return np.concatenate(
            [self.lengths[first[i] + feature * size[i] : first[i] + (feature + 1) * size[i]] for i in range(len(self))]
        )

    def ids_of(self, feature: int) -> Ints:
        """All ids of one feature, in recorded order."""
        return np.concatenate([self.values[self.id_range(i, feature, 0, int(self.sizes[i]))] for i in range(len(self))])

    def id_range(self, batch: int, feature: int, begin: int, end: int) -> slice:
        """The positions in `values` of the ids that a feature has in samples `begin` to `end` (not included) of a
        batch."""
        first = self.first_bags[batch] + feature * self.sizes[batch]
        return slice(int(self.borders[first + begin]), int(self.borders[first + end]))


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The input of one recorded call, as arrays on the host."""

    size: int
    values: NDArray[Any]
    offsets: NDArray[Any]
    weights: Floats | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.offsets, self.weights) if part is not None)


def trace_of(features: Sequence[str], rows: Sequence[int], shape: str, batches: Iterable[RecordedCall]) -> Trace:
    """The trace of calls that have succeeded. Ids that are not rows are left out, because lookups treated them as
    absent.

    `features`, `rows` and `shape`: see `Trace`.
    """
    kept = [_without_bad_ids(rows, call) for call in batches]
    weights = None
    if any(call.weights is not None and call.weights.size for call in kept):  # a call without weights means ones
        weights = np.concatenate([np.ones(s.values.size, np.float32) if s.weights is None else s.weights for s in kept])
    return Trace(
        features=tuple(features),
        rows=tuple(rows),
        shape=shape,
        sizes=np.array([call.size for call in kept], np.int64),
        lengths=np.concatenate([np.diff(call.offsets) for call in kept]).astype(np.int64),
        values=np.concatenate([call.values for call in kept]).astype(np.int64),
        weights=weights,
    )


def write_trace(path: Path, trace: Trace) -> None:
    """Writes a trace to a file, completely or not at all. `OSError` if it cannot be written."""
    header = {"schema": TRACE_SCHEMA, "features": trace.features, "rows": trace.rows, "shape": trace.shape}
    data = io.BytesIO()
    np.savez_compressed(
        data,
        header=np.array(json.dumps(header)),
        sizes=trace.sizes,
        lengths=_narrow(trace.lengths),
        values=_narrow(trace.values),
        weights=np.zeros(0, np.float32) if trace.weights is None else trace.weights,
    )
    write_atomically(path, data.getvalue())


def checked_target(path: Path, batches: int) -> Path:
    """The absolute path of the file for a recording of this many batches. `WorkloadError` if it cannot be recorded
    there."""
    if batches < 1:
        raise WorkloadError(f"record: batches={batches} is out of range; allowed: 1 or more")
    if path.suffix != ".npz":
        raise WorkloadError(f"record: {path} is not the name of a trace; allowed: names that end with .npz")
    if not path.absolute().parent.is_dir():
        raise WorkloadError(f"record: {path.parent} is not a directory; make it first")
    return path.absolute()


def numbered(path: Path, number: int) -> Path:
    """The file for the collection with this number (from 1) of a recording."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def read_trace(path: Path) -> Trace:
    """The trace in a file. `WorkloadError` names the file and what is wrong with it."""
    try:
        return _checked(path, read_arrays(path, MOST_BYTES))
    except FileNotFoundError:
        raise WorkloadError(f"trace {path}: no such file; make it with `embforge record --out {path} SCRIPT`") from None
    except DocumentError as error:
        raise _error(path, f"cannot be read as a trace ({error})") from error
    except MemoryError as error:
        raise WorkloadError(f"trace {path}: there is not enough memory to read it; record fewer batches") from error


def _checked(path: Path, parts: dict[str, NDArray[Any]]) -> Trace:
    """The trace that these arrays make up. `WorkloadError` for anything that is missing or inconsistent."""
    missing = [name for name in ("header", "sizes", "lengths", "values", "weights") if name not in parts]
    if missing:
        raise _error(path, f"is not a trace: it has no {', '.join(missing)}")
    header = _header(path, parts["header"])
    numbers = {name: parts[name] for name in ("sizes", "lengths", "values")}
    for name, array in numbers.items():
        if array.dtype.kind != "i" or array.ndim != 1:
            raise _error(path, f"is damaged: {name} is {array.dtype} of shape {array.shape}, not a list of integers")
    sizes, lengths, values = (array.astype(np.int64) for array in numbers.values())
    features, rows = tuple(header["features"]), tuple(header["rows"])
    samples, held = _total(sizes), _total(lengths)
    if not sizes.size or sizes.min() < 0 or len(features) != len(rows) or lengths.size != samples * len(features):
        raise _error(
            path,
            f"is damaged: {lengths.size} bags do not fit {len(features)} features and {sizes.size} batches of "
            f"{samples} samples in all",
        )
    if (lengths.size and lengths.min() < 0) or held != values.size:
        raise _error(path, f"is damaged: its bags hold {held} ids, but it has {values.size}")
    weights = parts["weights"] if parts["weights"].size else None
    if weights is not None and (weights.dtype != np.float32 or weights.shape != values.shape):
        raise _error(path, f"is damaged: {weights.size} {weights.dtype} weights for {values.size} ids")
    trace = Trace(features, rows, str(header["shape"]), sizes, lengths, values, weights)
    for index, name in enumerate(features):
        ids = trace.ids_of(index)
        if ids.size and not (ids.min() >= 0 and ids.max() < rows[index]):
            raise _error(path, f"is damaged: ids {ids.min()} to {ids.max()} of feature {name!r} in {rows[index]} rows")
    return trace


def _total(counts: Ints) -> int:
    """The exact sum. numpy's sum wraps around at 2^63, so that a damaged file could seem consistent."""
    high, low = counts >> 32, counts & 0xFFFFFFFF
    return (int(high.sum()) << 32) + int(low.sum())


def _header(path: Path, text: NDArray[Any]) -> dict[str, Any]:
    if text.dtype.kind != "U" or text.ndim:
        raise _error(path, f"is damaged: its header is {text.dtype} of shape {text.shape}, not a text")
    try:  # decoded without numpy, which makes invalid Python strings of characters that do not exist
        header = parse_json(text.astype("<U").tobytes().decode("utf-32-le").rstrip("\0"))
    except ValueError as error:
        raise _error(path, f"is not a trace: its header cannot be read ({error})") from error
    if not isinstance(header, dict) or header.get("schema") != TRACE_SCHEMA:
        schema = header.get("schema") if isinstance(header, dict) else None
        raise _error(path, f"has schema {shown(schema)}; this embforge reads {TRACE_SCHEMA}")
    features, rows, shape = (header.get(name) for name in ("features", "rows", "shape"))
    if not (_is_list_of(features, str) and _is_list_of(rows, int) and isinstance(shape, str)):
        raise _error(path, "is damaged: its header lacks features, rows or shape")
    if not features or len(set(features)) < len(features):
        raise _error(path, f"is damaged: its features are {shown(features)}, not different names")
    if not all(1 <= count <= MAX_ROWS for count in rows):
        raise _error(path, f"is damaged: its tables have {shown(rows)} rows; allowed: 1 to {MAX_ROWS}")
    return header


def _is_list_of(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _without_bad_ids(rows: Sequence[int], call: RecordedCall) -> RecordedCall:
    if not call.size:
        return call
    bounds = np.repeat(np.asarray(rows, np.int64), np.diff(call.offsets[:: call.size]))
    good = (call.values >= 0) & (call.values < bounds)
    if good.all():
        return call
    kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(good)])
    weights = None if call.weights is None else call.weights[good]
    return RecordedCall(call.size, call.values[good], kept[call.offsets], weights)


def _narrow(array: Ints) -> NDArray[Any]:
    """The same numbers in 32 bits where they fit."""
    fits = not array.size or (array.min() >= -(2**31) and array.max() < 2**31)
    return array.astype(np.int32) if fits else array


def _error(path: Path, problem: str) -> WorkloadError:
    return WorkloadError(f"trace {path}: {problem}; {REMEDY}")

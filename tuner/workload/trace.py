"""Recorded traffic as a workload: batches and bag lengths as they were recorded, and how skewed their ids are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embforge.codegen.errors import WorkloadError
from embforge.codegen.spec import CollectionSpec
from embforge.trace.file_format import Trace, read_trace
from embforge.tuner.workload.laws import Ints, Rng

STEEPEST = 4.0
"""The largest exponent that is tried: with it, nearly all ids are the same few."""


@dataclass(frozen=True)
class Recorded:
    """Ids, bag lengths, weights and batch sizes of a trace file."""

    path: str

    def __str__(self) -> str:
        return f"trace:{self.path}"


@dataclass(frozen=True)
class RecordedLengths:
    """Bag lengths drawn from those in a trace file, feature by feature."""

    path: str

    def __str__(self) -> str:
        return f"trace:{self.path}"


@dataclass(frozen=True, eq=False)
class ObservedLengths:
    """Lengths drawn from those that were recorded, each as likely as it was frequent."""

    seen: Ints

    def draw(self, rng: Rng, count: int) -> Ints:
        return rng.choice(self.seen, count)


@dataclass(frozen=True, eq=False)
class RecordedBatch:
    """The part of a trace that makes one batch: bag lengths, ids and weights of its samples, feature-major."""

    size: int
    lengths: Ints
    values: Ints
    weights: NDArray[np.float32] | None


def load(path: str) -> Trace:
    """The trace in a file; it is read again only if the file has changed. `WorkloadError` if it cannot be used."""
    try:
        facts = os.stat(path)
        stamp = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    except OSError:
        stamp = None  # reading raises the error
    return _load(path, stamp)


@lru_cache(maxsize=8)
def _load(path: str, stamp: Any) -> Trace:
    return read_trace(Path(path))


def matched_trace(path: str, spec: CollectionSpec) -> tuple[Trace, list[int]]:
    """The trace in a file, and for each feature of the spec the index of the trace's feature that it takes ids from.

    Features are matched by name if both have the same names, otherwise by position. `WorkloadError` if the trace does
    not have as many features as the spec.
    """
    trace = load(path)
    names = [feature.name for feature in spec.features]
    if len(names) != len(trace.features):
        raise WorkloadError(
            f"trace {path}: has {len(trace.features)} features ({', '.join(trace.features)}), the spec has "
            f"{len(names)} ({', '.join(names)}); record a module that was made with this spec"
        )
    same = sorted(names) == sorted(trace.features)
    return trace, [trace.features.index(name) if same else index for index, name in enumerate(names)]


def recorded_lengths(path: str, spec: CollectionSpec) -> list[ObservedLengths]:
    """For each feature of the spec: the bag lengths that were recorded, as a law to draw from."""
    trace, order = matched_trace(path, spec)
    _check_samples(path, trace)
    return [ObservedLengths(trace.lengths_of(index)) for index in order]


def recorded_batch(path: str, spec: CollectionSpec, batch: int | None, number: int) -> RecordedBatch:
    """The `number`-th batch of a trace, from 0; the first follows the last.

    With `batch` None these are the recorded batches, otherwise batches of `batch` samples in the recorded order.
    """
    trace, order = matched_trace(path, spec)
    _check_numbers(path, spec, trace, order)
    if batch is None:
        at = number % len(trace)
        pieces = [(at, 0, int(trace.sizes[at]))]
    else:
        _check_samples(path, trace)
        pieces = list(_samples(trace, number * batch % trace.samples, batch))
    lengths, values, weights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    for feature in order:
        for at, begin, end in pieces:
            bags = int(trace.first_bags[at] + feature * trace.sizes[at])
            where = trace.id_range(at, feature, begin, end)
            lengths.append(trace.lengths[bags + begin : bags + end])
            values.append(trace.values[where])
            if trace.weights is not None:
                weights.append(trace.weights[where])
    size = sum(end - begin for _, begin, end in pieces)
    weighted = None if trace.weights is None else np.concatenate(weights)
    return RecordedBatch(size, np.concatenate(lengths), np.concatenate(values), weighted)


def recorded_skew(path: str, spec: CollectionSpec) -> float | None:
    """The exponent of Zipf's law that asks for as many distinct rows as the trace: the mean over features, weighted by
    their numbers of ids. None if the trace has no ids."""
    trace, order = matched_trace(path, spec)
    fits, sizes = [], []
    for feature, index in zip(spec.features, order, strict=True):
        ids, rows = trace.ids_of(index), spec.table(feature.table).num_embeddings
        if ids.size and rows > 1:
            fits.append(fitted_exponent(ids, rows))
            sizes.append(ids.size)
    return round(float(np.average(fits, weights=sizes)), 2) if fits else None


def fitted_exponent(ids: Ints, rows: int) -> float:
    """The exponent of Zipf's law under which windows of ids hold as many distinct ones as windows of these ids do.

    A window has at most as many ids as the table has rows: in a longer one nearly every row occurs under any law.
    """
    window = min(ids.size, rows)
    windows = min(ids.size // window, max(16, 2**16 // window))
    distinct = np.mean([np.unique(ids[i * window : (i + 1) * window]).size for i in range(windows)])
    low, high = 0.0, STEEPEST
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_distinct(middle, window, rows) > distinct else (low, middle)
    return (low + high) / 2


def expected_distinct(exponent: float, draws: int, rows: int) -> float:
    """How many distinct rows occur on average in `draws` draws by Zipf's law."""
    head = min(rows, 4096)  # ranks that are counted one by one; later ranks are counted in groups of similar chance
    edges = np.geomspace(head + 0.5, rows + 0.5, 513) if rows > head else np.array([head + 0.5])
    ranks = np.concatenate([np.arange(1.0, head + 1), np.sqrt(edges[1:] * edges[:-1])])
    counts = np.concatenate([np.ones(head), np.diff(edges)])
    likely = ranks**-exponent
    likely /= (likely * counts).sum()
    with np.errstate(divide="ignore"):  # log1p(-1) for a table of one row, which is certain to occur
        missed = np.exp(draws * np.log1p(-np.minimum(likely, 1.0)))
    return float((counts * (1.0 - missed)).sum())


def _samples(trace: Trace, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """`count` samples of the trace from the `start`-th on; the first batch follows the last. Yields for each piece the
    index of its batch, its first sample, and the sample after its last."""
    ends = np.cumsum(trace.sizes)
    at = int(np.searchsorted(ends, start, side="right"))
    begin = start - int(ends[at] - trace.sizes[at])
    while count > 0:
        end = min(int(trace.sizes[at]), begin + count)
        if end > begin:
            yield at, begin, end
        count -= end - begin
        at, begin = (at + 1) % len(trace), 0


def _check_samples(path: str, trace: Trace) -> None:
    if not trace.samples:
        raise WorkloadError(f"trace {path}: its {len(trace)} batches have no samples; record calls with samples")


def _check_numbers(path: str, spec: CollectionSpec, trace: Trace, order: list[int]) -> None:
    for feature, index in zip(spec.features, order, strict=True):
        rows = spec.table(feature.table).num_embeddings
        if trace.rows[index] > rows and (largest := int(trace.ids_of(index).max(initial=-1))) >= rows:
            raise WorkloadError(
                f"trace {path}: id {largest} of feature {feature.name!r} is not a row of table {feature.table!r}; "
                f"allowed: 0 to {rows - 1} (recorded with {trace.rows[index]} rows); record it with tables of this size"
            )
        if feature.slots:
            longest = int(trace.lengths_of(index).max(initial=0))
            if longest > feature.slots:
                raise WorkloadError(
                    f"trace {path}: a bag of feature {feature.name!r} has {longest} ids, hotness={feature.slots} "
                    f"allows {feature.slots}; raise hotness, or record a trace with shorter bags"
                )

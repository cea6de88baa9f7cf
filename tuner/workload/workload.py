"""Workloads: which batches a lookup gets, described by one string such as `zipf:1.05,len=geo:20,batch=2048`.

    ids    uniform | zipf:S | trace:FILE       how often each row occurs; zipf's hot rows are spread over the table
    len    fixed:L | geo:MEAN | skew:SHORT:LONG:SHARE | trace:FILE
                                               ids per bag; by default each feature's hotness, or 1 if it has none
    batch  samples per batch

A trace is a file of recorded batches (`embforge record`). `trace:FILE` as ids means the recorded batches themselves,
with their bag lengths, weights and sizes; `batch` cuts the same samples into batches of that size. `len=trace:FILE`
means the recorded bag lengths alone.

Batches are made by numpy from a seed alone: the same string, spec and seed give the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embforge.codegen.errors import WorkloadError as WorkloadError
from embforge.codegen.spec import CollectionSpec, FeatureSpec
from embforge.codegen.tuned.record import Traffic
from embforge.tuner.workload.laws import Fixed, Geometric, IdLaw, LengthLaw, Rng, Skew, Uniform, Zipf
from embforge.tuner.workload.laws import Ints as Ints
from embforge.tuner.workload.trace import (
    Recorded,
    RecordedLengths,
    load,
    recorded_batch,
    recorded_lengths,
    recorded_skew,
)

GRAMMAR = (
    "[uniform|zipf:S|trace:FILE][,len=fixed:L|geo:MEAN|skew:SHORT:LONG:SHARE|trace:FILE][,batch=N], "
    "e.g. zipf:1.05,len=geo:20,batch=2048"
)
MAX_BATCH = 2**31
BAGS_TO_COUNT = 2**14
"""Bags that are drawn for each feature to calculate the mean bag length."""


@dataclass(frozen=True)
class Workload:
    """A description of batches. `parse` makes an equal workload of the text that `str()` returns."""

    ids: IdLaw | Recorded = field(default=Uniform())
    lengths: LengthLaw | RecordedLengths | None = None
    """None: each feature's hotness, or one id per bag; with a trace of ids, the recorded lengths."""
    batch: int | None = 2048
    """None: the recorded batch sizes, which only a trace of ids has."""

    def __post_init__(self) -> None:
        if isinstance(self.ids, Recorded) and self.lengths is not None:
            raise WorkloadError(
                f"workload {str(self)!r}: len={self.lengths} next to a trace, which has its own bag lengths; leave it "
                f"out, or draw ids by uniform or zipf:S; form: {GRAMMAR}"
            )
        if self.batch is None and not isinstance(self.ids, Recorded):
            raise WorkloadError(f"workload {str(self)!r}: only a trace has its own batch sizes; set batch=N")

    def __str__(self) -> str:
        length = f",len={self.lengths}" if self.lengths is not None else ""
        batch = f",batch={self.batch}" if self.batch is not None else ""
        return f"{self.ids}{length}{batch}"

    def identity(self) -> str:
        """The same text as `str()`, but with a digest of a trace's content instead of its file's name.

        `WorkloadError` if the trace cannot be read.
        """
        ids, lengths = self.ids, self.lengths
        return str(
            replace(
                self,
                ids=Recorded(load(ids.path).digest) if isinstance(ids, Recorded) else ids,
                lengths=RecordedLengths(load(lengths.path).digest) if isinstance(lengths, RecordedLengths) else lengths,
            )
        )

    def at_most(self, samples: int) -> Workload:
        """The same workload in batches of at most this many samples."""
        return replace(self, batch=samples if self.batch is None else min(self.batch, samples))


@dataclass(frozen=True, eq=False)
class Batch:
    """The input of one lookup: the ids of all bags, feature-major offsets, and weights if any feature is weighted."""

    size: int
    values: NDArray[Any]
    offsets: NDArray[Any]
    weights: NDArray[np.float32] | None

    def feature(self, index: int) -> slice:
        """The slice of `values` that holds the ids of one feature."""
        return slice(int(self.offsets[index * self.size]), int(self.offsets[(index + 1) * self.size]))


def parse(text: str) -> Workload:
    """Reads a workload from its text. `WorkloadError` says what is wrong and what is allowed. No file is opened."""
    parts: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator or part.startswith("trace:"):  # a file's name may have any character but a comma
            key, value = "ids", part
        key = key.strip() or "ids"
        if key not in ("ids", "len", "batch"):
            raise WorkloadError(f"workload {text!r}: unknown key {key!r}; allowed: ids, len, batch; form: {GRAMMAR}")
        if key in parts:
            raise WorkloadError(f"workload {text!r}: {key} is given twice ({parts[key]!r}, {value!r}); form: {GRAMMAR}")
        parts[key] = value.strip()
    reader = _Reader(text)
    ids = reader.ids(parts["ids"]) if "ids" in parts else Uniform()
    usual = None if isinstance(ids, Recorded) else Workload.batch
    return Workload(
        ids=ids,
        lengths=reader.lengths(parts["len"]) if "len" in parts else None,
        batch=reader.whole("batch", parts["batch"], 0, MAX_BATCH) if "batch" in parts else usual,
    )


def make_batch(spec: CollectionSpec, workload: Workload, seed: int = 0, id_dtype: str = "int64") -> Batch:
    """Makes one batch of the workload for a spec.

    Seeds 0, 1, 2, ... give independent batches. With a trace they give its first, second, third batch and so on, and
    the first again after the last. A `concat` feature's bags never exceed its hotness. If any feature is weighted, each
    id has a weight, drawn from [0.5, 1.5) or as recorded. `WorkloadError` for a trace that cannot be read or does not
    fit the spec.
    """
    if isinstance(workload.ids, Recorded):
        return _recorded(spec, workload.ids, workload.batch, seed, id_dtype)
    assert workload.batch is not None  # __post_init__ checks it
    rng = np.random.default_rng([0xE3BF0, seed])
    lengths, values = [], []
    for feature, law in zip(spec.features, _length_laws(spec, workload), strict=True):
        drawn = _lengths(rng, law, feature, workload.batch)
        lengths.append(drawn)
        values.append(workload.ids.draw(rng, int(drawn.sum()), spec.table(feature.table).num_embeddings))
    flat = np.concatenate(values)
    weights = (rng.random(flat.size, dtype=np.float32) + np.float32(0.5)) if _is_weighted(spec) else None
    return Batch(workload.batch, flat.astype(id_dtype), _offsets(np.concatenate(lengths)).astype(id_dtype), weights)


def traffic(spec: CollectionSpec, workload: Workload) -> Traffic:
    """The workload in numbers: mean batch size, mean bag length and skew.

    A trace's skew is an estimate: the exponent of Zipf's law that asks for as many distinct rows.
    """
    ids = workload.ids
    if isinstance(ids, Recorded):
        trace = load(ids.path)
        batch = float(trace.sizes.mean()) if workload.batch is None else float(workload.batch)
        mean = float(trace.lengths.mean()) if trace.lengths.size else None
        return Traffic(batch, mean, recorded_skew(ids.path, spec))
    assert workload.batch is not None
    rng = np.random.default_rng(0xE3BF0)
    laws = zip(spec.features, _length_laws(spec, workload), strict=True)
    mean = float(np.mean([_lengths(rng, law, feature, BAGS_TO_COUNT).mean() for feature, law in laws]))
    return Traffic(float(workload.batch), mean, ids.exponent if isinstance(ids, Zipf) else 0.0)


def _recorded(spec: CollectionSpec, ids: Recorded, size: int | None, seed: int, id_dtype: str) -> Batch:
    recorded = recorded_batch(ids.path, spec, size, seed)
    weights = None
    if _is_weighted(spec):
        weights = np.ones(recorded.values.size, np.float32) if recorded.weights is None else recorded.weights
    return Batch(recorded.size, recorded.values.astype(id_dtype), _offsets(recorded.lengths).astype(id_dtype), weights)


def _length_laws(spec: CollectionSpec, workload: Workload) -> Sequence[LengthLaw]:
    """For each feature: the law of its bag lengths."""
    lengths = workload.lengths
    if isinstance(lengths, RecordedLengths):
        return recorded_lengths(lengths.path, spec)
    return [lengths or Fixed(feature.hotness or 1) for feature in spec.features]


def _lengths(rng: Rng, law: LengthLaw, feature: FeatureSpec, count: int) -> Ints:
    drawn = law.draw(rng, count)
    if feature.slots:
        drawn = np.minimum(drawn, feature.slots)
    return drawn


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _is_weighted(spec: CollectionSpec) -> bool:
    return any(feature.weighted for feature in spec.features)


@dataclass(frozen=True)
class _Reader:
    """Reads values in the text of one workload; its errors quote the text."""

    text: str

    def ids(self, value: str) -> IdLaw | Recorded:
        match value.split(":"):
            case ["uniform"]:
                return Uniform()
            case ["zipf", exponent]:
                return Zipf(self.real("zipf exponent", exponent, 0.0, 10.0))
            case ["trace", *_]:
                return Recorded(self.file(value))
        raise self.error(f"ids={value!r} is not known; allowed: uniform, zipf:S (S about 1), trace:FILE")

    def lengths(self, value: str) -> LengthLaw | RecordedLengths:
        match value.split(":"):
            case ["fixed", length]:
                return Fixed(self.whole("len=fixed", length, 0, MAX_BATCH))
            case ["geo", mean]:
                return Geometric(self.real("len=geo mean", mean, 0.0, 1e9))
            case ["skew", short, long, share]:
                return Skew(
                    self.whole("len=skew short", short, 0, MAX_BATCH),
                    self.whole("len=skew long", long, 0, MAX_BATCH),
                    self.real("len=skew share", share, 0.0, 1.0),
                )
            case ["trace", *_]:
                return RecordedLengths(self.file(value))
        raise self.error(f"len={value!r} is not known; allowed: fixed:L, geo:MEAN, skew:SHORT:LONG:SHARE, trace:FILE")

    def file(self, value: str) -> str:
        name = value.partition(":")[2].strip()
        if not name:
            raise self.error(f"{value!r} names no file; write trace:FILE with a file name that has no comma")
        return Path(name).as_posix()

    def whole(self, what: str, value: str, low: int, high: int) -> int:
        try:
            number = int(value)
        except ValueError:
            raise self.error(f"{what}={value!r} is not a whole number; allowed: {low} to {high}") from None
        if not low <= number <= high:
            raise self.error(f"{what}={number} is out of range; allowed: {low} to {high}")
        return number

    def real(self, what: str, value: str, low: float, high: float) -> float:
        try:
            number = float(value)
        except ValueError:
            raise self.error(f"{what}={value!r} is not a number; allowed: {low:g} to {high:g}") from None
        if not low <= number <= high:
            raise self.error(f"{what}={number:g} is out of range; allowed: {low:g} to {high:g}")
        return number

    def error(self, problem: str) -> WorkloadError:
        return WorkloadError(f"workload {self.text!r}: {problem}; form: {GRAMMAR}")

"""A tuned result and its key: op, shape of the spec, hardware, traffic, ids and caches, but never a name.

Both are plain data with one JSON form, so that a result can be copied to another machine and read by a person.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RECORD_SCHEMA = 1
NOISE_LIMIT = 0.25
"""With a higher noise floor, samples say nothing, however large a gain they show: the machine was busy."""


@dataclass(frozen=True)
class Shape:
    """The properties of a spec that decide which parameters are fast.

    Categories must be equal in a result that is used; sizes may differ, at a distance.
    """

    digest: str
    """A hash of the whole spec without its names: equal digests mean equal kernels except for names."""
    dtypes: tuple[str, ...]
    """The different number formats of tables, sorted; then that of the output."""
    poolings: tuple[str, ...]
    """The different poolings of features, sorted, as kernels see them: mean and sqrtn are sums, and weighted poolings
    end with `+weighted`."""
    features: int
    dim: float
    """The geometric mean over features."""
    table_bytes: int
    """Bytes of all tables together."""


@dataclass(frozen=True)
class Hardware:
    """The hardware on which a time was measured.

    In a result that is used, everything in `identity` must be equal; `sizes` may differ, at a distance.
    """

    kind: Literal["cpu", "gpu"]
    name: str
    """A name for readers, which is not compared."""
    identity: dict[str, str]
    """cpu: vendor, family, model, simd. gpu: arch."""
    sizes: dict[str, int]
    """cpu: cores, l1_bytes, l2_bytes, l3_bytes. gpu: multiprocessors, l2_bytes, memory_bytes."""


@dataclass(frozen=True)
class Traffic:
    """The numbers that describe a workload; None means not known."""

    batch: float | None = None
    bag_length: float | None = None
    """The mean number of ids per bag."""
    skew: float | None = None
    """Zipf's exponent; 0 for uniform ids."""


@dataclass(frozen=True)
class Key:
    """The meaning of a tuned result, by which it is found."""

    op: str
    """forward or backward: they have different parameters."""
    target: str
    rule: str | None
    """For a backward, the update's name, or `none` if rows only get gradients; None for a forward."""
    shape: Shape
    hardware: Hardware
    traffic: Traffic
    id_dtype: str
    """The type of ids and offsets: int64 or int32."""
    cache: str
    """warm: calls followed each other; cold: caches were emptied before each call."""


@dataclass(frozen=True)
class Gain:
    """How many times as fast as the default: the median over paired rounds, with a 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """A tuned result with its evidence."""

    key: Key
    params: dict[str, Any]
    workload: str
    """The workload on which it was measured, as text."""
    gain: Gain
    noise_floor: float
    """The difference that two copies of the same kernel showed, as a share: smaller gains do not count."""
    samples: dict[str, tuple[float, ...]]
    """Seconds per call of `default`, `best` and `duplicate` (a copy of the best), paired by round."""
    versions: dict[str, str]
    created: str
    """UTC, ISO 8601."""
    study: str = ""
    """The study that found it."""
    notes: tuple[str, ...] = field(default=())
    """Remarks of the tuner for the user, such as a layout that would be faster."""

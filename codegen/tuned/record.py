"""A tuned result and what it is known by: op, shape of the spec, hardware, traffic, ids and caches; never a name.

Plain data with one JSON form, so that a result can be carried to another machine and read by eye.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RECORD_SCHEMA = 1
NOISE_LIMIT = 0.25
"""A noise floor above which samples say nothing, however large a gain they show: the machine was busy."""


@dataclass(frozen=True)
class Shape:
    """What of a spec decides which parameters are fast. Categories must be equal; sizes may differ, at a distance."""

    digest: str
    """Of the whole spec without its names: equal digests mean equal kernels but for names."""
    dtypes: tuple[str, ...]
    """Of tables, sorted, each once; then of the output."""
    poolings: tuple[str, ...]
    """Of features, as kernels see them (mean and sqrtn are sums), sorted, each once; `+weighted` behind those with."""
    features: int
    dim: float
    """Geometric mean over features."""
    table_bytes: int
    """Of all tables."""


@dataclass(frozen=True)
class Hardware:
    """What a time depends on. Everything in `identity` must be equal; `sizes` may differ, at a distance."""

    kind: Literal["cpu", "gpu"]
    name: str
    """For people."""
    identity: dict[str, str]
    """cpu: vendor, family, model, simd. gpu: arch."""
    sizes: dict[str, int]
    """cpu: cores, l1_bytes, l2_bytes, l3_bytes. gpu: multiprocessors, l2_bytes, memory_bytes."""


@dataclass(frozen=True)
class Traffic:
    """A workload by its numbers; None: not known."""

    batch: float | None = None
    bag_length: float | None = None
    """Mean ids a bag."""
    skew: float | None = None
    """Zipf's exponent; 0 for uniform ids."""


@dataclass(frozen=True)
class Key:
    """What a tuned result is known by."""

    op: str
    """forward or backward: they have different parameters."""
    target: str
    rule: str | None
    """Of a backward: the update's name, or `none` where rows only get gradients."""
    shape: Shape
    hardware: Hardware
    traffic: Traffic
    id_dtype: str
    """int64 or int32: of ids and offsets."""
    cache: str
    """warm: calls followed each other; cold: caches were emptied before each."""


@dataclass(frozen=True)
class Gain:
    """Times faster than the default: median over paired rounds, with a 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """A tuned result with its evidence."""

    key: Key
    params: dict[str, Any]
    workload: str
    """What it was measured on, in one string."""
    gain: Gain
    noise_floor: float
    """How far apart two copies of the same kernel came out, as a share: gains below it do not count."""
    samples: dict[str, tuple[float, ...]]
    """Seconds a call of `default`, `best` and `duplicate` (of the best), paired by round."""
    versions: dict[str, str]
    created: str
    """UTC, ISO 8601."""
    study: str = ""
    """The study that found it."""
    notes: tuple[str, ...] = field(default=())
    """What the tuner wants people to know, such as a layout that would be faster."""

"""The choice of plan fields: an exact tuned result, or the nearest one within a limit, or the default; and the reason.

A result is exact if the spec's shape, the ids' dtype and the hardware are equal, and the traffic's bucket, too, as far
as it is known. Of several, the project's store comes before the user's, and that before the shipped one. The nearest is
searched over all stores, by distance. Results of warm caches are never used for cold ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.params import Params, params_type
from embforge.codegen.plans import SPARSE
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.document import TARGETS, params_of
from embforge.codegen.tuned.record import Hardware, Key, Record, Traffic
from embforge.codegen.tuned.shape import USUAL_BATCH, bucket_of, shape_of
from embforge.codegen.tuned.stores import STORES, Stored, read_stores, warn_once

LIMIT = 2.0
"""The largest distance of a nearest match: one size four times as large, or four sizes each twice as large. The choices
of fields step by factors of two to four, so at a larger distance the best choice is expected to be different."""
LEAST = 2.0**-6
"""Smaller numbers are raised to this before their logarithm is taken: a batch or a mean bag length may be 0."""
ONLY_WHERE_MEASURED = {"threads": "torch"}
"""Plan fields that are valid only for the hardware and batch of their measurement, and what decides otherwise."""


@dataclass(frozen=True)
class Choice:
    """Plan fields and why they are used."""

    params: Params
    why: str
    """The reason, as a sentence."""
    record: Record | None = None
    """The tuned result that decided, even if it decided for the default; None if none did."""
    path: Path | None = None
    """The file of that result."""
    source: str = ""
    """Where the result comes from, in the words of `why` but without its gain; empty if there is no result."""


@dataclass(frozen=True)
class Match:
    """A result of the same op, rule, dtypes, poolings and kind of hardware."""

    stored: Stored
    distance: float
    exact: bool
    known: int
    """How many numbers of the traffic both sides know."""
    differences: tuple[tuple[str, float], ...]
    """Sizes that differ and how many times larger the result's are, the largest difference first."""


def choose(
    op: str,
    target: str,
    spec: CollectionSpec,
    hardware: Hardware,
    *,
    rule: str | None = None,
    traffic: Traffic = Traffic(),  # noqa: B008  # frozen
    id_dtype: str = "int64",
    cache: str = "warm",
    origin: Path | None = None,
) -> Choice:
    """Chooses the plan fields of `op` (forward or backward) for a spec on some hardware.

    `origin` is the file next to which the project store is; None: the spec's own `origin`. No content of a store makes
    it raise: it warns once about each file that cannot be read, and skips the file.
    """
    default = params_type(target, op)()
    if target not in TARGETS:
        return Choice(default, f"default: nothing is tuned for {target}")
    results, problems = read_stores(op, target, origin or spec.origin)
    for problem in problems:
        warn_once(problem)
    if not results:  # the usual case, which costs no more than listing three directories
        return Choice(default, f"default: no store has a tuned {op} for {target}")
    key = key_of(op, target, spec, hardware, rule, traffic, id_dtype, cache)
    ranked = rank(key, results)
    if not ranked:
        same = "these dtypes, poolings and rule on this kind of hardware"
        return Choice(default, f"default: no tuned {op} has {same} with {cache} caches")
    best = ranked[0]
    if not best.exact and best.distance > LIMIT:
        return Choice(
            default,
            f"default: no tuned result within distance {LIMIT:g} (nearest: {best.distance:.2g}; {_apart(best)})",
        )
    record = best.stored.record
    measured: Params = params_of(record.key, record.params)
    left = {} if best.exact and key.traffic.batch is not None else left_open(measured)
    why, source = _why(key, best, measured, left), _source(best)
    return Choice(replace(measured, **left), why, record, best.stored.path, source)


def key_of(
    op: str,
    target: str,
    spec: CollectionSpec,
    hardware: Hardware,
    rule: str | None,
    traffic: Traffic,
    id_dtype: str,
    cache: str,
) -> Key:
    """The key of results for these arguments. A backward without a rule only reduces gradients."""
    rule = None if op == "forward" else rule or SPARSE
    return Key(op, target, rule, shape_of(spec), hardware, traffic, id_dtype, cache)


def rank(key: Key, stored: Sequence[Stored]) -> list[Match]:
    """All comparable results, the best first, at any distance: exact ones by store, then the others by distance.

    At equal distance, the result comes first of which more traffic is known; then they are ordered by store; then, if
    the module's batch is not known, by how near their batch is to the usual one; then the newest comes first.
    """
    matches = (_match(key, result) for result in stored if _comparable(key, result.record.key))
    return sorted(matches, key=lambda match: _order(key, match))


def _order(key: Key, match: Match) -> tuple[float, ...]:
    record, store, distance = match.stored.record, STORES.index(match.stored.store), round(match.distance, 9)
    last = (_from_usual(record.key.traffic) if key.traffic.batch is None else 0.0, -_time(record))
    return (0, store, -match.known, distance, *last) if match.exact else (1, distance, -match.known, store, *last)


def _from_usual(traffic: Traffic) -> float:
    """How many doublings a batch is away from the usual one; infinite for a batch that is not known."""
    batch = bucket_of(traffic).batch
    return math.inf if batch is None else abs(math.log2(max(batch, LEAST) / USUAL_BATCH))


def _time(record: Record) -> float:
    return datetime.fromisoformat(record.created).timestamp()


def _comparable(key: Key, other: Key) -> bool:
    """Whether only sizes differ. The less is known of the key's hardware, the more results are comparable."""
    ours, theirs = key.hardware, other.hardware
    return (
        (key.op, key.target, key.rule, key.cache) == (other.op, other.target, other.rule, other.cache)
        and (key.shape.dtypes, key.shape.poolings) == (other.shape.dtypes, other.shape.poolings)
        and ours.kind == theirs.kind
        and all(theirs.identity.get(name) == value for name, value in ours.identity.items())
    )


def _match(key: Key, stored: Stored) -> Match:
    other = stored.record.key
    same_traffic = [(a, b) for _, a, b in _traffic_pairs(key.traffic, other.traffic)]
    logs = {name: math.log2(max(b, LEAST) / max(a, LEAST)) for name, a, b in _pairs(key, other)}
    exact = (
        (key.shape.digest, key.id_dtype) == (other.shape.digest, other.id_dtype)
        and (key.hardware.identity, key.hardware.sizes) == (other.hardware.identity, other.hardware.sizes)
        and all(a == b for a, b in same_traffic)
    )
    apart = sorted(((name, log) for name, log in logs.items() if log), key=lambda item: -abs(item[1]))
    return Match(
        stored,
        distance=math.hypot(*logs.values()),
        exact=exact,
        known=len(same_traffic),
        differences=tuple((name, 2.0**log) for name, log in apart),
    )


def _pairs(key: Key, other: Key) -> Iterator[tuple[str, float, float]]:
    """Sizes that are compared by their ratio: the name, the size in `key` and the one in `other`."""
    for name in ("features", "dim", "table_bytes"):
        yield name, getattr(key.shape, name), getattr(other.shape, name)
    yield "id_bytes", DTYPES[key.id_dtype].bytes, DTYPES[other.id_dtype].bytes
    for name, size in key.hardware.sizes.items():
        if name in other.hardware.sizes:
            yield name, size, other.hardware.sizes[name]
    for name, ours, theirs in _traffic_pairs(key.traffic, other.traffic):
        yield ("1 + skew", 1 + ours, 1 + theirs) if name == "skew" else (name, ours, theirs)


def _traffic_pairs(ours: Traffic, theirs: Traffic) -> Iterator[tuple[str, float, float]]:
    """Numbers of the traffic that both sides know, in buckets, so that small differences have no distance."""
    other = asdict(bucket_of(theirs))
    for name, number in asdict(bucket_of(ours)).items():
        if number is not None and other[name] is not None:
            yield name, number, other[name]


def left_open(measured: Params) -> dict[str, Any]:
    """The defaults of tuned fields that are valid only where they were measured. With them, the gain is not known."""
    default = type(measured)()
    names = [name for name in ONLY_WHERE_MEASURED if hasattr(default, name)]
    return {name: getattr(default, name) for name in names if getattr(measured, name) != getattr(default, name)}


def _source(match: Match) -> str:
    if match.exact:
        return f"tuned on this hardware for {match.stored.record.workload}"
    return f"taken from the nearest tuned result, distance {match.distance:.2g} ({_apart(match)})"


def _why(key: Key, match: Match, measured: Params, left: Mapping[str, Any]) -> str:
    """The reason as a sentence. The gain was measured with all fields together: without some of them it is left out."""
    record, default, source = match.stored.record, type(measured)(), _source(match)
    store = f"store: {match.stored.store}"
    noise = f"noise floor {100 * record.noise_floor:.1f} %; {store}"
    if measured == default:
        reason = f"default: {source}, nothing faster found; {noise}"
    elif replace(measured, **left) == default:
        reason = f"default: nothing but {' and '.join(left)} differs in what is {source}; {store}"
    elif left:
        reason = f"{source}; {store}"
    else:
        gain = f"{record.gain.median:.2f}x the default (95 %: {record.gain.low:.2f} to {record.gain.high:.2f})"
        reason = f"{source}: {gain}, {noise}"
    notes = []
    if key.traffic.batch is None and record.key.traffic.batch is not None:
        notes.append("the module's batch is not known (set it by batch_size=)")
    for name in left:
        decider, value = ONLY_WHERE_MEASURED[name], getattr(measured, name)
        notes.append(f"{name} left to {decider}: {value} is valid only where it was measured, so the gain is not known")
    return "; ".join([reason, *notes])


def _apart(match: Match) -> str:
    """A result that is not exact, described by its workload, hardware and up to three of the largest differences."""
    record = match.stored.record
    shown = [f"{name} x{ratio:.3g}" for name, ratio in match.differences[:3]]
    differs = f"with {', '.join(shown)}" if shown else "with the same sizes"
    return f"for {record.workload} on {record.key.hardware.name} {differs}"

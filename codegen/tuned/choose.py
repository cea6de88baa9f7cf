"""Which plan fields to use: an exact tuned result, else the nearest one within a limit, else the default. And why.

Exact: the spec's shape, the ids' dtype and the hardware are equal, and so is the traffic's bucket as far as both sides
know it; the project's store answers before the user's, and that before what was shipped. Nearest: over all stores, by
distance. Caches that were warm never answer for cold ones.
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
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.plans import SPARSE
from embforge.codegen.tuned.document import TARGETS, params_of
from embforge.codegen.tuned.record import Hardware, Key, Record, Traffic
from embforge.codegen.tuned.shape import USUAL_BATCH, bucket_of, shape_of
from embforge.codegen.tuned.stores import STORES, Stored, read_stores, warn_once

LIMIT = 2.0
"""Of a nearest match: one size four times as large, or four sizes each twice as large. The fields' own choices step by
two to four, so beyond that the best choice of a field is expected to be another one."""
LEAST = 2.0**-6
"""What a number is at least where its logarithm is taken: a batch or a mean bag length may be 0."""
ONLY_WHERE_MEASURED = {"threads": "torch"}
"""Plan fields that hold for the very hardware and batch they were measured on, and who decides elsewhere."""


@dataclass(frozen=True)
class Choice:
    """Plan fields and why they are used."""

    params: Params
    why: str
    """A sentence for people."""
    record: Record | None = None
    """The tuned result that decided, be it for the default; None: none did."""
    path: Path | None = None
    """Its file."""
    source: str = ""
    """Where the result comes from, as `why` says it, without its gain; empty: there is none."""


@dataclass(frozen=True)
class Match:
    """A result of the same op, rule, dtypes, poolings and kind of hardware."""

    stored: Stored
    distance: float
    exact: bool
    known: int
    """Numbers of the traffic that both sides know."""
    differences: tuple[tuple[str, float], ...]
    """What differs and how many times larger the result's is, the largest difference first."""


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
    """The plan fields of `op` (forward or backward) for a spec on that hardware.

    `origin`: the spec's file, whose project store is asked; None: the spec's own `origin`. Never raises for what lies
    in a store: files that cannot be read are warned of, once each, and skipped.
    """
    default = params_type(target, op)()
    if target not in TARGETS:
        return Choice(default, f"default: nothing is tuned for {target}")
    found, problems = read_stores(op, target, origin or spec.origin)
    for problem in problems:
        warn_once(problem)
    if not found:  # what most modules see costs no more than a look at three directories
        return Choice(default, f"default: no store has a tuned {op} for {target}")
    key = key_of(op, target, spec, hardware, rule, traffic, id_dtype, cache)
    ranked = rank(key, found)
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
    """What a result for these is known by. A backward without a rule makes gradients only."""
    rule = None if op == "forward" else rule or SPARSE
    return Key(op, target, rule, shape_of(spec), hardware, traffic, id_dtype, cache)


def rank(key: Key, stored: Sequence[Stored]) -> list[Match]:
    """All results that could serve, the best first, however far: exact ones by store, then the others by distance.

    At equal distance: the one whose traffic is known better, then by store, then the one for the batch nearest to the
    usual if we do not know ours, then the newest.
    """
    matches = (_match(key, one) for one in stored if _comparable(key, one.record.key))
    return sorted(matches, key=lambda match: _order(key, match))


def _order(key: Key, match: Match) -> tuple[float, ...]:
    record, store, distance = match.stored.record, STORES.index(match.stored.store), round(match.distance, 9)
    last = (_from_usual(record.key.traffic) if key.traffic.batch is None else 0.0, -_time(record))
    return (0, store, -match.known, distance, *last) if match.exact else (1, distance, -match.known, store, *last)


def _from_usual(traffic: Traffic) -> float:
    """How many doublings a batch is away from the usual one; a batch that is not known is the farthest."""
    batch = bucket_of(traffic).batch
    return math.inf if batch is None else abs(math.log2(max(batch, LEAST) / USUAL_BATCH))


def _time(record: Record) -> float:
    return datetime.fromisoformat(record.created).timestamp()


def _comparable(key: Key, other: Key) -> bool:
    """Whether nothing but sizes differs. Hardware of which less is known, as another machine's, matches more."""
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
    """What is compared by ratio: a name, ours and theirs."""
    for name in ("features", "dim", "table_bytes"):
        yield name, getattr(key.shape, name), getattr(other.shape, name)
    yield "id_bytes", DTYPES[key.id_dtype].bytes, DTYPES[other.id_dtype].bytes
    for name, size in key.hardware.sizes.items():
        if name in other.hardware.sizes:
            yield name, size, other.hardware.sizes[name]
    for name, ours, theirs in _traffic_pairs(key.traffic, other.traffic):
        yield ("1 + skew", 1 + ours, 1 + theirs) if name == "skew" else (name, ours, theirs)


def _traffic_pairs(ours: Traffic, theirs: Traffic) -> Iterator[tuple[str, float, float]]:
    """Numbers of the traffic that both sides know, in buckets: what nobody would tune apart has no distance."""
    other = asdict(bucket_of(theirs))
    for name, number in asdict(bucket_of(ours)).items():
        if number is not None and other[name] is not None:
            yield name, number, other[name]


def left_open(measured: Params) -> dict[str, Any]:
    """The default of every field that was tuned and holds only where it was measured; without them no gain is known."""
    default = type(measured)()
    names = [name for name in ONLY_WHERE_MEASURED if hasattr(default, name)]
    return {name: getattr(default, name) for name in names if getattr(measured, name) != getattr(default, name)}


def _source(match: Match) -> str:
    if match.exact:
        return f"tuned on this hardware for {match.stored.record.workload}"
    return f"taken from the nearest tuned result, distance {match.distance:.2g} ({_apart(match)})"


def _why(key: Key, match: Match, measured: Params, left: Mapping[str, Any]) -> str:
    """The gain is told of all fields together, as it was measured: where some are left open, none is known."""
    record, default, source = match.stored.record, type(measured)(), _source(match)
    store = f"store: {match.stored.store}"
    noise = f"noise floor {100 * record.noise_floor:.1f} %; {store}"
    if measured == default:
        told = f"default: {source}, nothing faster found; {noise}"
    elif replace(measured, **left) == default:
        told = f"default: nothing but {' and '.join(left)} differs in what is {source}; {store}"
    elif left:
        told = f"{source}; {store}"
    else:
        gain = f"{record.gain.median:.2f}x the default (95 %: {record.gain.low:.2f} to {record.gain.high:.2f})"
        told = f"{source}: {gain}, {noise}"
    notes = []
    if key.traffic.batch is None and record.key.traffic.batch is not None:
        notes.append("the module's batch is not known (batch_size= says it)")
    for name in left:
        who, value = ONLY_WHERE_MEASURED[name], getattr(measured, name)
        notes.append(f"{name} left to {who}: {value} holds only where it was measured, so the gain here is not known")
    return "; ".join([told, *notes])


def _apart(match: Match) -> str:
    """What a result that is not exact was made for: its workload and up to three of the largest differences."""
    record = match.stored.record
    shown = [f"{name} x{ratio:.3g}" for name, ratio in match.differences[:3]]
    differs = f"with {', '.join(shown)}" if shown else "with the same sizes"
    return f"for {record.workload} on {record.key.hardware.name} {differs}"

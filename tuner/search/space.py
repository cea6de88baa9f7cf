"""The search space: the fields of a plan's params, the points that are worth a trial, and why the others are not.

Nothing is rendered here. Facts that only the compiler knows are read from its binary, by `resource_problem`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import numpy as np

from embforge.codegen.errors import PlanError
from embforge.codegen.params import Params, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.reading.suggestions import did_you_mean
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import BACKENDS, target_named
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.tuned.record import Hardware
from embforge.tuner.search.constraints import Context
from embforge.tuner.search.targets import OPS, TUNINGS
from embforge.verify.pairwise import covering

ENUMERATE_BELOW = 500
"""Spaces with fewer points than this are searched completely."""
LEAST_OCCUPANCY = 0.125
"""The least share of a multiprocessor's threads that must be resident.

No pipeline keeps more than 128 bytes in flight per lane. With an eighth of 2048 threads these are 32 KiB: just what is
needed to keep memory busy on sm_80 and sm_90, and half of that on sm_100. A plan with fewer threads cannot be as fast
as one with more."""
SAME_WORK = "same kernel"

Values = tuple[Any, ...]
"""The values of a point, in the order of the fields."""


@dataclass(frozen=True)
class Removed:
    """How many points a constraint was the first to refuse."""

    constraint: str
    why: str
    points: int


@dataclass(frozen=True)
class Space:
    """The tunable fields of an op on a target, and the points that are worth a trial."""

    op: str
    target: str
    arch: str
    fields: dict[str, tuple[Any, ...]]
    """Every field of the params with its choices, in order."""
    size: int
    """All combinations of choices."""
    points: tuple[Params, ...]
    """The allowed points, in a fixed order; the default is one of them."""
    removed: tuple[Removed, ...]
    """What removed the combinations that are not allowed; together these count all of them."""
    stands_for: Mapping[Params, Params] = field(repr=False, default_factory=dict)
    """For each point that was removed because it does the same as another, the allowed point that does the same."""

    @property
    def default(self) -> Params:
        return params_type(self.target, self.op)()


def space_of(
    op: str,
    target: str,
    arch: str,
    spec: CollectionSpec,
    hardware: Hardware,
    update: Update | None = None,
    *,
    longest_bag: int | None = None,
    id_dtype: str = "int64",
) -> Space:
    """The space of a `forward` or a `backward` (or without an update, of the reduction).

    `longest_bag` is the most ids that a bag of the traffic has, if that is known. `PlanError` for an op, a target or an
    arch that is not known, and for a collection whose default plan cannot work.
    """
    _check("op", op, OPS)
    _check("target", target, tuple(BACKENDS))
    context = Context(op, target, arch, spec, hardware, update, id_dtype, longest_bag)
    cls = params_type(target, op)
    choices = {f.name: f.metadata["choices"] for f in fields(cls)}
    every: dict[Values, Params] = {values: cls(*values) for values in product(*choices.values())}
    if not target_named(target).is_generated:  # one point
        return Space(op, target, arch, choices, len(every), tuple(every.values()), ())
    rules, default = TUNINGS[target].rules[op](context), _values(cls())
    left = dict(every)
    removed: list[Removed] = []

    def remove(name: str, why: str, refused: Iterable[Values]) -> None:
        refused = list(refused)
        for values in refused:
            del left[values]
        if refused:
            removed.append(Removed(name, why, len(refused)))

    for constraint in rules.constraints:
        refused = (v for v, params in left.items() if v != default and constraint.refuses(params))
        remove(constraint.name, constraint.why, refused)
    numbers: dict[Hashable, int] = {}  # works are compared by number, because comparing them takes long
    work = {values: numbers.setdefault(rules.work(params), len(numbers)) for values, params in left.items()}
    for idle in rules.idle:
        remove(idle.field, idle.why, _idle(left, work, list(choices).index(idle.field), default))
    kept: dict[int, Values] = {}
    for values in sorted(left, key=lambda v: -_alike(v, default)):
        kept.setdefault(work[values], values)
    remove(SAME_WORK, "a point that differs in several fields does the same", set(left) - set(kept.values()))
    twins = {every[v]: every[kept[work[v]]] for v in work if v not in left}
    return Space(op, target, arch, choices, len(every), tuple(left.values()), tuple(removed), twins)


def settle(space: Space, params: Params) -> Params:
    """The allowed point nearest to a point: itself, or one that does the same, or one with the most equal fields."""
    if params in space.stands_for:
        return space.stands_for[params]
    return max(space.points, key=lambda p: alike(p, params))


def covering_points(space: Space) -> tuple[Params, ...]:
    """A few allowed points in which nearly all pairs of choices meet. If the point of a pair is not allowed, the most
    similar one is taken."""
    codes = np.array([_codes(space, p) for p in space.points])
    used = {
        name: [choices[code] for code in np.unique(column)]
        for (name, choices), column in zip(space.fields.items(), codes.T, strict=True)
    }
    points: dict[Params, None] = {}
    for row in covering(used):
        wanted = [choices.index(row[name]) for name, choices in space.fields.items()]
        points[space.points[int((codes == wanted).sum(1).argmax())]] = None
    return tuple(points)


def alike(params: Params, other: Params) -> int:
    """How many fields of two points of a space are equal."""
    return _alike(_values(params), _values(other))


def encode(params: Params) -> dict[str, int | str]:
    """A point as values of categorical distributions: a pair is written as `4x4`."""
    return {f.name: _plain(getattr(params, f.name)) for f in fields(params)}


def decode(space: Space, values: Mapping[str, int | str]) -> Params:
    """The point with these values. `PlanError` for a field or a value that the space does not have."""
    chosen = {}
    for name, value in values.items():
        _check("name", name, tuple(space.fields))
        by_text = {_plain(choice): choice for choice in space.fields[name]}
        if value not in by_text:
            raise PlanError(f"plan field {name}={value!r} is not allowed; allowed: {', '.join(map(str, by_text))}")
        chosen[name] = by_text[value]
    return params_type(space.target, space.op)(**chosen)


def resource_problem(plan: Plan, resources: Iterable[Mapping[str, Any]]) -> str | None:
    """Why the figures of its symbols make a built kernel not worth running; None if it is, and for CPU kernels."""
    for symbol in resources:
        name, arch = symbol["symbol"], arch_named(plan.arch)
        if symbol["spill_bytes"] or symbol["local_instructions"]:
            return (
                f"{name} spills: {symbol['local_instructions']} accesses to local memory, {symbol['spill_bytes']} "
                f"bytes stored, {symbol['registers']} registers per thread; allowed: none"
            )
        if symbol["shared_bytes"] > arch.most_shared:
            return (
                f"{name} takes {symbol['shared_bytes']} bytes of shared memory per block; "
                f"allowed on {arch.name}: {arch.most_shared}"
            )
        if symbol["occupancy"] < LEAST_OCCUPANCY:
            return (
                f"{name} keeps {symbol['occupancy']:.1%} of a multiprocessor's threads resident "
                f"({symbol['registers']} registers per thread, {symbol['shared_bytes']} bytes of shared memory per "
                f"block); at least {LEAST_OCCUPANCY:.1%} are needed to keep memory busy"
            )
    return None


def _idle(left: Mapping[Values, Params], work: Mapping[Values, int], place: int, default: Values) -> list[Values]:
    """Points that do the same as a preferred one that differs only in this field. The default is preferred, or if it is
    not among the choices, the smallest."""
    kept: dict[Hashable, Values] = {}
    for values in left:  # in the order of choices
        group = (values[:place], values[place + 1 :], work[values])
        if group not in kept or values[place] == default[place]:
            kept[group] = values
    chosen = set(kept.values())
    return [values for values in left if values not in chosen]


def _alike(values: Values, others: Values) -> int:
    return sum(map(lambda a, b: a == b, values, others))


def _values(params: Params) -> Values:
    return tuple(getattr(params, f.name) for f in fields(params))


def _codes(space: Space, params: Params) -> list[int]:
    return [choices.index(getattr(params, name)) for name, choices in space.fields.items()]


def _plain(value: Any) -> int | str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


def _check(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise PlanError(f"plan field {what}={value!r} is not known{hint}; allowed: {', '.join(allowed)}")

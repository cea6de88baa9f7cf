"""Checks that all ranks make a module with the same arguments, before anything is allocated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from embforge.codegen.errors import RankError
from embforge.codegen.rules.rule import Update
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import BOUNDS_CHECKS
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.exchange.formats import Formats
from embforge.training.rule_groups import Optimizers, RuleGroups, rule_groups

REFUSED = "refused"


def wrong_argument(
    spec: object,
    plan: object,
    optimizer: Optimizers,
    bounds_check: str,
    duplicates: str,
    pools: str | None,
    formats: object,
) -> Exception | None:
    """The error for an argument that is wrong on this rank alone, None if there is none."""
    if not isinstance(spec, CollectionSpec):
        return TypeError(
            f"spec: got {type(spec).__name__}; allowed: CollectionSpec, see CollectionSpec.from_toml(path)"
        )
    if not isinstance(plan, ShardPlan):
        return TypeError(f"plan: got {type(plan).__name__}; allowed: a ShardPlan, e.g. ShardPlan.row_wise(spec)")
    if optimizer is None:
        return ValueError(
            "optimizer=None: sharded tables are trained by fused optimizers only, because a torch Parameter cannot "
            "hold a part of a table; pass an optimizer of ef.optim, e.g. ef.optim.SGD(lr=0.1) (after freeze() it does "
            "not change rows)"
        )
    if not isinstance(optimizer, Mapping | RuleGroups) and not isinstance(getattr(optimizer, "update", None), Update):
        return TypeError(
            f"optimizer: got {optimizer!r}; allowed: an optimizer of ef.optim, e.g. ef.optim.Adam(lr=1e-3), or a "
            "mapping from tables to optimizers"
        )
    try:
        rule_groups(optimizer, spec)
    except (TypeError, ValueError) as error:
        return error
    if bounds_check not in BOUNDS_CHECKS:
        return ValueError(f"bounds_check={bounds_check!r} is not known; allowed: {', '.join(BOUNDS_CHECKS)}")
    if duplicates not in ("keep", "merge"):
        return ValueError(f"duplicates={duplicates!r} is not known; allowed: keep, merge")
    if pools not in (None, "all", "different"):
        return ValueError(f"pools={pools!r} is not known; allowed: all, different, or None")
    if not isinstance(formats, Formats):
        return TypeError(
            f"formats: got {type(formats).__name__}; allowed: Formats, e.g. Formats(forward='bf16'), or None"
        )
    return None


def agree(exchange: Exchange, facts: Mapping[str, object], wrong: Exception | None, seed: int) -> int:
    """Checks that all ranks have the same facts, which are plain data by name. Returns the seed of rank 0.

    Raises `RankError` on all ranks if the facts differ, naming what differs. `wrong` is the error because of which this
    rank has no facts: then this rank raises it, and the others raise `RankError`. Only digests are exchanged, unless
    they differ.
    """
    own: dict[str, object] = {REFUSED: wrong is not None, "seed": seed}
    if wrong is None:
        own |= {name: digest(value) for name, value in facts.items()}
    of_ranks = _gathered(exchange, own)
    if wrong is not None:
        raise wrong
    for rank, of_rank in enumerate(of_ranks):
        if of_rank[REFUSED]:
            raise RankError(
                f"rank {rank}: its arguments were refused; the output of that rank says why. No rank has made the "
                "module"
            )
    for name in facts:
        others = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[name] != of_ranks[0][name]]
        if others:
            values = _gathered(exchange, facts[name])
            where, first, other = next(_differences(values[0], values[others[0]], name), (name, "one", "another"))
            raise RankError(
                f"{name}: ranks differ: {where} is {first!r} on rank 0, {other!r} on rank {others[0]}; every rank must "
                f"make the module with the same {name}"
            )
    seed_of_first: int = of_ranks[0]["seed"]
    return seed_of_first


def common_node_size(exchange: Exchange) -> int:
    """The number of ranks per node: what the caller or the mesh says; otherwise what torchrun says, if that is the same
    on all ranks; otherwise all ranks are one node."""
    ranks = exchange.ranks
    if ranks.explicit_node_size is not None:
        return ranks.explicit_node_size
    return ranks.node_size if len(set(_gathered(exchange, ranks.node_size))) == 1 else ranks.size


def digest(data: object) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _gathered(exchange: Exchange, own: object) -> list[Any]:
    """The objects of all ranks, in the order of ranks."""
    if exchange.ranks.size == 1:
        return [own]
    of_ranks: list[Any] = [None] * exchange.ranks.size
    exchange.call("arguments", dist.all_gather_object, of_ranks, own)
    return of_ranks


def _differences(first: object, other: object, where: str) -> Iterator[tuple[str, object, object]]:
    """Yields where plain data differ, with both values."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in [*first, *(key for key in other if key not in first)]:
            yield from _differences(first.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(first, list | tuple) and isinstance(other, list | tuple) and len(first) == len(other):
        for number, (a, b) in enumerate(zip(first, other, strict=True)):
            name = a.get("name", number) if isinstance(a, dict) else number
            yield from _differences(a, b, f"{where}[{name}]")
    elif first != other:
        yield where, first, other


def optimizer_facts(groups: RuleGroups) -> dict[str, Any]:
    """What must be the same on all ranks about the optimizers: by the names of their groups, if there are several."""
    by_group = {}
    for number, group in enumerate(groups.groups):
        optimizer = group.optimizer
        facts = {"update": optimizer.update.to_dict(), "lr": float(optimizer.lr), "hyper": optimizer.hyper_values}
        by_group[group.name] = facts | ({"tables": groups.table_names(group), "group": number} if group.name else {})
    return by_group.get("", by_group)

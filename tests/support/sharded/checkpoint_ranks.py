"""The ranks of `test_checkpoint.py`. Each function runs on every rank of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.sharded.mix import batch_of, outcome, step

import embforge as ef
from embforge.sharded import (
    ColumnWise,
    DataParallel,
    Grid,
    Hierarchical,
    RowWise,
    ShardedEmbeddingCollection,
    ShardPlan,
    TableWise,
)

KINDS: dict[str, Any] = {
    "modulo": RowWise(),
    "block": RowWise("block"),
    "columns": ColumnWise(),
    "pieces": ColumnWise(4),
    "whole": TableWise(1),
    "grid": Grid(2),
    "grid_block": Grid(2, "block"),
    "copies": DataParallel(),
    "nodes": Hierarchical(),
}
SPEC = ef.CollectionSpec(
    [ef.TableSpec(name, 11, 8) for name in KINDS] + [ef.TableSpec("short", 2, 4)],
    [ef.FeatureSpec(name, name) for name in (*KINDS, "short")],
)
PLAN = ShardPlan(KINDS | {"short": RowWise("block")})
"""A table of every kind, and a table of which one of three ranks holds no row."""


def made(plan: ShardPlan = PLAN) -> ShardedEmbeddingCollection:
    return ShardedEmbeddingCollection(SPEC, plan, optimizer=ef.optim.Adam(lr=0.05), backend="reference")


def whole(module: ShardedEmbeddingCollection) -> dict[str, torch.Tensor]:
    """All rows, states and counters, gathered from all ranks."""
    found = {}
    for table in SPEC.tables:
        found[table.name] = module.full(table.name)
        found |= {f"{table.name}.{name}": state for name, state in module.full_optimizer_state(table.name).items()}
    return found | {key: value for key, value in module.state_dict().items() if key.endswith(("step", "seed"))}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def round_trip(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Saves a trained module. A new module that loads it has the same state and trains in the same way."""
    first, second, third = made(), made(), made()
    for number in range(2):
        step(first, batch_of(10 * number + rank, 3, SPEC))
    expected = whole(first)
    dcp.save({"m": first.state_dict()}, checkpoint_id=folder)
    found = {"different": not same(whole(second), expected)}
    state = {"m": second.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    second.load_state_dict(state["m"])
    dcp.load({"m": third}, checkpoint_id=folder)  # which calls state_dict() and load_state_dict() itself
    found["same"] = same(whole(second), expected) and same(whole(third), expected)
    for module in (first, second):
        step(module, batch_of(100 + rank, 3, SPEC))
    found["goes on"] = same(whole(second), whole(first)) and not same(whole(first), expected)
    table = first.full("modulo")
    found["names"] = torch.equal(first.state_dict()[f"tables.modulo[{rank}::{size}].weight"], table[rank::size])
    return found


def refusal(state: dict[str, Any], folder: str) -> str:
    """The error of torch for a checkpoint that it does not load; its type is no Exception."""
    try:
        dcp.load(state, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        return "; ".join(str(of_rank[0]) for of_rank in error.failures.values())
    return ""


def elsewhere(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Loads what was saved by another number of ranks, or under another plan."""
    fresh = made()
    state, before = {"m": fresh.state_dict()}, whole(fresh)
    found: dict[str, Any] = {"ranks": refusal(state, folder)}
    found["untouched"] = same(whole(fresh), before)
    other = {"tables.modulo[0::7].weight": torch.zeros(2, 8), "tables.modulo[1::7].weight": torch.zeros(2, 8)}
    found["sentence"] = outcome(lambda: fresh.load_state_dict(other))
    swapped = made(ShardPlan(dict(PLAN.kinds) | {"modulo": RowWise("block"), "block": RowWise()}))
    dcp.save({"m": fresh.state_dict()}, checkpoint_id=f"{folder}_{size}")
    state = {"m": swapped.state_dict()}
    found["plan"] = refusal(state, f"{folder}_{size}")
    return found

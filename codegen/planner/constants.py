"""Constants of the cost model from the tuned store: how fast the same spec was looked up and updated."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from embforge.codegen.planner.access import Access
from embforge.codegen.planner.cost import Step, costs_of, loads_of
from embforge.codegen.planner.topology import Link, Topology
from embforge.codegen.rules.rule import Update
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.sharding.placement import place
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.record import Record
from embforge.codegen.tuned.shape import rule_named, shape_of
from embforge.codegen.tuned.stores import read_stores

NOWHERE = Topology("nowhere", 1, 1, 1.0, 1.0, 1.0, Link(1.0, 0.0), Link(1.0, 0.0))
"""A topology for counting bytes; times mean nothing on it."""


def with_tuned(topology: Topology, spec: CollectionSpec, update: Update | None) -> tuple[Topology, list[str]]:
    """The topology with the bandwidths that the tuned store has for this spec on such hardware, and notes on them.

    Only results from the hardware that the topology names are used; none if it names no hardware.
    """
    notes = []
    for op, field in (("forward", "lookup_bandwidth"), ("backward", "update_bandwidth")):
        if op == "backward" and update is None:
            continue
        record = _result(topology, spec, op, None if op == "forward" else rule_named(update))
        if record is not None:
            bandwidth = _bytes(spec, record, update) / median(record.samples["best"])
            if op == "forward":
                topology = replace(topology, lookup_bandwidth=bandwidth)
            else:
                topology = replace(topology, update_bandwidth=bandwidth)
            notes.append(
                f"{field.replace('_', ' ')} {bandwidth / 1e9:,.4g} GB/s: this spec's tuned {op} of "
                f"{record.created[:10]} on {record.key.hardware.name} ({record.workload})"
            )
    return topology, notes


def _result(topology: Topology, spec: CollectionSpec, op: str, rule: str | None) -> Record | None:
    if not topology.hardware:
        return None
    results, _ = read_stores(op, origin=spec.origin)
    digest = shape_of(spec).digest
    for result in results:
        key, identity = result.record.key, result.record.key.hardware.identity
        same = all(identity.get(name) == value for name, value in topology.hardware)
        same = same and bool(key.traffic.batch and key.traffic.bag_length)
        if same and key.shape.digest == digest and key.rule == rule and result.record.samples.get("best"):
            return result.record
    return None


def _bytes(spec: CollectionSpec, record: Record, update: Update | None) -> float:
    """The bytes that one call of the record moved, as the cost model counts them."""
    traffic = record.key.traffic
    assert traffic.batch and traffic.bag_length
    length = traffic.bag_length if "len=" in record.workload or "trace:" in record.workload else None
    step = Step(round(traffic.batch), Access(traffic.skew or 0.0, length), update)
    alone = place(ShardPlan.table_wise(spec), spec, 1)
    loads = loads_of(alone, costs_of(alone, NOWHERE, step))
    return float(loads["read" if record.key.op == "forward" else "updated"][0])

"""Vectors that are sent in fewer bits have the errors of the format's precision and the bytes of the formulas. They
never hide a number that is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.sharded.cases import (
    Training,
    arguments_of,
    drawn_rows,
    node_size_of,
    part_of,
    sharded_module,
    sizes_of,
    whole_batch,
)
from support.sharded.exact_traffic import count_ids, traffic_of
from support.sharded.ranks import run_ranks
from torch import Tensor

import embforge as ef
from embforge.codegen.planner.traffic import Wire
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.sharding.placement import place
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

OFF = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 0.5 / 127}
"""How far a number may be off, relative to the largest of its row: half a step of fp16 (11 bits), bf16 (8) and e4m3 (4)
relative to the number itself, half a step of 127 of int8. The scale of packed rows is fp32: SLACK allows for it."""
SLACK = 1e-5
PAIRS = (("fp16", "bf16"), ("bf16", "fp16"), ("fp8", "int8"), ("int8", "fp8"), ("fp32", "int8"), ("fp16", "fp32"))
"""Pairs of formats: that of results and that of gradients."""
SPEC = CollectionSpec(
    (TableSpec("a", 11, 9), TableSpec("b", 7, 12), TableSpec("c", 5, 6), TableSpec("d", 6, 5)),
    (
        FeatureSpec("sum", "a"),
        FeatureSpec("rows", "b", "none"),
        FeatureSpec("wide", "c"),
        FeatureSpec("slots", "d", "concat", hotness=3),
    ),
)
KINDS = (("a", "modulo"), ("b", "column_wise"), ("c", "hierarchical"), ("d", "block"))
TRAINING = Training("formats", SPEC, KINDS, ef.optim.SGD(lr=1.0))
"""With a rate of 1, rows change by exactly the gradients that arrive."""


@pytest.mark.parametrize("size", [2, 4])
def test_errors_are_those_of_the_formats(size: int) -> None:
    """Compares each pair of formats with fp32 on the same batch, and the bytes with the formulas."""
    counted = run_ranks(size, errors)
    batches = [_numbers(part_of(SPEC, whole_batch(SPEC, 0), sizes_of(size, 0), rank)) for rank in range(size)]
    geometry = Geometry(place(TRAINING.plan(size), SPEC, size, node_size_of(size)))
    for number, (forward, backward) in enumerate(PAIRS):
        wire = Wire(forward, backward, pools="different")  # type: ignore[arg-type]
        traffic = traffic_of(geometry, count_ids(geometry, batches), wire, TRAINING.optimizer.update)
        for rank in range(size):
            assert counted[rank][number] == traffic.sent(rank), (forward, backward, rank)


def errors(rank: int, size: int) -> list[dict[str, int]]:
    whole = whole_batch(SPEC, 0)
    part = part_of(SPEC, whole, sizes_of(size, 0), rank)
    true = sharded_module(TRAINING, size)
    results = step_of(true, part)
    counted = []
    for forward, backward in PAIRS:
        module = sharded_module(TRAINING, size, formats=ef.sharded.Formats(forward, backward))  # type: ignore[arg-type]
        found = step_of(module, part)
        counted.append({name: count for name, count in module.counters().items() if count})
        for feature, ids, lengths in zip(SPEC.features, part.values, part.lengths, strict=True):
            off = (found[feature.name] - results[feature.name]).abs()
            largest = drawn_rows(SPEC)[feature.table].abs().amax(1)[ids]
            if feature.pooling == "sum":  # every rank's partial sum is off by what its own largest number allows
                largest = (
                    torch.stack([one.sum() for one in largest.split(lengths.tolist())]) if len(lengths) else largest
                )
            elif feature.pooling == "concat":
                largest = results[feature.name].abs().amax(1) if len(lengths) else largest
            allowed = OFF[forward] * (1 + SLACK) * largest + 2.0**-22
            assert bool((off <= allowed[:, None]).all()), (forward, feature.name, (off / allowed[:, None]).max())
            if forward != "fp32" and off.numel():
                assert bool(off.any()), f"{forward}: {feature.name} is exact: it did not travel in that format"
        for table, allowed in allowed_of_rows(whole, OFF[backward]).items():
            off = (module.full(table) - true.full(table)).abs()
            assert bool((off <= allowed[:, None]).all()), (backward, table, (off / allowed[:, None]).max())
            assert backward == "fp32" or bool(off.any()), (
                f"{backward}: gradients of {table} did not travel in that format"
            )
    return counted


def step_of(module: Any, part: Any) -> dict[str, Tensor]:
    """Makes a step whose gradients do not depend on the results, and returns the results."""
    results: dict[str, Tensor] = module.forward_dict(*arguments_of(part))
    pairs = zip(results.values(), part.wanted, strict=True)
    torch.stack([(result * wanted).sum() for result, wanted in pairs]).sum().backward()
    return {name: result.detach() for name, result in results.items()}


def allowed_of_rows(whole: Any, off: float) -> dict[str, Tensor]:
    """For every row: the error that is allowed, a share of the largest number of each gradient that it gets."""
    found = {}
    for feature, ids, lengths, wanted in zip(SPEC.features, whole.values, whole.lengths, whole.wanted, strict=True):
        largest = wanted.abs().amax(1)
        if feature.pooling != "none":
            largest = largest.repeat_interleave(lengths)
        rows = torch.zeros(SPEC.table(feature.table).num_embeddings)
        found[feature.table] = rows.index_add_(0, ids, largest) * off * (1 + SLACK) + 2.0**-20
    return found


def _numbers(part: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    values, offsets, _ = arguments_of(part)
    return values.numpy(), offsets.numpy()


def test_infinities_and_nans_arrive() -> None:
    """In every format, an infinite row gives no finite result, and an infinite gradient no finite row."""
    run_ranks(2, not_finite)


def not_finite(rank: int, size: int) -> None:
    part = part_of(SPEC, whole_batch(SPEC, 0), sizes_of(size, 0), rank)
    rows = drawn_rows(SPEC)
    for table, bad in zip(SPEC.tables, (torch.inf, -torch.inf, torch.nan, torch.inf), strict=True):
        rows[table.name][2, 3] = bad
    for format in ("fp16", "bf16", "fp8", "int8"):
        modules = []
        for formats in (None, ef.sharded.Formats(format, format)):  # type: ignore[arg-type]
            module = sharded_module(TRAINING, size, formats=formats)
            module.load_full(rows)
            modules.append((module, step_of(module, part)))
        (true, wanted), (module, found) = modules
        for name, result in wanted.items():
            lost = found[name].isfinite() & ~result.isfinite()
            assert not bool(lost.any()), (format, name)
        for table in SPEC.tables:
            lost = module.full(table.name).isfinite() & ~true.full(table.name).isfinite()
            assert not bool(lost.any()), (format, table.name)
        gradients_not_finite(module, part, format)


def gradients_not_finite(module: Any, part: Any, format: str) -> None:
    """Makes a step with infinite gradients of this rank's first sample, if it has one, and checks the rows."""
    module.load_full(drawn_rows(SPEC))
    results = module.forward_dict(*arguments_of(part))
    bad = torch.zeros(()) if not len(results["sum"]) else (results["sum"][0] * torch.inf).sum()
    (bad + sum(result.sum() for result in results.values())).backward()
    ids = part.values[0][: int(part.lengths[0][0])] if part.lengths.shape[1] else part.values[0][:0]
    rows = module.full("a")
    assert not bool(rows[ids].isfinite().all(1).any()), format

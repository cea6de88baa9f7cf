"""Every instruction set that this machine can run gives the reference's bits, not only the best one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from embforge.codegen.build import build
from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.machine import X86_NEEDS, host_isa
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.cpu.forward import CpuForward
from embforge.launch.metadata import metadata_of
from embforge.launch.reference import forward as reference
from embforge.storage.static import allocate

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 6e-8, 6.2e-5, 65504.0, 65520.0, 3.4e38, 448.0]

PARAMS = {
    "fp32": CpuParams(tile_vectors=2, grain_bytes=16384, rows_unrolled=4, stores="streaming"),
    "fp16": CpuParams(tile_vectors=2, grain_bytes=16384, rows_unrolled=2, stores="streaming"),
    "bf16": CpuParams(tile_vectors=2, grain_bytes=16384),
}
"""The parameters by output dtype. Only aligned rows are streamed; the others are stored in the usual way."""


def runnable() -> list[str]:
    """The instruction sets that this machine can run."""
    order = [*X86_NEEDS, "generic"]
    best = host_isa()
    return order[order.index(best) :] if best in order else [best, "generic"]


KINDS = (("sum", False), ("mean", True), ("max", False), ("none", True))
"""Poolings, and whether their ids have weights."""


def spec_of(output_dtype: str) -> CollectionSpec:
    """Every table format, in rows of full vectors with a rest and in rows that are a rest only, with every pooling.

    Output formats share the combinations between them, because each bucket costs time to compile.
    """
    turn = OUTPUT_DTYPES.index(output_dtype)
    tables, features = [], []
    for number, ((half, dim), (place, dtype)) in enumerate(product(enumerate((1, 21)), enumerate(TABLE_DTYPES))):
        pooling, weighted = KINDS[(place + half * len(OUTPUT_DTYPES) + turn) % len(KINDS)]
        tables.append(TableSpec(f"t{dim}_{dtype}", 40, dim, dtype))  # type: ignore[arg-type]
        features.append(FeatureSpec(f"f{number}", tables[-1].name, pooling, weighted, padding_idx=3))  # type: ignore[arg-type]
    return CollectionSpec(tables, features, output_dtype)  # type: ignore[arg-type]


def test_every_pooling_meets_every_table_format_and_every_output() -> None:
    met = set()
    for output_dtype in OUTPUT_DTYPES:
        spec = spec_of(output_dtype)
        met |= {(spec.table(f.table).dtype, f.pooling) for f in spec.features}
        assert {f.pooling for f in spec.features} == {pooling for pooling, _ in KINDS}
    assert met == set(product(TABLE_DTYPES, (pooling for pooling, _ in KINDS)))


def random_tables(plan: Plan) -> list[Tensor]:
    """The rows of all tables, with every kind of number in the first rows."""
    torch.manual_seed(7)
    tables = []
    for layout in plan.layout.tables:
        rows = torch.randn(layout.table.num_embeddings, layout.table.embedding_dim)
        rows.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
        tables.append(allocate(layout, torch.device("cpu")).copy_(rows))
    return tables


def random_batch(plan: Plan, long_bag: int = 0) -> tuple[Batch, int]:
    """A batch in which each feature has short bags and one longer than a chunk, and the number of elements of the
    `none` features' rows."""
    features, size = len(plan.spec.features), 6
    lengths = torch.randint(0, 9, (features, size))
    lengths[:, 1] = 150
    lengths[::9, 4] += long_bag
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    values = torch.randint(0, plan.spec.tables[0].num_embeddings, (int(offsets[-1]),))
    rows = lengths.sum(1)
    elements = sum(int(rows[f.index]) * f.dim for f in plan.layout.sequence_features)
    return Batch(values, offsets, torch.randn(values.numel()), size, None), elements


def outputs_of_isas() -> list[Any]:
    """This machine's own set runs nearly all other tests: it meets one output here, and the others in the soak."""
    own = host_isa()
    return [
        pytest.param(isa, dtype, marks=pytest.mark.soak if isa == own != "generic" and dtype != "fp16" else ())
        for isa, dtype in product(runnable(), OUTPUT_DTYPES)
    ]


@pytest.mark.parametrize(("isa", "output_dtype"), outputs_of_isas())
def test_isa_gives_the_references_bits(isa: str, output_dtype: str) -> None:
    spec = spec_of(output_dtype)
    plan = Plan("forward", "cpu", isa, "int64", spec, PARAMS[output_dtype])
    kernel = CpuForward(plan, build(plan).binary)
    tables = random_tables(plan)
    batch, elements = random_batch(plan)
    pooled, sequence = kernel(metadata_of(tables, "error"), tables, batch, elements, "error")
    wanted = reference.lookup(spec, batch.values, batch.offsets, batch.weights, tables, bounds_check="error")
    assert sequence is not None
    for got, want in zip((pooled, sequence), wanted, strict=True):
        same = (got == want) | (got.isnan() & want.isnan())
        assert same.all()
        assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())

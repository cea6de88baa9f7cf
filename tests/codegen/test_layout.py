"""Layouts and buckets: rows never overlap, little is wasted, columns tile the output, features are grouped by loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.selections import SELECTIONS
from support.strategies import examples, specs

from embforge.codegen.buckets import buckets_of
from embforge.codegen.dtypes import DTYPES, TABLE_DTYPES
from embforge.codegen.layout import largest_power_of_two, layout_of
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import MAX_DIM, CollectionSpec, FeatureSpec, TableSpec


def of_table(dim: int, dtype: str = "fp32") -> tuple[int, int, int]:
    spec = CollectionSpec([TableSpec("t", 2**33, dim, dtype)], [FeatureSpec("f", "t")])
    table = layout_of(spec).tables[0]
    return table.row_bytes, table.stride_bytes, table.alignment


@pytest.mark.parametrize(
    ("dim", "dtype", "expected"),
    [
        (1, "fp32", (4, 4, 4)),  # 16 would quadruple it
        (3, "fp32", (12, 12, 4)),
        (4, "fp32", (16, 16, 16)),
        (7, "fp32", (28, 28, 4)),  # 32 wastes a seventh
        (8, "fp32", (32, 32, 32)),
        (15, "fp32", (60, 64, 32)),
        (33, "fp32", (132, 144, 16)),  # 9 %
        (9, "fp32", (36, 40, 8)),  # 16 would waste a third, 8 a ninth
        (128, "fp32", (512, 512, 32)),
        (1000, "fp32", (4000, 4000, 32)),
        (1, "fp16", (2, 2, 2)),
        (33, "bf16", (66, 72, 8)),  # 80 wastes a fifth, 72 a eleventh
        (1, "fp8_e4m3", (1, 1, 1)),
        (3, "fp8_e4m3", (3, 3, 1)),
        (15, "fp8_e4m3", (15, 16, 16)),
        (15, "fp8_e5m2", (15, 16, 16)),
    ],
)
def test_row_strides_are_padded_unless_that_wastes_too_much(
    dim: int, dtype: str, expected: tuple[int, int, int]
) -> None:
    assert of_table(dim, dtype) == expected


@given(dim=st.integers(1, MAX_DIM), dtype=st.sampled_from(TABLE_DTYPES))
@examples(200)
def test_every_stride_is_aligned_and_wastes_little(dim: int, dtype: str) -> None:
    row, stride, alignment = of_table(dim, dtype)
    assert row == dim * DTYPES[dtype].bytes
    assert row <= stride <= 1.125 * row
    assert stride % DTYPES[dtype].bytes == 0
    assert stride % alignment == 0 and alignment & (alignment - 1) == 0


@given(spec=specs())
@examples(100)
def test_columns_tile_the_output(spec: CollectionSpec) -> None:
    layout = layout_of(spec)
    column = 0
    for feature_layout, feature in zip(layout.features, spec.features, strict=True):
        assert feature_layout.feature == feature
        assert spec.tables[feature_layout.table_index].name == feature.table
        if feature.pooling == "none":
            assert feature_layout.column is None
            continue
        assert feature_layout.column == column
        assert feature_layout.width == feature_layout.dim * (feature.hotness if feature.pooling == "concat" else 1)  # type: ignore[operator]
        column += feature_layout.width
    assert layout.output_width == column
    assert [f.feature.name for f in layout.sequence_features] == [f.name for f in spec.features if f.pooling == "none"]


@given(spec=specs(most_tables=6, most_features=12))
@examples(100)
def test_every_feature_is_in_one_bucket_with_its_like(spec: CollectionSpec) -> None:
    layout = layout_of(spec)
    buckets = buckets_of(layout)
    assert sorted(f.index for b in buckets for f in b.features) == list(range(len(spec.features)))
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert len({b.label for b in buckets}) == len(buckets)
    assert [b.row_bytes for b in buckets] == sorted((b.row_bytes for b in buckets), reverse=True)
    for bucket in buckets:
        for feature_layout in bucket.features:
            table = layout.tables[feature_layout.table_index]
            assert (bucket.dim, bucket.dtype, bucket.stride_bytes) == (
                feature_layout.dim,
                table.table.dtype,
                table.stride_bytes,
            )
            assert bucket.pooling == feature_layout.feature.kind.undivided
            assert bucket.weighted == feature_layout.feature.weighted


def test_sum_mean_and_sqrtn_share_a_bucket() -> None:
    features = [FeatureSpec(p, "t", p, hotness=2) for p in POOLINGS]
    buckets = buckets_of(layout_of(CollectionSpec([TableSpec("t", 5, 8)], features)))
    assert {b.pooling.name: [f.feature.name for f in b.features] for b in buckets} == {
        "sum": ["sum", "mean", "sqrtn"],
        **{name: [name] for name in SELECTIONS},
        "concat": ["concat"],
        "none": ["none"],
    }


@pytest.mark.parametrize(
    ("value", "limit", "power"), [(0, 32, 32), (1, 32, 1), (24, 32, 8), (96, 32, 32), (96, 16, 16)]
)
def test_the_largest_power_of_two_that_divides_a_number(value: int, limit: int, power: int) -> None:
    assert largest_power_of_two(value, limit) == power

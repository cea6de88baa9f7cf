"""Another row length is advised where reading a row would move fewer bytes, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples, specs

from embforge.codegen.layout import layout_of
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.estimate.layout_advice import LEAST_SAVED, Advice, advice, mean_moved
from embforge.tuner.search.targets import TUNINGS


def spec_of(*dims: int, dtype: str = "fp32", rows: int = 1000) -> CollectionSpec:
    tables = [TableSpec(f"t{dim}", rows, dim, dtype) for dim in dims]
    return CollectionSpec(tables, [FeatureSpec(f"f{t.name}", t.name) for t in tables])


def advised(target: str, *dims: int, dtype: str = "fp32") -> list[Advice]:
    return advice(layout_of(spec_of(*dims, dtype=dtype)), target)


@given(st.integers(1, 700), st.integers(0, 200), st.sampled_from([32, 64]))
@examples(100)
def test_the_mean_of_moved_bytes_is_that_of_all_rows(row_bytes: int, padding: int, unit: int) -> None:
    stride = row_bytes + padding
    units = [(i * stride + row_bytes - 1) // unit - i * stride // unit + 1 for i in range(unit)]
    assert mean_moved(row_bytes, stride, unit) == Fraction(sum(units) * unit, unit)


@pytest.mark.parametrize("target", ["cpu", "cuda", "simt"])
def test_rows_that_fit_need_no_advice(target: str) -> None:
    assert advised(target, 16, 64, 128) == []


def test_rows_that_span_two_cache_lines_get_advice() -> None:
    """12 floats are 48 bytes: of four consecutive rows, two span two lines of 64. No row needs more sectors of 32."""
    (found,) = advised("cpu", 12)
    assert (found.table, found.dim, found.row_bytes, found.stride_bytes) == ("t12", 12, 48, 48)
    assert (found.moved, found.better_moved, found.better_dim) == (96, 64, 16)
    assert found.saved == pytest.approx(1 / 3)
    assert found.better_table_bytes / found.table_bytes == 64 / 48
    assert advised("cuda", 12) == []


def test_the_sentence_says_what_to_do_and_what_it_costs() -> None:
    (found,) = advised("cpu", 12)
    for part in ("table 't12'", "embedding_dim=16 instead of 12", "33% less", "1.33 times the", "4 more columns"):
        assert part in found.sentence
    assert "cache lines" in found.sentence and "make a new module" in found.sentence
    assert "sectors" in replace(found, target="cuda").sentence


def test_the_largest_share_comes_first() -> None:
    found = advised("cpu", 64, 26, 12, 44)
    assert len(found) > 1
    assert [a.saved for a in found] == sorted((a.saved for a in found), reverse=True)


@given(specs(), st.sampled_from(sorted(TUNINGS)))
@examples(40)
def test_advice_keeps_what_it_promises(spec: CollectionSpec, target: str) -> None:
    """With the advised length, a row moves the promised bytes, and no more advice is given about that table."""
    for found in advice(layout_of(spec), target):
        assert found.better_dim > found.dim and found.saved >= LEAST_SAVED
        tables = tuple(replace(t, embedding_dim=found.better_dim) if t.name == found.table else t for t in spec.tables)
        taken = layout_of(replace(spec, tables=tables))
        table_layout = next(t for t in taken.tables if t.table.name == found.table)
        moved = mean_moved(table_layout.row_bytes, table_layout.stride_bytes, TUNINGS[target].unit_bytes)
        assert float(moved) == found.better_moved
        assert table_layout.stride_bytes * table_layout.table.num_embeddings == found.better_table_bytes
        assert found.table not in [again.table for again in advice(taken, target)]

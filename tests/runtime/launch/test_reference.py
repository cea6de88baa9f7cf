"""The reference backend against loops over numpy numbers, bit for bit, and its promises about size and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conformance import naive
from hypothesis import given
from support.selections import SELECTIONS
from support.strategies import cases, examples, seeds, specs

from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.poolings import POOLINGS, PoolingName
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.launch.reference import forward as reference
from embforge.verify.cases import Case, Drawn, draw_batch, draw_tables

KINDS = [(name, w) for name, kind in POOLINGS.items() for w in (False, True) if kind.weightable or not w]


def check(spec: CollectionSpec, drawn: Drawn, tables: tuple[torch.Tensor, ...]) -> None:
    pooled, sequence = reference.lookup(spec, *drawn, tables, bounds_check="zero")
    with np.errstate(all="ignore"):
        want_pooled, want_sequence = naive.lookup(spec, *drawn, tables)
    np.testing.assert_array_equal(naive.bits_of(pooled), want_pooled)
    np.testing.assert_array_equal(naive.bits_of(sequence), want_sequence)


def one_feature(pooling: str, weighted: bool = False, output: str = "fp32", table: str = "fp32", **fields: Any) -> Any:
    hotness = 3 if pooling == "concat" else None
    feature = FeatureSpec("f", "t", pooling, weighted, hotness, **fields)
    return CollectionSpec([TableSpec("t", 11, 3, table)], [feature], output)


@given(spec=specs(), case=cases(most_samples=5), seed=seeds)
@examples(60)
def test_any_spec_and_batch_equals_the_naive_lookup(spec: CollectionSpec, case: Case, seed: int) -> None:
    check(spec, draw_batch(spec, case, seed), draw_tables(spec, seed, special=bool(seed % 2)))


@pytest.mark.parametrize("table", TABLE_DTYPES)
@pytest.mark.parametrize("output", OUTPUT_DTYPES)
@pytest.mark.parametrize(("pooling", "weighted"), KINDS)
def test_every_pooling_and_dtype_equals_the_naive_lookup(pooling: str, weighted: bool, output: str, table: str) -> None:
    spec = one_feature(pooling, weighted, output, table, padding_idx=2)
    for seed, case in enumerate([Case(8, "edges"), Case(8, bad_ids=True), Case(8, "one", weights="special")]):
        check(spec, draw_batch(spec, case, seed), draw_tables(spec, seed, special=seed == 1))


@pytest.mark.parametrize(("pooling", "weighted"), KINDS)
def test_a_very_long_bag_equals_the_naive_lookup(pooling: str, weighted: bool) -> None:
    spec = one_feature(pooling, weighted, padding_idx=2)
    drawn = draw_batch(spec, Case(2, "long", bad_ids=True), 5)
    assert pooling in ("none", "concat") or int(drawn.offsets.diff().max()) == 300_000
    check(spec, drawn, draw_tables(spec, 5))


def sum_of(ids: list[int]) -> float:
    """The pooled sum of rows 1.0 (id 0) and 2^-24 (id 1); 1.0 + 2^-24 rounds to 1.0, but two of 2^-24 add to 2^-23."""
    spec = CollectionSpec([TableSpec("t", 2, 1)], [FeatureSpec("f", "t")])
    table = torch.tensor([[1.0], [2.0**-24]])
    offsets = torch.tensor([0, len(ids)])
    pooled, _ = reference.lookup(spec, torch.tensor(ids), offsets, None, [table], bounds_check="zero")
    return pooled.item()


def test_sum_goes_by_chunks_of_64() -> None:
    assert sum_of([0] + [1] * 64) == 1.0
    assert sum_of([0] + [1] * 65) == 1.0 + 2.0**-23  # the second chunk's two met each other first


def test_absent_ids_keep_their_place_in_the_chunk() -> None:
    assert sum_of([0] + [1] * 62 + [-1] + [1] * 2) == 1.0 + 2.0**-23


def test_weights_of_a_feature_that_is_not_weighted_are_ignored() -> None:
    spec = one_feature("mean")
    drawn, tables = draw_batch(spec, Case(6), 3), draw_tables(spec, 3)
    with_weights = reference.lookup(spec, *drawn, tables, bounds_check="error")
    without = reference.lookup(spec, drawn.values, drawn.offsets, None, tables, bounds_check="error")
    assert all(map(torch.equal, with_weights, without))


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", "concat", "none"])
def test_missing_weights_are_ones(pooling: str) -> None:
    spec = one_feature(pooling, weighted=True)
    drawn, tables = draw_batch(spec, Case(6, weights="absent"), 3), draw_tables(spec, 3)
    ones = torch.ones(drawn.values.numel())
    given_ones = reference.lookup(spec, drawn.values, drawn.offsets, ones, tables, bounds_check="error")
    assert all(map(torch.equal, given_ones, reference.lookup(spec, *drawn, tables, bounds_check="error")))


def test_weights_that_add_up_to_zero_give_zeros() -> None:
    spec = one_feature("mean", weighted=True)
    weights = torch.tensor([1.0, -1.0])
    pooled, _ = reference.lookup(
        spec, torch.tensor([1, 2]), torch.tensor([0, 2]), weights, draw_tables(spec, 0), bounds_check="error"
    )
    assert pooled.tolist() == [[0.0, 0.0, 0.0]]


def test_square_root_is_rounded_correctly() -> None:
    """torch.sqrt is not rounded correctly on a CPU."""
    spec = CollectionSpec([TableSpec("t", 1, 1)], [FeatureSpec("f", "t", "sqrtn")])
    lengths = torch.arange(1, 500)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.zeros(int(offsets[-1]), dtype=torch.int64)
    pooled, _ = reference.lookup(spec, ids, offsets, None, [torch.ones(1, 1)], bounds_check="error")
    counts = lengths.numpy().astype(np.float32)
    np.testing.assert_array_equal(pooled[:, 0].numpy(), counts / np.sqrt(counts))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("pooling", SELECTIONS)
def test_a_selection_keeps_the_first_of_equals(pooling: PoolingName, sign: float) -> None:
    spec = CollectionSpec([TableSpec("t", 2, 1)], [FeatureSpec("f", "t", pooling)])
    table = torch.tensor([[0.0 * sign], [-0.0 * sign]])
    pooled, _ = reference.lookup(spec, torch.tensor([0, 1]), torch.tensor([0, 2]), None, [table], bounds_check="error")
    assert torch.equal(torch.signbit(pooled), torch.signbit(table[:1]))


@pytest.mark.parametrize(("pooling", "weighted"), KINDS)
def test_gradients_in_float64(pooling: str, weighted: bool) -> None:
    spec = one_feature(pooling, weighted, padding_idx=2)
    drawn = draw_batch(spec, Case(3), 1)
    table = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)

    def run(table: torch.Tensor) -> torch.Tensor:
        both = reference.lookup(spec, *drawn, [table], bounds_check="error", accumulate_dtype=torch.float64)
        return torch.cat([both[0].flatten(), both[1]])

    assert run(table).dtype == torch.float64
    assert torch.autograd.gradcheck(run, (table,))


def test_tables_are_read_in_place() -> None:
    """A table far larger than memory (one row seen a trillion times) can be looked up: nothing copies it."""
    rows = 2**40
    spec = CollectionSpec([TableSpec("t", rows, 5)], [FeatureSpec("f", "t")])
    table = torch.arange(5.0).expand(rows, 5)
    pooled, _ = reference.lookup(
        spec, torch.tensor([0, rows - 1]), torch.tensor([0, 2]), None, [table], bounds_check="error"
    )
    assert torch.equal(pooled, 2 * torch.arange(5.0)[None])

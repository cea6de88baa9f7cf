"""Every backend gives the bits of the semantics, whatever the spec, the batch and the number of threads.

The reference is held against loops over numpy numbers; every other backend against the reference.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from conformance import naive
from conformance.backends import device_of, every_backend
from hypothesis import given
from hypothesis import strategies as st
from support.selections import SELECTIONS
from support.strategies import VARIANTS, cases, examples, seeds, specs

from embforge.backends import arch_of
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import POOLINGS, PoolingName, Shape
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.launch.kernels import Kernel, Program, kernel_of
from embforge.launch.reference import forward as reference
from embforge.verify.cases import Case, Drawn, draw_batch, draw_tables
from embforge.verify.lookups import first_difference, torch_threads
from embforge.verify.probes import Probe, Result, run

THREADS = {"reference": (1,), "cpu": (1, 2, 5), "simt": (1, 1), "cuda": (1,)}
"""How many threads each run of a batch has. On simt each run has a different schedule."""


def kernel(spec: CollectionSpec, backend: str, id_dtype: str, variant: int = 0) -> Kernel:
    params = VARIANTS[backend][variant]
    plan = Plan("forward", backend, arch_of(backend, device_of(backend)), id_dtype, spec, params)
    return kernel_of(Program(plan).text)


def check(spec: CollectionSpec, backend: str, case: Case, seed: int, special: bool, variant: int = 0) -> None:
    """One batch on one backend with every thread count."""
    device = device_of(backend)
    drawn, tables = draw_batch(spec, case, seed, device), draw_tables(spec, seed, special, device)
    expected: Result = reference.lookup(spec, *drawn, tables, bounds_check="zero")
    probe = Probe(case, special, drawn, tables, expected)
    for threads in THREADS[backend]:
        with torch_threads(threads):
            got = run(kernel(spec, backend, case.id_dtype, variant), probe)
        if backend == "reference":
            with np.errstate(all="ignore"):
                wanted = naive.lookup(spec, *drawn, tables)
            for have, want in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(naive.bits_of(have), want)
        else:
            places = [first_difference(want, have) for want, have in zip(expected, got, strict=True)]
            assert places == [None, None], (case, seed, threads)


@every_backend
@given(
    spec=specs(),
    batches=st.lists(st.tuples(cases(), seeds), min_size=8, max_size=12),
    special=st.booleans(),
    variant=st.integers(0, 2),
)
@examples(5)
def test_any_spec_and_batch_has_the_bits_of_the_semantics(
    backend: str, spec: CollectionSpec, batches: list[tuple[Case, int]], special: bool, variant: int
) -> None:
    one_kernel = batches[0][0].id_dtype
    for case, seed in batches:
        check(spec, backend, replace(case, id_dtype=one_kernel), seed, special, variant)


WIDE = CollectionSpec(
    [
        TableSpec(f"t{d}", 50, d, dtype)
        for d, dtype in [(1, "fp32"), (17, "bf16"), (40, "fp8_e4m3"), (64, "fp16"), (45, "fp8_e5m2")]
    ],
    [
        FeatureSpec(
            f"{kind.name}{d}",
            f"t{d}",
            kind.name,
            weighted=d > 20 and kind.weightable,
            hotness=3 if kind.shape is Shape.CONCAT else None,
            padding_idx=7 if d % 2 else None,
        )
        for d in (1, 17, 40, 64, 45)
        for kind in POOLINGS.values()
    ],
)
"""Every pooling on every table dtype."""


@every_backend
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(0, "none"),
        Case(33, "none"),
        Case(1),
        Case(200),
        Case(200, ids="zipf", id_dtype="int32"),
        Case(200, "one", weights="absent"),
        Case(40, "edges", ids="same"),
        Case(40, "edges", bad_ids=True, weights="special"),
        Case(40, bad_ids=True, id_dtype="int32"),
    ],
    ids=str,
)
def test_every_pooling_and_dtype(backend: str, case: Case, special: bool) -> None:
    check(WIDE, backend, case, 11, special)


LONG = CollectionSpec(
    [TableSpec("a", 300, 8), TableSpec("b", 300, 33, "fp16")],
    [
        FeatureSpec("sum", "a"),
        FeatureSpec("mean", "b", "mean", weighted=True, padding_idx=3),
        FeatureSpec("sqrtn", "a", "sqrtn", weighted=True),
        *(FeatureSpec(name, table, name) for name, table in zip(SELECTIONS, cycle("ba"), strict=False)),
        FeatureSpec("none", "a", "none"),
    ],
)


@every_backend
def test_very_long_bags_next_to_short_ones(backend: str) -> None:
    """With int32 ids on the CPU, where offsets may be as narrow; the soak has both types of ids on all backends."""
    id_dtype = "int32" if backend == "cpu" else "int64"
    check(LONG, backend, Case(3, "long", id_dtype=id_dtype, bad_ids=True), 2, special=False)  # type: ignore[arg-type]


@pytest.mark.soak
@every_backend
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
def test_very_long_bags_by_ids_of_both_types(backend: str, id_dtype: str) -> None:
    check(LONG, backend, Case(3, "long", id_dtype=id_dtype, bad_ids=True), 2, special=False)  # type: ignore[arg-type]


@every_backend
def test_long_bags_of_wide_rows(backend: str) -> None:
    """More columns than a block of any GPU plan has lanes for, and more ids than one block adds up."""
    spec = CollectionSpec([TableSpec("t", 40, 2100, "bf16")], [FeatureSpec("sum", "t"), FeatureSpec("max", "t", "max")])
    check(spec, backend, Case(2, "deep"), 5, special=True)


@every_backend
@pytest.mark.parametrize("length", [63, 64, 65, 4095, 4096, 4097, 4160, 64 * 64 * 64 + 1])
def test_lengths_around_every_level_of_the_canonical_sum(backend: str, length: int) -> None:
    """One bag alone, cut over threads in every way that 1, 2 and 5 threads give."""
    spec = CollectionSpec([TableSpec("t", 97, 4)], [FeatureSpec("f", "t", "mean", weighted=True, padding_idx=0)])
    generator = torch.Generator().manual_seed(length)
    drawn = Drawn(
        torch.randint(97, (length,), generator=generator),
        torch.tensor([0, length]),
        torch.randn(length, generator=generator),
    )
    device = device_of(backend)
    drawn, tables = Drawn(*(t.to(device) for t in drawn)), draw_tables(spec, length, device=device)
    expected = reference.lookup(spec, *drawn, tables, bounds_check="error")
    for threads in THREADS[backend]:
        with torch_threads(threads):
            got = run(kernel(spec, backend, "int64"), Probe(Case(1), False, drawn, tables, expected))
        assert first_difference(expected[0], got[0]) is None


@every_backend
@pytest.mark.parametrize("first", [0.0, -0.0])
@pytest.mark.parametrize("length", [2, 64, 65, 5000])
@pytest.mark.parametrize("pooling", SELECTIONS)
def test_a_selection_keeps_the_first_of_equals(backend: str, pooling: PoolingName, first: float, length: int) -> None:
    spec = CollectionSpec([TableSpec("t", 2, 19)], [FeatureSpec("f", "t", pooling)])
    device = device_of(backend)
    (table,) = tables = draw_tables(spec, 0, device=device)
    table[0], table[1] = first, -first
    ids = torch.ones(length, dtype=torch.int64, device=device)
    ids[0] = 0
    drawn = Drawn(ids, torch.tensor([0, length], device=device), None)
    for threads in THREADS[backend]:
        with torch_threads(threads):
            pooled, _ = run(kernel(spec, backend, "int64"), Probe(Case(1), False, drawn, tables, (ids, ids)))
        assert torch.equal(pooled.signbit(), table[:1].signbit()) and not pooled.any()


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["cpu", "simt"])
@given(spec=specs(most_tables=12, most_features=30), case=cases(200), seed=seeds, special=st.booleans())
@examples(5)
def test_large_specs(backend: str, spec: CollectionSpec, case: Case, seed: int, special: bool) -> None:
    check(spec, backend, case, seed, special)

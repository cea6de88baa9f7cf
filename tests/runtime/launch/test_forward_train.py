"""Forwards before a backward: they give the results of a forward, the divisors, and the ids that were selected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.probes import probe_of, same
from support.selections import SELECTIONS, combiner_of
from torch import Tensor

from embforge.backends import arch_of
from embforge.cli.common import load_spec
from embforge.codegen.build import build
from embforge.codegen.layout import layout_of
from embforge.codegen.params import CudaParams, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import PoolingName
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.reference.forward import lookup
from embforge.launch.reference.forward_train import lookup_train
from embforge.result_elements import divisor_location, winner_location
from embforge.verify.cases import Case, Drawn, draw_tables
from embforge.verify.lookups import first_difference, torch_threads
from embforge.verify.probes import Probe, call_of

SPEC = CollectionSpec(
    [TableSpec("a", 60, 5), TableSpec("b", 40, 8, "fp16"), TableSpec("c", 30, 24)],
    [
        FeatureSpec("mean", "a", "mean", padding_idx=3),
        FeatureSpec("largest", "b", "max", padding_idx=0),
        FeatureSpec("sum", "a"),
        FeatureSpec("weighted_root", "b", "sqrtn", weighted=True),
        FeatureSpec("wide", "c", "max"),
        FeatureSpec("rows", "a", "none"),
        FeatureSpec("root", "c", "sqrtn"),
        FeatureSpec("slots", "b", "concat", hotness=2),
        FeatureSpec("weighted_mean", "a", "mean", weighted=True),
        FeatureSpec("odd", "a", "max"),
        FeatureSpec("least", "b", "min", padding_idx=0),
        *(FeatureSpec(name, "b", name, padding_idx=0) for name in SELECTIONS if name not in ("max", "min")),
    ],
    name="forward_train",
)
SMALL = CollectionSpec(
    [TableSpec("b", 40, 8, "fp16")],
    [FeatureSpec("largest", "b", "max", padding_idx=0), FeatureSpec("root", "b", "sqrtn", weighted=True)],
    output_dtype="bf16",
    name="small_train",
)
SMALL_OF = {
    name: replace(SMALL, features=(replace(SMALL.features[0], pooling=name), *SMALL.features[1:]))
    for name in SELECTIONS
}
CASES = (
    Case(0, "none"),
    Case(5, "none"),
    Case(7, weights="special"),
    Case(9, bad_ids=True),
    Case(12, "edges", ids="zipf"),
    Case(6, "edges", ids="same", weights="absent"),
    Case(3, "deep"),
)
THREADS = {"cpu": (1, 2, 5), "simt": (1,)}
NAMES = ("pooled", "sequence", "divisors", "winners")


def answer(op: str, backend: str, probe: Probe, spec: CollectionSpec = SPEC, id_dtype: str = "int64") -> list[Any]:
    params = CudaParams(long_bag=256) if backend == "simt" else params_type(backend)()
    plan = Plan(op, backend, arch_of(backend, torch.device("cpu")), id_dtype, spec, params)
    return list(kernel_of(Program(plan).text)(*call_of(plan, probe)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_divisors_are_what_sums_were_divided_by(case: Case) -> None:
    probe = probe_of(SPEC, case, seed=4)
    pooled, _, divisors, _ = answer("forward_train", "reference", probe)
    sums = replace(
        SPEC, features=tuple(replace(f, pooling="sum") if f.pooling in ("mean", "sqrtn") else f for f in SPEC.features)
    )
    totals, _ = lookup(sums, *probe.drawn, probe.tables, bounds_check="zero")
    layout = layout_of(SPEC)
    assert (divisors.shape, divisors.dtype) == ((case.batch, 4), torch.float32)
    for index, column in layout.divisor_column.items():
        begin, end = (
            layout.features[index].column or 0,
            (layout.features[index].column or 0) + layout.features[index].dim,
        )
        by = divisors[:, column : column + 1]
        want = torch.where(by == 0, 0.0, totals[:, begin:end] / by)
        assert first_difference(want, pooled[:, begin:end]) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_winners_are_the_first_of_the_selected(case: Case) -> None:
    probe = probe_of(SPEC, case, seed=4)
    winners, layout = answer("forward_train", "reference", probe)[3], layout_of(SPEC)
    borders, ids = probe.drawn.offsets.tolist(), probe.drawn.values.tolist()
    dims = [SPEC.table(feature.table).embedding_dim for feature in SPEC.features if feature.pooling in SELECTIONS]
    assert (winners.shape, winners.dtype) == ((case.batch, sum(dims)), torch.int64)
    for index, first in layout.winner_column.items():
        feature = layout.features[index]
        order = combiner_of(feature.feature.pooling).order
        rows = order * probe.tables[feature.table_index].float()
        present = [0 <= i < len(rows) and i != feature.feature.padding_idx for i in ids]
        for sample in range(case.batch):
            best, winner = torch.full((feature.dim,), -torch.inf), torch.full((feature.dim,), -1)
            for p in range(borders[index * case.batch + sample], borders[index * case.batch + sample + 1]):
                if present[p]:
                    beaten = ~((best >= rows[ids[p]]) | best.isnan()) | (winner < 0)
                    best, winner = torch.where(beaten, rows[ids[p]], best), torch.where(beaten, p, winner)
            assert winners[sample, first : first + feature.dim].tolist() == winner.tolist(), (index, sample)


@pytest.mark.parametrize("pooling", SELECTIONS)
def test_infinity_and_nan_can_win(pooling: PoolingName) -> None:
    inf, nan, order = torch.inf, torch.nan, combiner_of(pooling).order
    spec = CollectionSpec([TableSpec("t", 4, 4)], [FeatureSpec("f", "t", pooling, padding_idx=3)], name="first")
    rows = torch.tensor([[-inf, 0.0, nan, 1.0], [-inf, -0.0, 2.0, nan], [-inf, 0.0, nan, 2.0], [9.0, 9.0, 9.0, 9.0]])
    values, offsets = torch.tensor([3, 0, 1, 2, 3, 3, 3, 1, 0]), torch.tensor([0, 4, 6, 6, 9])
    _, sequence, divisors, winners = lookup_train(spec, values, offsets, None, [order * rows], bounds_check="error")
    assert sequence is None and divisors is None and winners is not None
    assert winners.tolist() == [[1, 1, 1, 2], [-1] * 4, [-1] * 4, [7, 7, 8, 7]]


def test_a_differentiable_lookup_in_float64() -> None:
    spec = CollectionSpec(
        [TableSpec("t", 6, 3)], [FeatureSpec("m", "t", "mean", weighted=True), FeatureSpec("x", "t", "max")]
    )
    values, offsets = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([0, 2, 3, 5, 6])
    table = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = torch.linspace(0.5, 2.0, 6, dtype=torch.float64, requires_grad=True)

    def pooled(table: Tensor, weights: Tensor) -> Tensor:
        found, _, divisors, winners = lookup_train(
            spec, values, offsets, weights, [table], bounds_check="error", accumulate_dtype=torch.float64
        )
        assert divisors is not None and winners is not None
        assert divisors.dtype == torch.float64 and not divisors.requires_grad
        return found

    assert torch.autograd.gradcheck(pooled, (table, weights))


@pytest.mark.parametrize(("spec", "id_dtype"), [(SPEC, "int64"), (SMALL, "int32")], ids=["int64", "int32"])
@pytest.mark.parametrize("backend", THREADS)
def test_bits_are_those_of_the_reference(backend: str, spec: CollectionSpec, id_dtype: str) -> None:
    for seed, case in enumerate(CASES):
        probe = probe_of(spec, replace(case, id_dtype=id_dtype), seed)  # type: ignore[arg-type]
        expected = answer("forward_train", "reference", probe, spec, id_dtype)
        for threads in THREADS[backend]:
            with torch_threads(threads):
                got = answer("forward_train", backend, probe, spec, id_dtype)
            for name, want, have in zip(NAMES, expected, got, strict=True):
                assert same(want, have), (str(case), threads, name)


@pytest.mark.parametrize("pooling", SELECTIONS)
@pytest.mark.parametrize("backend", THREADS)
def test_the_first_present_id_wins_even_if_it_is_infinite(backend: str, pooling: PoolingName) -> None:
    """The absent ids before it fill a part of a chunk, whole chunks, or whole units of a long bag."""
    spec, combiner = SMALL_OF[pooling], combiner_of(pooling)
    table = draw_tables(SMALL, 1)[0]
    table[:, :4] = combiner.identity
    table[7, 2] = 1.0
    absent, present = [0], [5, 6, 5, 7, 6]
    bags = [absent + present, 64 * absent + present, 200 * absent + present + 200 * absent, 4200 * absent + present]
    bags += [absent, 300 * absent, 70 * absent + 300 * present]
    offsets = torch.tensor([0, *map(len, bags), *[0] * len(bags)]).cumsum(0).int()
    drawn = Drawn(torch.tensor([i for bag in bags for i in bag]).int(), offsets, None)
    probe = Probe(Case(len(bags)), False, drawn, (table,), lookup(spec, *drawn, (table,), bounds_check="error"))
    _, _, _, winners = answer("forward_train", "reference", probe, spec, "int32")
    first = [begin + bag.index(5) if 5 in bag else -1 for begin, bag in zip(offsets.tolist(), bags, strict=False)]
    assert winners[:, 0].tolist() == first
    assert winners[:, 2].tolist() == [begin + 3 if begin >= 0 else -1 for begin in first]
    for threads in THREADS[backend]:
        with torch_threads(threads):
            assert same(winners, answer("forward_train", backend, probe, spec, "int32")[3])


@pytest.mark.parametrize("backend", THREADS)
def test_results_are_those_of_a_forward(backend: str) -> None:
    probe = probe_of(SMALL, Case(12, "edges", id_dtype="int32"), 4)
    plain, trained = (answer(op, backend, probe, SMALL, "int32") for op in ("forward", "forward_train"))
    assert first_difference(plain[0], trained[0]) is None


@pytest.mark.parametrize("backend", ["reference", *THREADS])
def test_what_a_spec_has_no_feature_of_is_none(backend: str) -> None:
    spec = CollectionSpec([TableSpec("t", 6, 3)], [FeatureSpec("m", "t", "mean")], name="only_mean")
    pooled, sequence, divisors, winners = answer("forward_train", backend, probe_of(spec, Case(3), 0), spec)
    assert pooled is not None and sequence is None and divisors is not None and winners is None


def test_a_result_that_no_kernel_wrote_is_named_by_its_place() -> None:
    layout = layout_of(SPEC)
    assert divisor_location(layout, 4 + 1) == "feature 'weighted_root', sample 1"
    assert winner_location(layout, 2 * layout.winner_width + 8 + 24) == "feature 'odd', sample 2, column 0"
    assert winner_location(layout, 7) == "feature 'largest', sample 0, column 7"


@pytest.mark.parametrize(
    "arch", ["sm_90", pytest.param("sm_75", marks=pytest.mark.soak), pytest.param("sm_100", marks=pytest.mark.soak)]
)
def test_nothing_is_spilled(arch: str) -> None:
    figures = build(Plan("forward_train", "cuda", arch, "int64", load_spec("mixed"), CudaParams()), resources=True)
    for kernel in figures.resources:
        assert (kernel["spill_bytes"], kernel["local_instructions"]) == (0, 0), kernel

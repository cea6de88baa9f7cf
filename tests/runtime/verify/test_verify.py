"""`verify` passes right kernels, finds wrong results and names their place; its covering sets have every pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
import torch

from embforge import optim
from embforge.cli.common import load_spec
from embforge.codegen.errors import ToolchainError
from embforge.codegen.layout import layout_of
from embforge.codegen.params import CpuParams, ReferenceParams, params_type
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.launch.reference import forward as reference
from embforge.result_elements import sequence_location
from embforge.sharded import ShardedEmbeddingCollection, ShardPlan
from embforge.verify import lookups as module
from embforge.verify.cases import Case, draw_batch, draw_tables
from embforge.verify.lookups import first_difference, plans_to_verify, verify
from embforge.verify.pairwise import covering

SPEC = CollectionSpec(
    [
        TableSpec("wide", 30, 24),
        TableSpec("narrow", 2000, 3, "fp16"),
        TableSpec("tiny", 20, 20, "fp8_e4m3"),
        TableSpec("range", 20, 12, "fp8_e5m2"),
    ],
    [
        *(FeatureSpec(p, "wide", p, hotness=3 if p == "concat" else None, padding_idx=4) for p in POOLINGS),
        FeatureSpec("heavy", "narrow", "sqrtn", weighted=True),
        FeatureSpec("added", "narrow", "sum", weighted=True),
        FeatureSpec("eight", "tiny", "mean"),
        FeatureSpec("bits", "range", "max"),
    ],
    name="verified",
)


FEW_BUCKETS = CollectionSpec(
    [TableSpec("wide", 30, 24), TableSpec("narrow", 2000, 3, "fp16")],
    [
        *(FeatureSpec(pooling, "wide", pooling, padding_idx=4) for pooling in ("mean", "max", "none")),
        FeatureSpec("sum", "wide"),
        FeatureSpec("added", "narrow", weighted=True),
    ],
    name="fields",
)
"""A small spec: kernels for dozens of plans are compiled from it."""


def test_every_plan_field_on_the_cpu_passes() -> None:
    """For any two choices of two fields, with one thread and two, results have the reference's bits and are near
    torch's."""
    report = verify(FEW_BUCKETS, on="cpu", batch_sizes=(1, 7, 48))
    rows = report.rows
    assert report.passed and report.plans > 24 and report.left_out == 0
    assert [row for row in rows if not row.passed] == []
    bits = [row for row in rows if row.check.startswith("reference bits")]
    peers = {row.check for row in rows if row not in bits}
    assert all(row.max_abs_error == 0 and row.cases >= 2 for row in bits)
    assert peers == {
        "torch.nn.EmbeddingBag sum",
        "torch.nn.EmbeddingBag weighted sum",
        "torch.nn.EmbeddingBag mean",
        "torch.nn.EmbeddingBag max",
        "torch.nn.functional.embedding",
    }


def test_a_wrong_row_of_a_sequence_is_named() -> None:
    layout = layout_of(SPEC)
    (none,) = layout.sequence_features
    borders = torch.zeros(2 * len(SPEC.features) + 1, dtype=torch.int64)
    borders[2 * none.index + 1] = 3
    borders[2 * none.index + 2 :] = 4
    assert sequence_location(layout, borders, 2, 3 * 24 + 5) == "feature 'none', sample 1, position 0, column 5"
    assert sequence_location(layout, borders, 2, 2 * 24) == "feature 'none', sample 0, position 2, column 0"
    assert "after the last row" in sequence_location(layout, borders, 2, 4 * 24)


class Lying(reference.ReferenceForward):
    """A kernel whose results are right but for one number."""

    def __call__(self, metadata: Any, tables: Any, batch: Any, elements: int, bounds_check: str) -> Any:
        pooled, sequence = super().__call__(metadata, tables, batch, elements, bounds_check)
        if batch.batch > 3:
            pooled[3, 24 + 2] += 1  # sample 3, column 2 of the second feature
        return pooled, sequence


def test_a_wrong_number_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_of", lambda text: Lying(module.Program.from_text(text).plan))
    rows = verify(SPEC, on="reference", params=[ReferenceParams()], batch_sizes=(1, 7), threads=(1,)).rows
    failed = [row for row in rows if not row.passed]
    assert len(failed) > 3
    assert all(row.max_abs_error > 0 for row in failed)
    bits = [row for row in failed if row.check.startswith("reference bits: B=7")]
    assert bits and all("feature 'mean', sample 3, column 2: expected" in row.detail for row in bits)
    assert any(row.check == "torch.nn.EmbeddingBag mean" and "feature 'mean'" in row.detail for row in failed)
    assert any(row.check == "torch.nn.EmbeddingBag max of negated rows" and row.passed for row in rows)


class Raising(reference.ReferenceForward):
    """A kernel that refuses batches of seven samples."""

    def __call__(self, metadata: Any, tables: Any, batch: Any, elements: int, bounds_check: str) -> Any:
        if batch.batch == 7:
            raise IndexError("id 5 is not a row")
        return super().__call__(metadata, tables, batch, elements, bounds_check)


def test_an_error_of_a_run_is_a_row_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_of", lambda text: Raising(module.Program.from_text(text).plan))
    report = verify(SPEC, on="reference", params=[ReferenceParams()], batch_sizes=(1, 7), threads=(1,))
    bits = [row for row in report.rows if row.check.startswith("reference bits")]
    assert not report.passed and all(row.cases and not row.not_run for row in bits)
    for row in bits:
        assert row.passed == ("B=7" not in row.check)
        assert row.passed or row.detail.startswith("IndexError: id 5 is not a row\n  (")
        assert row.passed or row.max_abs_error == float("inf")


def test_progress_is_reported() -> None:
    told: list[str] = []
    verify(SPEC, on="reference", batch_sizes=(2,), threads=(1,), progress=lambda what, done, total: told.append(what))
    assert list(dict.fromkeys(told)) == ["drawing tables", "computing the reference", "running kernels"]


@pytest.mark.parametrize(
    ("want", "have", "place"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 2.0000002], 1),
        ([0.0, 1.0], [-0.0, 1.0], 0),
        ([float("nan"), 1.0], [float("nan"), 1.0], None),
        ([float("nan"), 1.0], [0.0, 1.0], 0),
        ([float("inf")], [float("-inf")], 0),
        ([], [], None),
    ],
)
def test_the_first_difference_is_found(want: list[float], have: list[float], place: int | None) -> None:
    assert first_difference(torch.tensor(want), torch.tensor(have)) == place


def test_all_nans_are_equal() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert first_difference(nans, nans.flip(0)) is None


@pytest.mark.parametrize("target", ["cpu", "cuda", "simt"])
def test_plans_cover_every_pair_of_choices(target: str) -> None:
    plans = plans_to_verify(SPEC, target, "any", None)
    kind = params_type(target)
    assert len(set(plans)) == len(plans)
    assert plans[0].params == kind()
    seen = {
        (a.name, getattr(p.params, a.name), b.name, getattr(p.params, b.name))
        for p in plans
        for a, b in combinations(fields(kind), 2)
    }
    wanted = {
        (a.name, x, b.name, y)
        for a, b in combinations(fields(kind), 2)
        for x in a.metadata["covered"]
        for y in b.metadata["covered"]
    }
    assert wanted <= seen
    assert {p.id_dtype for p in plans} == {"int32", "int64"}


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"a": [1, 2, 3]},
        {"a": [1, 2, 3], "b": "xy"},
        {"a": range(6), "b": range(4), "c": range(3), "d": range(2), "e": range(2)},
        {name: range(3) for name in "abcdefgh"},
    ],
)
def test_covering_sets_have_every_pair(choices: dict[str, Any]) -> None:
    rows = covering(choices)
    for a, b in combinations(choices, 2):
        assert {(row[a], row[b]) for row in rows} == {(x, y) for x in choices[a] for y in choices[b]}
    assert all(set(row) == set(choices) for row in rows)
    sizes = sorted(map(len, choices.values()), reverse=True)
    if len(sizes) > 1:
        assert sizes[0] * sizes[1] <= len(rows) <= 3 * sizes[0] * sizes[1]
    assert covering(choices) == rows


@pytest.mark.parametrize("lengths", ["usual", "one", "none", "edges", "split", "deep", "long"])
@pytest.mark.parametrize("ids", ["uniform", "zipf", "same"])
def test_cases_have_their_properties_and_repeat(lengths: Any, ids: Any) -> None:
    case = Case(20, lengths, ids, "int32", bad_ids=False)
    drawn, again = draw_batch(SPEC, case, 9), draw_batch(SPEC, case, 9)
    assert all(map(torch.equal, drawn, again))
    values, offsets, weights = drawn
    assert values.dtype == offsets.dtype == torch.int32 and weights is not None
    assert offsets.numel() == 20 * len(SPEC.features) + 1 and int(offsets[-1]) == values.numel() == weights.numel()
    for index, feature in enumerate(SPEC.features):
        borders = offsets[index * 20 : index * 20 + 21]
        own = values[int(borders[0]) : int(borders[-1])]
        if own.numel():
            assert int(own.min()) >= 0 and int(own.max()) < SPEC.table(feature.table).num_embeddings
        if feature.pooling == "concat":
            assert int(borders.diff().max()) <= 3
    longest = int(offsets.diff().max())
    assert longest == {"one": 1, "none": 0, "edges": 129, "split": 5000, "deep": 5000, "long": 300_000}.get(
        lengths, longest
    )
    if lengths == "usual":
        assert int(offsets.diff().min()) == 0 and longest > 8


def test_bad_ids_are_bad() -> None:
    values, offsets, _ = draw_batch(SPEC, Case(200, bad_ids=True), 1)
    own = values[: int(offsets[200])]
    share = float(((own < 0) | (own >= 30)).float().mean())
    assert 0.1 < share < 0.3


def test_tables_have_their_layout_with_poison_between_rows() -> None:
    spec = CollectionSpec([TableSpec("t", 5, 15)], [FeatureSpec("f", "t")])
    (table,) = draw_tables(spec, 0)
    assert table.shape == (5, 15) and table.stride() == (16, 1)
    assert table.as_strided((5, 16), (16, 1))[:, 15].isnan().all() and not table.isnan().any()
    (special,) = draw_tables(CollectionSpec([TableSpec("t", 500, 15)], [FeatureSpec("f", "t")]), 0, special=True)
    assert special.isnan().any() and special.isinf().any() and (special.signbit() & (special == 0)).any()
    ends = special[::4].amax(1), special[2::4].amin(1)  # selected zeros of both signs
    assert all((end == 0).any() and (end == 0).float().mean() > 0.5 for end in ends)


@pytest.mark.parametrize("name", [pytest.param("mixed", marks=pytest.mark.soak), "dlrm"])
def test_example_specs_pass(name: str) -> None:
    """The specs that are shipped pass what their comments tell readers to run, here with smaller tables."""
    spec = load_spec(name)
    spec = replace(spec, tables=tuple(replace(t, num_embeddings=min(t.num_embeddings, 2000)) for t in spec.tables))
    rows = verify(spec, on="cpu", params=[CpuParams()], batch_sizes=(1, 16), threads=(2,)).rows
    assert len(rows) > 10 and [row for row in rows if not row.passed] == []


def test_without_a_gpu_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ToolchainError, match=r"verify --on cuda needs a CUDA device.*--on cpu"):
        verify(SPEC, on="cuda")
    modules: list[Callable[[str], object]] = [
        lambda device: EmbeddingCollection(SPEC, device=device),
        lambda device: EmbeddingCollection(SPEC, device=device, optimizer=optim.SGD(lr=0.1)),
        lambda device: ShardedEmbeddingCollection(
            SPEC, ShardPlan.row_wise(SPEC), optimizer=optim.SGD(lr=0.1), device=device
        ),
    ]
    for make in modules:
        with pytest.raises(ToolchainError, match=r"device='cuda:1' needs a CUDA GPU.*device='cpu'"):
            make("cuda:1")


def test_training_of_a_table_with_one_row_is_compared() -> None:
    """The state of its only row is a view with a stride that its bytes cannot have."""
    from embforge.verify.training_run import bits_of

    state = torch.arange(8, dtype=torch.float32)[::4][:1]
    assert state.stride() == (4,) and bits_of(state).shape == (1, 4)
    lone = CollectionSpec([TableSpec("t", 1, 3)], [FeatureSpec("f", "t")])
    module_ = EmbeddingCollection(lone, backend="reference", optimizer=optim.RowwiseAdam())
    assert all(bits_of(tensor).shape[1] == 4 for tensor in module_.optimizer_state("t").values())

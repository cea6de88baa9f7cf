"""CUDA plans are ranked without a GPU by figures of compiled code: always the same, always called an estimate, and
used by nothing but the first trials of a measured run."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from embforge.cli.display.tune_tables import space_json, space_table, static_table
from embforge.codegen.errors import CompileError, WorkloadError
from embforge.codegen.params import CudaBackwardParams, CudaParams, Params
from embforge.codegen.plan import Plan
from embforge.codegen.plans import update_named
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda.arch import ARCHS
from embforge.codegen.tuned.choose import choose
from embforge.codegen.tuned.hardware import any_gpu
from embforge.codegen.tuned.stores import read_stores
from embforge.trace.file_format import Trace, write_trace
from embforge.tuner.estimate import sectors, static
from embforge.tuner.estimate.estimate import (
    FORMULA,
    MULTIPROCESSORS,
    Flight,
    cost,
    demand_of,
    promised_flight,
)
from embforge.tuner.estimate.sectors import sector_counter
from embforge.tuner.estimate.seeds import FOLDER, load_seeds, save_seeds
from embforge.tuner.estimate.static import StaticReport, rank
from embforge.tuner.workload.workload import Workload, make_batch, parse

SPEC = CollectionSpec([TableSpec("t", 1000, 16)], [FeatureSpec("f", "t", "none")])
"""Copies rows: the smallest kernel."""
WORKLOAD = parse("uniform,batch=64")
SGD = update_named("sgd")


def ranked(update: Update | None = None, op: str = "forward", most: int = 3, **options: Any) -> StaticReport:
    return rank(SPEC, "sm_90", op, WORKLOAD, 60.0, update=update, most=most, **options)


@cache
def forward_report() -> StaticReport:
    return ranked(counted=2)


@cache
def backward_report() -> StaticReport:
    return ranked(SGD, "backward")


def shown(table: Any) -> str:
    screen = Console(file=StringIO(), width=250)
    screen.print(table)
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue()


def test_ranks_are_the_same_for_the_same_arguments() -> None:
    report = forward_report()
    told: list[tuple[str, int, int]] = []
    assert ranked(counted=2, progress=lambda *stage: told.append(stage)) == report
    assert told[0] == ("compiling", 0, 3) and told[-2:] == [("counting sectors", n, 2) for n in (0, 1)]
    assert [row.rank for row in report.rows] == [1, 2, 3]
    assert report.default.score == 1.0 and report.default.sectors_per_output is not None
    assert [row.sectors_per_output is None for row in report.rows] == [False, False, True]
    counted = [row.score for row in report.rows if row.sectors_per_output is not None]
    assert counted == sorted(counted)
    assert all(row.params in report.space.points for row in report.rows)
    assert all(0 < row.occupancy <= 1 and 0 < row.filled <= 1 and row.bytes_in_flight > 0 for row in report.rows)


def test_a_backward_is_ranked_by_its_compiled_code_alone() -> None:
    report = backward_report()
    assert [row.sectors_per_output for row in report.rows] == [None] * 3
    assert [row.score for row in report.rows] == sorted(row.score for row in report.rows)
    assert report.default.params == CudaBackwardParams()


def test_the_default_is_ranked_however_few_plans_or_little_time() -> None:
    assert [row.params for row in ranked(SGD, "backward", most=1).rows] == [CudaBackwardParams()]
    late = rank(SPEC, "sm_90", "forward", WORKLOAD, 0.0, most=3, counted=2)
    assert late.default.sectors_per_output is not None
    assert late.rows[0].params == CudaParams()  # nothing else was counted


def doctored(monkeypatch: pytest.MonkeyPatch, bad: dict[Params, Any]) -> None:
    """Replaces what compiling some plans gives: by other figures, or by an error."""
    real = static.build

    def build(plan: Plan, **options: Any) -> Any:
        built = real(plan, **options)
        found = bad.get(plan.params)
        if isinstance(found, Exception):
            raise found
        return replace(built, resources=[built.resources[0] | found, *built.resources[1:]]) if found else built

    monkeypatch.setattr(static, "build", build)


def test_refused_plans_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    default = CudaBackwardParams()
    first, second = (row.params for row in backward_report().rows if row.params != default)
    doctored(monkeypatch, {default: {"spill_bytes": 64}, first: {"spill_bytes": 64}, second: CompileError("no\nmore")})
    report = ranked(SGD, "backward")
    assert [row.params for row in report.rows] == [default]  # which is there whatever its figures are
    why = dict(report.refused)
    assert set(why) == {first, second}
    assert "spills" in why[first] and why[second] == "does not compile: no"


def test_a_default_that_does_not_compile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    doctored(monkeypatch, {CudaBackwardParams(): CompileError("nvrtc refused it")})
    with pytest.raises(CompileError, match="nvrtc refused it"):
        ranked(SGD, "backward")


@pytest.mark.parametrize("text", ["uniform,batch=0", "uniform,len=fixed:0"])
def test_traffic_without_ids_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"have no ids.* set batch=N and len= to 1 or more"):
        rank(SPEC, "sm_90", "forward", parse(text), 1.0)


def test_an_estimate_is_called_one_wherever_it_appears() -> None:
    assert FORMULA.startswith("estimate, never a time")
    text = shown(static_table(forward_report()))
    assert text.startswith("Estimate, no measurement: forward for sm_90, uniform,batch=64")
    assert "estimate" in text and "the default" in text
    assert not any(unit in text for unit in (" ms", " us", " µs", "seconds"))
    saved = json.loads(save_seeds(forward_report()).read_text())
    assert saved["formula"] == FORMULA and "embforge_estimate" in saved


def test_a_table_shows_the_default_even_if_it_is_not_among_the_best() -> None:
    report = backward_report()
    behind = replace(report, rows=tuple(sorted(report.rows, key=lambda r: r.params == report.space.default)))
    behind = replace(behind, rows=tuple(replace(row, rank=n) for n, row in enumerate(behind.rows, 1)))
    assert "the default" in shown(static_table(behind, shown=1))


def test_a_name_with_brackets_is_shown_as_it_is() -> None:
    named = replace(forward_report(), workload="trace:/data/[/old]/[b].npz")
    assert "trace:/data/[/old]/[b].npz" in shown(static_table(named))


def test_a_space_is_shown_with_what_removed_each_part() -> None:
    space = forward_report().space
    text, data = " ".join(shown(space_table(space)).split()), space_json(space)
    assert f"{space.size:,} combinations, {len(space.points):,} worth a trial" in text
    for removed in space.removed:
        assert removed.constraint in text and f"{removed.points:,}" in text and removed.why in text
    assert json.loads(json.dumps(data))["points"] == len(space.points)
    assert data["points"] + sum(removed["points"] for removed in data["removed"]) == data["size"]


def test_seeds_are_read_back_best_first() -> None:
    for report, update in ((forward_report(), None), (backward_report(), SGD)):
        path = save_seeds(report)
        assert path.parent.name == FOLDER
        best = [row.params for row in report.rows]
        assert load_seeds(report.op, "sm_90", SPEC, update) == best
        assert load_seeds(report.op, "sm_90", SPEC, update, count=2) == best[:2]
    renamed = CollectionSpec([TableSpec("other", 1000, 16)], [FeatureSpec("g", "other", "none")])
    assert load_seeds("forward", "sm_90", renamed) == load_seeds("forward", "sm_90", SPEC) != []
    assert load_seeds("forward", "sm_80", SPEC) == []
    assert load_seeds("backward", "sm_90", SPEC, update_named("adam")) == []
    assert load_seeds("backward", "sm_90", SPEC, None) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"embforge_estimate": 99, "rows": []}',
        b'{"embforge_estimate": 1}',
        b'{"embforge_estimate": 1, "rows": [{"params": {"warps": 3}}]}',
        b'{"embforge_estimate": 1, "rows": [{"params": {"block": 17}}]}',
        b'{"embforge_estimate": 1, "rows": [{"params": null}]}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_reported_and_skipped(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path))
    path = save_seeds(forward_report())
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=r"not an estimate of this embforge.*embforge tune --static"):
        assert load_seeds("forward", "sm_90", SPEC) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is reported once
        assert load_seeds("forward", "sm_90", SPEC) == []


def test_nothing_that_runs_reads_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path))
    save_seeds(replace(backward_report(), rows=tuple(r for r in backward_report().rows if r.rank == 1)))
    best = load_seeds("backward", "sm_90", SPEC, SGD)
    choice = choose("backward", "cuda", SPEC, any_gpu("sm_90"), rule="sgd")
    assert best != [CudaBackwardParams()] == [choice.params] and choice.record is None
    assert read_stores() == ([], [])  # nor is the file taken for a damaged result


def test_every_architecture_has_a_usual_gpu() -> None:
    assert MULTIPROCESSORS.keys() == ARCHS.keys()


def test_a_plan_that_keeps_more_under_way_costs_less() -> None:
    """The least cost is the number of bytes to be moved, which memory takes if it never waits."""
    spec = CollectionSpec([TableSpec("t", 1000, 64)], [FeatureSpec("f", "t")])
    plan = Plan("forward", "cuda", "sm_90", "int64", spec, CudaParams())
    demand = demand_of(plan, make_batch(spec, Workload()))
    assert demand.bytes == {"d64_fp32_sum": 2048 * 256.0}
    (bucket,) = demand.bytes
    costs = [cost(demand, {bucket: Flight(kb << 10, filled)}, "sm_90") for kb, filled in ((8, 1), (16, 1), (32, 1))]
    assert costs == [4 * costs[2], 2 * costs[2], demand.bytes[bucket]]
    assert cost(demand, {bucket: Flight(64 << 10, 1.0)}, "sm_90") == costs[2]
    assert cost(demand, {bucket: Flight(32 << 10, 0.5)}, "sm_90") == costs[1]
    assert cost(demand, {bucket: Flight(32 << 10, 1.0)}, "sm_100") == costs[1]
    few, many = (
        promised_flight(replace(plan, params=CudaParams(pipeline=pipeline)), demand)[bucket].bytes
        for pipeline in ((2, 4), (4, 4))
    )
    assert many == 2 * few


def test_counts_do_not_depend_on_the_address_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy gives memory that begins anywhere in a sector, so otherwise two runs could rank plans differently."""
    drawn, found = make_batch(SPEC, WORKLOAD), []
    room = np.zeros(drawn.values.size + 16, np.int64)
    first = -room.ctypes.data // 8 % 8  # where a cache line begins
    for shift in range(4):
        values = room[first + shift : first + shift + drawn.values.size]
        values[:] = drawn.values
        moved = replace(drawn, values=values)
        monkeypatch.setattr(sectors, "make_batch", lambda *_, moved=moved: moved)
        count = sector_counter(SPEC, WORKLOAD)
        found.append(count(Plan("forward", "cuda", "sm_90", "int64", SPEC, CudaParams())))
    assert len(set(found)) == 1


def test_sectors_of_copied_rows_are_those_that_their_bytes_take() -> None:
    """A row of 64 bytes is read and written: two sectors each, and a little for ids and borders."""
    counted = sector_counter(SPEC, WORKLOAD)(Plan("forward", "cuda", "sm_90", "int64", SPEC, CudaParams()))
    assert 4 <= counted < 6
    assert counted == forward_report().default.sectors_per_output


def test_recorded_ids_of_a_table_larger_than_the_emulated_one_are_counted(tmp_path: Path) -> None:
    spec = CollectionSpec([TableSpec("t", 1_000_000, 16)], [FeatureSpec("f", "t", "none")])
    ids = np.arange(999_000, 999_064)
    trace = Trace(("f",), (1_000_000,), "any", np.array([64]), np.ones(64, np.int64), ids, None)
    write_trace(tmp_path / "t.npz", trace)
    count = sector_counter(spec, parse(f"trace:{tmp_path / 't.npz'}"))
    assert 4 <= count(Plan("forward", "cuda", "sm_90", "int64", spec, CudaParams())) < 6

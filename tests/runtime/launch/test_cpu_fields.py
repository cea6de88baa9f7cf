"""Plan fields of the CPU have the effect that they describe; where they cannot have it, the code is the same."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cpu_plans import counted_tasks, forward, machine_code, one_table
from support.probes import probe_of, same
from test_cpu_backward import plan_of, rich_spec, runnable, world_of
from test_forward_train import CASES, SPEC

from embforge.codegen.build import build, source_of
from embforge.codegen.layout import layout_of
from embforge.codegen.machine import host_isa
from embforge.codegen.params import CpuBackwardParams, CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cpu.geometry import (
    rows_at_once,
    streams_results,
)
from embforge.codegen.targets.cpu.isa import ISAS
from embforge.launch.cpu.backward import CpuBackward, CpuReduce, CpuWeightGradient
from embforge.launch.cpu.forward import CpuForward
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.reference.forward_train import lookup_train
from embforge.verify.cases import Case
from embforge.verify.probes import call_of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_forward_to_train_gives_the_references_bits(case: Case) -> None:
    """Unrolled rows and streamed results, with the winners and divisors that only such a forward keeps."""
    params = CpuParams(rows_unrolled=4, stores="streaming", grain_bytes=16384)
    plan = Plan("forward_train", "cpu", host_isa(), "int64", SPEC, params)
    probe = probe_of(SPEC, case, seed=3)
    wanted = lookup_train(SPEC, *probe.drawn, probe.tables, bounds_check="zero")
    kernel = kernel_of(Program(plan).text)
    for want, have in zip(wanted, kernel(*call_of(plan, probe)), strict=True):
        assert same(want, have)


@pytest.mark.parametrize(("threads", "tasks"), [(0, [3]), (2, [2]), (1, [])])
def test_a_forward_takes_no_more_threads_than_it_may(threads: int, tasks: list[int]) -> None:
    plan = forward(one_table(4), threads=threads)
    kernel = CpuForward(plan, build(plan).binary)
    with counted_tasks(kernel) as asked:
        kernel(*call_of(plan, probe_of(plan.spec, Case(4000, "usual"), 1)))
    assert asked == tasks


@pytest.mark.parametrize(
    ("op", "kind"), [("backward", CpuBackward), ("reduce", CpuReduce), ("weight_gradient", CpuWeightGradient)]
)
def test_a_backward_takes_no_more_threads_than_it_may(op: str, kind: Any) -> None:
    """Three threads are available, and it may use fewer, even if threads share the sort of one table."""
    spec = CollectionSpec([TableSpec("t", 5000, 4)], [FeatureSpec("f", "t", "sum", weighted=True)])
    plan = plan_of(spec, op, params=CpuBackwardParams(threads=2))
    kernel = kind(plan, build(plan).binary)
    world = world_of(plan, Case(9000, "usual"), hyper=(0.1, 0.0, 1e-10))
    with counted_tasks(kernel) as asked:
        world.run(kernel)
    assert asked and set(asked) == {2}


def test_tiles_wider_than_every_row_are_the_same_code(tmp_path: Path) -> None:
    isa = ISAS[host_isa()]
    plan = forward(one_table(3 * isa.width))
    four, sixteen = (machine_code(replace(plan, params=CpuParams(tile_vectors=n)), tmp_path) for n in (4, 16))
    assert four == sixteen


def test_rows_that_registers_cannot_hold_are_not_unrolled(tmp_path: Path) -> None:
    isa = ISAS[host_isa()]
    plan = forward(one_table(isa.registers // 3 * isa.width))  # two rows and their sum, but not four
    params = {n: CpuParams(tile_vectors=16, rows_unrolled=n) for n in (1, 2, 4)}
    made = {n: machine_code(replace(plan, params=params[n]), tmp_path) for n in params}
    assert made[1] != made[2] == made[4]


def test_wide_rows_are_unrolled_less_often() -> None:
    assert [rows_at_once(vectors, 4, ISAS["avx512"]) for vectors in (1, 6, 7, 10, 11, 16)] == [4, 4, 2, 2, 1, 1]


def without_head(plan: Plan) -> str:
    """The source below the comment that names the plan and its fields."""
    return source_of(plan).partition("#include")[2].replace(plan.uri, "kernel")


def test_small_tables_are_never_prefetched() -> None:
    small, large = one_table(64, rows=2048), one_table(64, rows=2049)
    for spec, same_code in ((small, True), (large, False)):
        near, far = (without_head(forward(spec, prefetch_bytes=n)) for n in (0, 32768))
        assert (near == far) == same_code


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [3, 40])
def test_results_are_streamed_where_that_can_be(isa: str, dim: int) -> None:
    cached, streaming = (without_head(forward(one_table(dim), isa, stores=how)) for how in ("cached", "streaming"))
    acts = isa in ("avx512", "avx2") and dim == 40
    assert streams_results(layout_of(one_table(dim)), ISAS[isa]) == acts
    assert (cached != streaming) == acts
    assert not re.search(r"_mm\w*_stream|sfence", cached)


def test_streamed_results_are_finished_by_a_fence(tmp_path: Path) -> None:
    for isa, output_dtype, register in (("avx512", "fp16", "ymm"), ("avx2", "fp32", "ymm")):
        if isa not in runnable():
            continue
        plan = forward(one_table(40, output_dtype=output_dtype), isa, stores="streaming")
        machine_code(plan, tmp_path)
        listing = subprocess.run(["objdump", "-d", tmp_path / "kernel.o"], check=True, capture_output=True, text=True)
        assert re.search(rf"movnt\w+\s+%{register}", listing.stdout)
        assert len(re.findall(r"\bsfence\b", listing.stdout)) >= 2  # of the caller and of a thread


def test_a_text_from_before_these_fields_keeps_its_meaning() -> None:
    """The schema of a plan's text did not change when these fields were added."""
    for plan in (forward(one_table(8)), plan_of(rich_spec(), params=CpuBackwardParams())):
        old = re.sub(r'"(rows_unrolled|threads)":\d+,|"stores":"\w+",|,"threads":\d+', "", plan.text)
        assert '"threads"' not in old and '"stores"' not in old and '"grain_bytes":65536' in old
        assert Plan.from_text(old) == plan

"""Every generated CUDA kernel of the example specs is executed: all pairs of plan fields, under shuffled schedules."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from functools import cache

import pytest

from embforge.cli.common import load_spec
from embforge.codegen.build import source_of
from embforge.codegen.dtypes import ID_DTYPES
from embforge.codegen.errors import KernelBugError
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH
from embforge.launch.simt.forward import SimtForward
from embforge.verify.lookups import VerifyReport, check_on_simt, distinct, plans_to_verify, verify
from embforge.verify.pairwise import covering
from embforge.verify.probes import Probe, few_probes_of

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
"""One architecture of each kind: least shared memory, 16-byte loads, hardware fp8, 32-byte loads, fewer threads per
multiprocessor."""
CHUNKS = {"dlrm": 16, "llm_vocab": 8, "mixed": 8}
"""The number of tests among which a spec's plans are divided, so that workers of pytest-xdist have equal work."""
ALWAYS = {"dlrm": 1, "llm_vocab": 0, "mixed": 0}
"""How many of these every run of the tests has; the others, whose images take seconds to compile, are for the soak."""


@cache
def probes(name: str) -> list[Probe]:
    return few_probes_of(load_spec(name), 0, lambda what, done, total: None)


def check(plans: list[Plan], name: str, seed: int) -> None:
    rows = [tally.row() for tally in check_on_simt(plans, probes(name), seed)]
    assert rows and [row for row in rows if not row.passed] == []


def covering_plans(name: str) -> list[Plan]:
    """Plans in which any two choices of any two fields occur together; architecture and type of ids count as fields."""
    choices = {field.name: field.metadata["choices"] for field in fields(CudaParams)}
    plans = [Plan("forward", "simt", DEFAULT_ARCH, "int64", load_spec(name), CudaParams())]
    for row in covering(choices | {"id_dtype": ID_DTYPES, "arch": ARCHS}):
        arch, id_dtype = row.pop("arch"), row.pop("id_dtype")
        plans.append(Plan("forward", "simt", arch, id_dtype, load_spec(name), CudaParams(**row)))
    return distinct(plans)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        pytest.param(name, chunk, marks=() if chunk < ALWAYS[name] else pytest.mark.soak)
        for name, count in CHUNKS.items()
        for chunk in range(count)
    ],
)
def test_every_pair_of_plan_fields_passes(name: str, chunk: int) -> None:
    plans = covering_plans(name)
    assert len(plans) > 20 and {plan.arch for plan in plans} == set(ARCHS)
    check(plans[chunk :: CHUNKS[name]], name, chunk)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_results_are_rounded_once(arch: str, dtype: str) -> None:
    """fp32 sums to a narrow output: sm_75 rounds to bf16 by arithmetic, the others by an instruction."""
    features = [FeatureSpec("f", "t", "mean"), FeatureSpec("g", "t", "none")]
    spec = CollectionSpec([TableSpec("t", 500, 9)], features, output_dtype=dtype, name=f"rounded_{dtype}")
    assert verify(spec, on="simt", arch=arch, params=[CudaParams()]).passed


TINY = CollectionSpec(
    [TableSpec("t", 5000, 4)], [FeatureSpec("f", "t", "mean"), FeatureSpec("g", "t", "none")], name="tiny_simt"
)


def test_verify_counts_plans_and_tells_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    some = plans_to_verify(TINY, "simt", DEFAULT_ARCH, None)[:5]
    hinted = [replace(plan, params=replace(plan.params, cache_hint="default")) for plan in some[:2]]
    monkeypatch.setattr("embforge.verify.lookups.plans_to_verify", lambda *arguments: some + hinted)
    told = []
    report = verify(TINY, on="simt", progress=lambda what, done, total: told.append(what))
    assert report.passed and (report.on, report.arch, report.plans, report.left_out) == ("simt", DEFAULT_ARCH, 5, 2)
    stages = ["building kernels", "drawing tables", "computing the reference", "running kernels"]
    assert list(dict.fromkeys(told)) == stages
    few = next(row for row in report.rows if "split" in row.check)
    assert few.cases == 5 + 2 * 2  # one schedule per plan, and two more of the default one with either id type
    assert any(row.check.startswith("torch.nn.EmbeddingBag") for row in report.rows)


def test_of_plans_with_the_same_code_the_first_is_kept() -> None:
    plans = plans_to_verify(load_spec("llm_vocab"), "simt", DEFAULT_ARCH, None)
    kept = distinct(plans)
    texts = [source_of(p).partition("// ==== end of primitives")[2].replace(p.symbol, "") for p in plans]
    assert kept == [plan for i, plan in enumerate(plans) if texts[i] not in texts[:i]]
    assert 20 < len(kept) < len(plans)


def test_verify_of_one_plan_runs_everything() -> None:
    report = verify(TINY, on="simt", arch="sm_100", params=[CudaParams(block=128)], seed=3)
    assert report.passed and (report.arch, report.plans, report.left_out) == ("sm_100", 2, 0)
    assert len(report.rows) > 12 and all(row.cases >= 3 for row in report.rows)


@pytest.fixture
def buggy(monkeypatch: pytest.MonkeyPatch) -> VerifyReport:
    """A kernel with a bug that is found in every run of more than 50 samples."""
    run = SimtForward.run

    def caught(self: SimtForward, *arguments: object) -> object:
        if arguments[2].batch > 50:  # type: ignore[attr-defined]
            raise KernelBugError(f"kernel k: race: two threads\n  schedule seed {arguments[-1].seed}")  # type: ignore[attr-defined]
        return run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SimtForward, "run", caught)
    return verify(TINY, on="simt", params=[CudaParams()])


def test_a_bug_is_a_row_that_failed(buggy: VerifyReport) -> None:
    failed = [row for row in buggy.rows if not row.passed]
    assert not buggy.passed and 1 < len(failed) < len(buggy.rows)
    for row in failed:
        assert row.detail.startswith("kernel k: race: two threads") and "CudaParams" in row.detail
        assert "schedule" in row.detail and row.max_abs_error == float("inf")


def test_plans_are_run_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    spec = replace(TINY, name="tiny_parallel")
    plans = plans_to_verify(spec, "simt", DEFAULT_ARCH, None)[:6]
    small = few_probes_of(spec, 0, lambda what, done, total: None)
    one, many = ([t.row() for t in check_on_simt(plans, small, 0, workers=workers)] for workers in (1, 4))
    assert one == many and all(row.passed for row in one)

"""`bench_spec`, its peers, and the benchmark's criteria and page. Times are never asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.build_times import verdicts_of
from benchmarks.criteria import Verdict, batch_speedups, judge, judge_all
from benchmarks.page import write_page
from benchmarks.suites import FORWARD, TRAINING
from benchmarks.workloads import BenchWorkload, read_workloads
from embforge.codegen.errors import ToolchainError
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.bench import forward as bench
from embforge.tuner.bench.forward import bench_spec, filled_module
from embforge.tuner.bench.peers import PeerUnavailableError, fbgemm_peer, fill_table, peer_named, torch_peer
from embforge.tuner.bench.report import BenchReport, Timing
from embforge.tuner.measure.paired import Ratio
from embforge.tuner.workload.workload import make_batch, parse

SPEC = CollectionSpec(
    (TableSpec("a", 100, 8), TableSpec("b", 50, 16)),
    (FeatureSpec("x", "a"), FeatureSpec("y", "b", pooling="mean"), FeatureSpec("z", "a", weighted=True)),
    name="small",
)


@pytest.fixture(scope="module")
def report() -> BenchReport:
    return bench_spec(SPEC, against=("torch", "fbgemm"), workload="len=geo:3,batch=16", seconds=0)


def test_a_report_has_every_peer_and_their_outputs_agree(report: BenchReport) -> None:
    assert {t.name for t in report.timings} >= {"embforge", "torch", "limit"}
    assert report.disagreeing == ()
    assert report.differences["torch"] < 1e-5
    assert report.limit_share is not None
    assert report.fastest_peer == "torch"
    assert report.speedup == report.ratios["torch"].median


def test_a_peer_that_cannot_serve_the_spec_is_named(report: BenchReport) -> None:
    assert "fbgemm" not in report.ratios
    assert "pooling" in report.skipped["fbgemm"]


def test_report_is_json_with_all_samples(report: BenchReport) -> None:
    data = json.loads(json.dumps(report.to_json()))
    ours = next(t for t in data["timings"] if t["name"] == "embforge")
    assert len(ours["samples"]) >= 7
    assert data["ratios"]["torch"]["low"] <= data["ratios"]["torch"]["high"]


def test_wrong_outputs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_rows(rows: torch.Tensor, seed: int) -> None:
        fill_table(rows, seed + 1)

    monkeypatch.setattr("embforge.tuner.bench.peers.fill_table", other_rows)
    report = bench_spec(SPEC, against=("torch",), workload="batch=16", seconds=0, limit=False)
    assert report.disagreeing == ("torch",)
    verdicts = judge(BenchWorkload("w", "cache", SPEC, "batch=16"), report)
    assert not verdicts[0].passed
    assert verdicts[0].criterion == "outputs agree"


def test_sequences_are_benched_through_forward_dict() -> None:
    spec = CollectionSpec((TableSpec("vocabulary", 64, 32, "bf16"),), (FeatureSpec("tokens", "vocabulary", "none"),))
    report = bench_spec(spec, against=("torch",), workload="len=fixed:4,batch=8", seconds=0)
    assert report.disagreeing == ()


MIXED = CollectionSpec(
    (TableSpec("wide", 60, 8), TableSpec("narrow", 60, 8, "bf16")),
    (FeatureSpec("w", "wide"), FeatureSpec("n", "narrow")),
    name="mixed",
)


def test_tables_of_several_types_are_compared_by_the_type_of_each() -> None:
    """torch joins fp32 and bf16 bags in fp32, whose tolerance a bag rounded to bf16 does not keep."""
    batches = [make_batch(MIXED, parse("len=fixed:3,batch=16"), seed) for seed in range(2)]
    exact = replace(torch_peer(MIXED), rounded_to=(torch.float32, torch.float32))
    with torch.no_grad():
        ours = bench.our_contender(filled_module(MIXED, backend="reference"), "cpu")
        differences, disagreeing = bench.compare([ours, torch_peer(MIXED)], batches)
        assert bench.compare([ours, exact], batches)[1] == ("torch",)
    assert disagreeing == () and differences["torch"] > bench.TOLERANCE[torch.float32]


def test_a_wrong_feature_of_the_finer_type_is_noticed_beside_a_coarser_one() -> None:
    batches = [make_batch(MIXED, parse("len=fixed:3,batch=16"))]
    peer = torch_peer(MIXED)

    def off(result: object) -> list[torch.Tensor]:
        wide, narrow = peer.outputs(result)
        return [wide * (1 + 1e-3), narrow]  # within bf16's tolerance, which is not this feature's

    with torch.no_grad():
        ours = bench.our_contender(filled_module(MIXED, backend="reference"), "cpu")
        assert bench.compare([ours, replace(peer, outputs=off)], batches)[1] == ("torch",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_no_device_is_an_error_with_the_remedy() -> None:
    with pytest.raises(ToolchainError, match="use --on cpu"):
        bench_spec(SPEC, on="cuda")


@pytest.mark.parametrize(
    ("table", "feature", "named"),
    [
        (TableSpec("t", 9, 4), FeatureSpec("f", "t", "sqrtn"), "feature 'f'.*'sqrtn'"),
        (TableSpec("t", 9, 4), FeatureSpec("f", "t", "mean", weighted=True), "feature 'f'.*weights only"),
        (TableSpec("t", 9, 4, "fp8_e4m3"), FeatureSpec("f", "t"), "table 't'.*fp8_e4m3"),
    ],
)
def test_specs_that_torch_cannot_serve_are_named(table: TableSpec, feature: FeatureSpec, named: str) -> None:
    with pytest.raises(PeerUnavailableError, match=named):
        torch_peer(CollectionSpec((table,), (feature,)))


@pytest.mark.parametrize(
    ("table", "feature", "named"),
    [
        (TableSpec("t", 9, 4, "bf16"), FeatureSpec("f", "t"), "table 't'.*bf16"),
        (TableSpec("t", 9, 3), FeatureSpec("f", "t"), "table 't'.*divisible by 4"),
        (TableSpec("t", 9, 4), FeatureSpec("f", "t", "max"), "feature 'f'.*'max'"),
        (TableSpec("t", 9, 4), FeatureSpec("f", "t", padding_idx=0), "feature 'f'.*padding_idx"),
    ],
)
def test_specs_that_fbgemm_cannot_serve_are_named(table: TableSpec, feature: FeatureSpec, named: str) -> None:
    with pytest.raises(PeerUnavailableError, match=named):
        fbgemm_peer(CollectionSpec((table,), (feature,)), [])


def test_unknown_peer_is_named_with_the_known_ones() -> None:
    with pytest.raises(PeerUnavailableError, match=r"'tf'.*torch, fbgemm"):
        peer_named("tf", SPEC, [make_batch(SPEC, parse("batch=2"))])


def test_filling_is_the_same_for_every_stride() -> None:
    plain, strided = torch.empty(20_000, 3), torch.empty(20_000, 5)[:, :3]
    fill_table(plain, 7)
    fill_table(strided, 7)
    assert torch.equal(plain, strided)
    assert plain.abs().max() <= 1
    assert plain.std() > 0.5


def test_the_workloads_cover_what_they_must() -> None:
    workloads = read_workloads()
    loads = [parse(w.load) for w in workloads]
    assert {w.group for w in workloads} == {"large", "cache", "overhead"}
    assert {t.dtype for w in workloads for t in w.spec.tables} == {"fp32", "fp16", "bf16"}
    assert {str(load.ids).split(":")[0] for load in loads} == {"uniform", "zipf"}
    assert {"fixed:1", "fixed:20", "fixed:100"} <= {str(load.lengths) for load in loads}
    assert any("skew" in str(load.lengths) for load in loads)
    assert min(load.batch for load in loads) == 1
    assert max(load.batch for load in loads) == 16384
    assert len({w.spec.name for w in workloads}) == len(workloads)


def made_up(speedup: float, share: float, others: float = 0.0, train: str | None = None) -> BenchReport:
    ratio = Ratio(speedup, speedup, speedup)
    return BenchReport(
        spec="s",
        workload="batch=1",
        on="cpu",
        batches=4,
        ids=1,
        row_bytes=1,
        table_bytes=1,
        timings=(Timing("embforge", "", 10.0, 9.0, 11.0, 1, (10.0,)),),
        ratios={"torch": ratio, "fbgemm": replace(ratio, median=speedup * 2)},
        limit_share=Ratio(share, share, share),
        differences={"torch": 0.0},
        disagreeing=(),
        skipped={},
        others=others,
        machine=dict.fromkeys(
            ("date", "cpu", "threads", "last_level_cache", "system", "torch", "fbgemm", "embforge"), "x"
        ),
        train=train,
        both_share=Ratio(share * 2, share * 2, share * 2) if train else None,
    )


@pytest.mark.parametrize(
    ("group", "speedup", "share", "passed"),
    [
        ("cache", 1.3, 0.5, [True]),
        ("cache", 1.1, 0.95, [True]),
        ("cache", 1.1, 0.85, [False]),
        ("large", 1.3, 0.85, [True, True]),
        ("large", 1.3, 0.75, [True, False]),
        ("large", 1.1, 0.85, [False, True]),
    ],
)
def test_each_group_of_workloads_is_judged_by_its_own_limits(
    group: str, speedup: float, share: float, passed: list[bool]
) -> None:
    verdicts = judge(BenchWorkload("w", group, SPEC, "batch=1"), made_up(speedup, share))
    assert [v.passed for v in verdicts] == passed


@pytest.mark.parametrize(
    ("group", "speedup", "share", "passed"),
    [
        ("cache", 1.6, 0.1, [True]),
        ("cache", 1.4, 0.95, [False]),
        ("large", 1.6, 0.65, [True, True]),
        ("large", 1.6, 0.55, [True, False]),
        ("large", 1.4, 0.65, [False, True]),
    ],
)
def test_each_group_of_training_workloads_is_judged_by_its_own_limits(
    group: str, speedup: float, share: float, passed: list[bool]
) -> None:
    workload = BenchWorkload("w", group, SPEC, "batch=1", train="sgd")
    verdicts = judge(workload, made_up(speedup, share, train="sgd"))
    assert [v.passed for v in verdicts] == passed
    (overall,) = judge_all([workload], [made_up(speedup, share, train="sgd")])
    assert overall.criterion == "geometric mean 2.5x the faster peer"
    assert not overall.passed


def test_overhead_is_judged_against_torch_alone() -> None:
    workload = BenchWorkload("w", "overhead", SPEC, "batch=1", against_torch=5.0)
    assert [v.passed for v in judge(workload, made_up(5.1, 0.1))] == [True]
    assert [v.passed for v in judge(workload, made_up(4.9, 0.1))] == [False]


def test_a_disturbed_measurement_never_passes() -> None:
    verdicts = judge(BenchWorkload("w", "cache", SPEC, "batch=1"), made_up(3.0, 1.0, others=1.2))
    assert not all(v.passed for v in verdicts)


def test_the_geometric_mean_leaves_overhead_out() -> None:
    workloads = [BenchWorkload("w", group, SPEC, "batch=1", 1.0) for group in ("large", "cache", "overhead")]
    reports = [made_up(1.0, 1.0), made_up(4.0, 1.0), made_up(100.0, 1.0)]
    assert batch_speedups(workloads, reports) == [1.0, 4.0]
    assert judge_all(workloads, reports) == [Verdict("geometric mean 1.5x the faster peer", "2.00x", True)]
    assert judge_all([], []) == []


def test_page_is_rewritten_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    targets = f"{FORWARD.begin_targets}\nold\n{FORWARD.end_targets}"
    page.write_text(f"before\n{FORWARD.begin}\nold\n{FORWARD.end}\nbetween\n{targets}\nafter\n")
    workloads = [BenchWorkload("first", "large", SPEC, "batch=1"), BenchWorkload("second", "cache", SPEC, "batch=1")]
    reports = [made_up(1.1, 0.5), made_up(2.0, 0.5)]
    verdicts = [judge(w, r) for w, r in zip(workloads, reports, strict=True)]
    for _ in range(2):
        write_page(tmp_path, workloads, reports, verdicts, judge_all(workloads, reports))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    results, targets = text.split("between")
    assert "are 1.1 to 2.0 times as fast as with the faster of torch and FBGEMM, 1.5 times in the" in results
    assert "the dashed one the target over the faster peer (1.2×)" in results and "target not" not in results
    assert "- **target not reached**: first: 80% of the limit; measured 50.0%" in targets
    assert "second" not in targets and "miss" not in text
    drawn = (tmp_path / "benchmarks.svg").read_text()
    assert drawn.count("second") == 1 and "target 1.2×" in drawn and "target 80%" in drawn
    page.write_text("no markers")
    with pytest.raises(ValueError, match="lacks the marker"):
        write_page(tmp_path, workloads, reports, verdicts, [])


def test_a_training_page_has_both_shares_and_names_missing_peers(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    kept = f"{FORWARD.begin}\nkept\n{FORWARD.end}\n{FORWARD.begin_targets}\nkept\n{FORWARD.end_targets}\n"
    targets = f"{TRAINING.begin_targets}\nold\n{TRAINING.end_targets}\n"
    page.write_text(f"{kept}{TRAINING.begin}\nold\n{TRAINING.end}\n{targets}")
    workload = BenchWorkload("step", "large", SPEC, "batch=1", train="adam")
    report = made_up(3.0, 0.3, train="adam")
    report = replace(report, ratios={"torch": report.ratios["torch"]}, skipped={"fbgemm": "no adam"})
    verdicts = [judge(workload, report)]
    write_page(tmp_path, [workload], [report], verdicts, judge_all([workload], [report]), TRAINING)
    text = page.read_text()
    assert text.startswith(kept)
    assert "old" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| step")]
    assert row.endswith("| 3.00 (3.00-3.00) | no such peer | 30.0% | 60.0% | **not reached** |")
    assert "**target not reached**: step: 60% of the limit; measured 30.0%" in text
    assert "Left out: fbgemm: no adam" in text
    assert "update limit" in (tmp_path / "training.svg").read_text()


def test_build_times_are_judged_by_their_limits() -> None:
    assert [line[:4] for line in verdicts_of(("dlrm", "cuda", "sm_90"), 1.9, 0.021)] == ["pass", "MISS"]
    assert [line[:4] for line in verdicts_of(("dlrm", "cuda", "sm_90"), 2.1, 0.02)] == ["MISS", "pass"]
    (line,) = verdicts_of(("dlrm", "cpu", "avx2"), 60.0, 0.004)
    assert line == "pass  dlrm cpu avx2: cached build 4 ms, at most 20 ms"

"""What a run stores: what its finals prove and nothing else. A doubt never replaces what was proven before."""

from __future__ import annotations

import json
import math
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.replay_judge import ReplayJudge

import embforge as ef
from embforge.cli.display.tune_result import print_result, result_json
from embforge.codegen.params import CpuParams, Params
from embforge.codegen.plan import Plan
from embforge.tuner import tune as tune_module
from embforge.tuner.measure.quiet import Usage
from embforge.tuner.report.data import report_of
from embforge.tuner.report.page import page
from embforge.tuner.study.race import race
from embforge.tuner.study.task import Task
from embforge.tuner.tune import TuneResult, tune

SPEC = ef.CollectionSpec((ef.TableSpec("t", 3000, 8),), (ef.FeatureSpec("f", "t"),))
SMALL, LARGE = "uniform,batch=64", "uniform,batch=8192"
FAST, OTHER = CpuParams(prefetch_bytes=0), CpuParams(prefetch_bytes=4096)
Times = dict[Params, dict[str, float]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(store: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tunes with finals over a table of times instead of a machine."""

    def tuned(
        times: Times,
        *,
        noise: float = 0.002,
        deadline: float = math.inf,
        where: str = "user",
        judge: type[ReplayJudge] = ReplayJudge,
    ) -> TuneResult:
        def finals(task: Task, study: object, before: dict[str, Any], *_: object) -> tuple[int, object]:
            finalists = [task.plan(params) for params in times if params != task.default]
            stored = [task.plan(CpuParams(**record.params)) for record in before.values()]
            candidates: list[Plan] = list(dict.fromkeys([*finalists, *stored]))
            return 0, race(
                judge(times, task.default, noise=noise), candidates, task.plan(task.default), deadline=deadline
            )

        monkeypatch.setattr(tune_module, "_run", finals)
        workloads = list(next(iter(times.values())))
        return tune(SPEC, workloads=workloads, trials=1, store=where)  # type: ignore[arg-type]

    return tuned


def stored(store: Path) -> dict[str, dict[str, Any]]:
    """Records by workload."""
    files = [json.loads(path.read_text()) for path in store.glob("*.json")]
    return {record["workload"]: record for data in files for record in data["records"]}


def times(default: float, fast: float, workload: str = SMALL) -> Times:
    return {CpuParams(): {workload: default}, FAST: {workload: fast}}


def test_a_proven_gain_is_stored_and_a_doubtful_one_does_not_replace_it(run: Any, store: Path) -> None:
    first = run(times(1e-3, 0.8e-3))
    assert first.best == FAST and first.unstored == "" and len(first.paths) == 1
    assert stored(store)[SMALL]["params"]["prefetch_bytes"] == 0
    before = first.paths[0].read_bytes()
    doubt = run(times(1e-3, 0.99e-3), noise=0.05, deadline=0.0)
    assert doubt.best == CpuParams() and doubt.paths == ()
    assert "undecided; what was stored before stays" in doubt.unstored
    assert first.paths[0].read_bytes() == before


def test_a_doubtful_gain_is_not_stored(run: Any, store: Path) -> None:
    doubt = run(times(1e-3, 0.99e-3), noise=0.05, deadline=0.0)
    assert doubt.paths == () and "undecided: give them more time" in doubt.unstored and not stored(store)


class BusyJudge(ReplayJudge):
    """A judge on a machine on which other processes use more than one CPU."""

    @property
    def others(self) -> Usage:
        return Usage(1.0, 1.3)


@pytest.mark.parametrize(
    ("noise", "judge", "reason"),
    [(0.6, ReplayJudge, "the noise floor of "), (0.002, BusyJudge, "other processes used 1.30 CPUs during the finals")],
)
def test_a_busy_machine_stores_nothing_and_says_why(
    run: Any, store: Path, noise: float, judge: type[ReplayJudge], reason: str, tmp_path: Path
) -> None:
    """However large the gain looks: in the console, as data and on the page."""
    proven = run(times(1e-3, 0.8e-3))
    before = proven.paths[0].read_bytes()
    busy = run(times(56e-3, 1e-3), noise=noise, deadline=0.0, judge=judge)
    assert busy.best == CpuParams() and busy.paths == () and proven.paths[0].read_bytes() == before
    assert f"undecided ({reason}" in busy.unstored and "quieter machine" in busy.unstored
    assert "; what was stored before stays" in busy.unstored

    report = report_of(busy.study)
    data, screen = result_json(report), Console(file=StringIO(), width=80)
    assert not data["decision"]["ships"] and data["best"] == data["default"]
    assert data["decision"]["disturbed"].startswith(reason) and reason in data["decision"]["why"]
    assert data["decision"]["gain"] is None and data["decision"]["gains"] is None
    assert all(compared["gain"] is None for compared in data["comparisons"])
    print_result(screen, report)
    assert isinstance(screen.file, StringIO)
    shown = " ".join(screen.file.getvalue().split())
    assert f"The default stays: {reason}" in shown and "quieter machine" in shown
    gain = f"{report.finals.decision.gain.median:.2f}" if report.finals else ""
    assert float(gain) > 20 and gain not in shown
    text = unescape(page(report))
    banner = text[text.index('id="verdict"') : text.index('id="finals"')]
    assert "Nothing decided: the machine was busy" in banner and reason in banner
    assert gain not in text


def test_what_an_earlier_version_decided_on_a_busy_machine_is_not_shown(run: Any) -> None:
    """Studies hold the finals of earlier runs, which may have shipped what their noise floor forbids."""
    busy = run(times(56e-3, 1e-3), noise=0.6, deadline=0.0)
    finals = busy.study.user_attrs["finals"] | {"ships": True, "why": "56.000x the default"}
    busy.study.set_user_attr("finals", {name: value for name, value in finals.items() if name != "others"})
    report = report_of(busy.study)
    assert report.finals is not None and not report.finals.decision.ships and report.best == report.default
    assert "noise floor" in report.finals.decision.why


def test_a_result_that_is_refuted_is_replaced_by_the_default(run: Any, store: Path) -> None:
    run(times(1e-3, 0.8e-3))
    refuted = run(times(1e-3, 1.2e-3))
    assert refuted.best == CpuParams() and len(refuted.paths) == 1
    (record,) = stored(store).values()
    assert record["params"]["prefetch_bytes"] == CpuParams().prefetch_bytes and record["gain"]["median"] == 1.0
    assert "candidate" in record["samples"] and "that candidate" in record["notes"][0]


def test_a_workload_without_a_gain_of_its_own_gets_no_record(run: Any, store: Path) -> None:
    both: Times = {CpuParams(): {SMALL: 1e-3, LARGE: 1e-3}, FAST: {SMALL: 0.7e-3, LARGE: 1e-3}}
    result = run(both)
    assert result.best == FAST and set(stored(store)) == {SMALL} and LARGE in result.unstored


def test_a_compromise_does_not_replace_a_specialist(run: Any, store: Path) -> None:
    run(times(1e-3, 0.6e-3))
    both: Times = {
        CpuParams(): {SMALL: 1e-3, LARGE: 1e-3},
        FAST: {SMALL: 0.6e-3, LARGE: 2e-3},
        OTHER: {SMALL: 0.9e-3, LARGE: 0.8e-3},
    }
    result = run(both)
    assert result.best == OTHER and SMALL in result.unstored
    found = {workload: record["params"]["prefetch_bytes"] for workload, record in stored(store).items()}
    assert found == {SMALL: FAST.prefetch_bytes, LARGE: OTHER.prefetch_bytes}


def test_nothing_is_stored_without_a_store(run: Any, store: Path) -> None:
    result = run(times(1e-3, 0.8e-3), where=None)
    assert result.best == FAST and result.paths == () and len(result.records) == 1 and not stored(store)

"""What `embforge tune` shows while it runs and at its end: on a terminal a live panel, elsewhere lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from embforge.cli.display import tune_progress as tune_display
from embforge.cli.display.tune_progress import Status, display
from embforge.cli.display.tune_result import broken, places_of, print_result, storage_url
from embforge.codegen.params import CpuParams
from embforge.codegen.tuned.record import Hardware
from embforge.tuner.judge.outcome import FAILURES, LaunchFailed, Outcome, Paired, Timed
from embforge.tuner.report.data import Report, Trial, finals_of
from embforge.tuner.study.decision import DEFAULT, DUPLICATES, LEADER
from embforge.tuner.study.race import Racing
from embforge.tuner.study.study import Best, Building, Screened, Screening, Started

WORKLOAD = "zipf:1.05,len=geo:20,batch=2048"
FASTER, BAD = CpuParams(prefetch_bytes=4096), CpuParams(threads=1)
MARKUP = "[bold]loud[/] [/nothing] [link=x]"


def timed(ratio: float) -> Timed:
    return Timed({WORKLOAD: Paired((ratio,), (1.0,))})


def screened(number: int, params: CpuParams, outcome: Outcome, best: Best | None, **counts: int) -> Screened:
    return Screened(number, params, outcome, best, Counter(counts))


BEST = Best(1, FASTER, 0.5)
RUN = [
    Started("forward-x", 1234, 2, None),
    Building(0, CpuParams()),
    Building(1, FASTER),
    Screening(0, CpuParams()),
    screened(0, CpuParams(), timed(1.0), Best(0, CpuParams(), 1.0), timed=3),
    Screening(1, FASTER),
    screened(1, FASTER, timed(0.5), BEST, timed=4),
    screened(2, BAD, LaunchFailed(f"SIGSEGV {MARKUP}\nsecond line"), BEST, timed=4, **{"launch-failed": 1}),
    screened(3, CpuParams(threads=2), timed(0.9), BEST, timed=5, **{"launch-failed": 1}),
    Racing("final", 24, {FASTER: 2.0, BAD: 0.7}),
]


def shown(events: list[Any], status: Status | None = None, **options: Any) -> str:
    """The text that these events print on a screen of 80 columns."""
    screen = Console(file=StringIO(), width=80, highlight=False, **options)
    with display(status or Status(60.0), screen) as tell:
        for event in events:
            tell(event)
    text: str = screen.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_without_a_terminal_only_news_prints_lines() -> None:
    lines = [line.partition("  ")[2] for line in shown(RUN).splitlines()]
    assert lines == [
        "study forward-x: 1,234 points, 2 trials finished already",
        "trial 0: 1.000× (the default), best so far",
        "trial 1: 2.000× (prefetch_bytes=4096), best so far",
        f"trial 2: launch-failed (threads=1): SIGSEGV {MARKUP}",
    ]


def test_without_a_terminal_a_summary_line_is_printed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_display, "LINE_SECONDS", 0.0)
    last = shown(RUN).splitlines()[-1]
    assert last == (
        "0s of 1m | finals: final, 24 rounds, 2.000× the default | 6 of 1,234 points, 2 of them before | "
        "5 timed, 1 launch-failed | best 2.000× the speed of the default (prefetch_bytes=4096)"
    )


def test_a_busy_machine_is_reported_once_and_shown_while_it_lasts() -> None:
    status = Status(60.0)
    news = [status.hear(Racing("final", 0, {}, retaken=count, others=1.3)) for count in (1, 2)]
    again = "rounds are taken again while the budget lasts"
    assert news == [f"finals: other processes use 1.30 CPUs (allowed: 0.1); {again}", None]
    assert status.stage == "finals: final, 0 rounds, 2 disturbed blocks, other processes use 1.30 CPUs"
    assert status.hear(Racing("final", 12, {FASTER: 2.0}, retaken=2)) is None
    assert status.stage == "finals: final, 12 rounds, 2 disturbed blocks, 2.000× the default"


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_named_by_trial_kind_and_reason(kind: str) -> None:
    line = Status(None).hear(screened(7, BAD, FAILURES[kind]("because"), None, **{kind: 1}))
    assert line == f"trial 7: {kind} (threads=1): because"


def test_trials_count_as_compiling_until_they_are_screened_or_fail() -> None:
    status = Status(None)
    seen = []
    for event in RUN:
        status.hear(event)
        seen.append(sorted(status.compiling))
    assert seen == [[], [0], [0, 1], [1], [1], [], [], [], [], []]
    status.hear(Building(9, FASTER))
    status.hear(screened(9, FASTER, FAILURES["compile-failed"]("no"), None))  # never screened
    assert not status.compiling


@pytest.mark.parametrize("budget", [None, 60.0])
def test_the_live_panel_shows_every_state(budget: float | None) -> None:
    for end in range(len(RUN) + 1):
        text = shown(RUN[:end], Status(budget, anchor="the baseline"), force_terminal=True, color_system=None)
        assert all(row in text for row in ("phase", "outcomes", "best", "compiling", "last")), text
    assert "finals: final, 24 rounds, 2.000× the default" in text
    assert "2.000× the speed of the baseline" in text
    assert "5 timed, 1 launch-failed" in text


def test_markup_in_a_message_is_shown_and_not_obeyed() -> None:
    text = shown(RUN[:8], force_terminal=True, color_system=None)
    assert f"SIGSEGV {MARKUP}" in " ".join(text.replace("│", " ").split())
    assert "second line" not in text


# ---- The end ------------------------------------------------------------------------------------------------------


def report_with(ratio: float, *, trials: tuple[Trial, ...] = (), workload: str = WORKLOAD, **changes: Any) -> Report:
    """A report whose candidate takes `ratio` of the default's time, in rounds that differ a little."""
    times = tuple(1e-5 * (1 + i % 5 / 1000) for i in range(24))
    fast = tuple(ratio * time for time in times)
    samples = {DEFAULT: times, LEADER: fast, DUPLICATES[DEFAULT]: times, DUPLICATES[LEADER]: fast}
    default = vars(CpuParams())
    report = Report(
        title="small: forward on cpu avx2",
        study="forward-x",
        created="",
        target="cpu",
        hardware=Hardware("cpu", "a CPU", {}, {}),
        clocks={},
        workloads=(workload,),
        cache="warm",
        versions={},
        spec_toml="",
        command="",
        anchor="the default",
        fields={},
        size=100,
        points=30,
        removed=(),
        docs={},
        default=default,
        best=vars(FASTER),
        leader=vars(FASTER),
        trials=trials,
        finals=finals_of({workload: samples}),
        importances={},
        ledger={"compiling": 8.0, "timing": 0.01, "bookkeeping": 2.0},
        notes=(),
    )
    return replace(report, **changes)


def printed(report: Report, **options: Any) -> str:
    screen = Console(file=StringIO(), width=80, highlight=False, **options)
    print_result(screen, report)
    text: str = screen.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_result_fits_80_columns_and_cuts_nothing() -> None:
    text = printed(report_with(0.5), force_terminal=True, color_system=None)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "zipf:1.05,len=geo:20," in text and "batch=2048" in text
    assert "2.00× the default's speed (95 %: 2.00 to 2.00)" in text
    assert "time: 10s, 80% of it measuring or compiling (compiling 8.0 s, bookkeeping 2.0 s)" in text
    assert "4096" in text and "16384" in text


def test_a_default_that_stays_is_one_line_with_the_reason() -> None:
    text = printed(report_with(1.5))
    (line,) = [line for line in text.splitlines() if "default stays" in line]
    assert line.startswith("The default stays: the best candidate is 0.667x the default")  # whole: no terminal
    assert line.endswith("which is not above the noise floor of 0.5%")


def test_a_default_that_is_the_leader_has_no_table_of_fields() -> None:
    assert "prefetch_bytes" not in printed(report_with(1.0, leader=vars(CpuParams()), best=vars(CpuParams())))


def test_without_finals_nothing_is_decided() -> None:
    text = printed(report_with(1.0, finals=None, best=None, leader=None, ledger={}))
    assert text == "Not decided yet\ntrials: none; of 30 points\n"


def test_failures_are_counted_and_the_first_eight_are_named() -> None:
    bad = tuple(Trial(n, vars(BAD), "wrong-answer", None, f"row {n} {MARKUP}\nmore", {}, {}) for n in range(10))
    lines = printed(report_with(0.5, trials=bad)).splitlines()
    assert "trials: 10 wrong-answer; of 30 points" in lines
    named = [line for line in lines if line.startswith("  trial")]
    assert named == [f"  trial {n}, wrong-answer (threads=1): row {n} {MARKUP}" for n in range(8)]
    assert "  and 2 more; --report names them" in lines


def test_a_workload_is_not_read_as_markup() -> None:
    assert "trace:[/x].npz" in printed(report_with(0.5, workload="trace:[/x].npz", title="[/] on cpu"))


@given(st.lists(st.text("abc=:.1", min_size=1, max_size=30), min_size=1, max_size=6), st.integers(1, 40))
def test_a_workload_is_broken_after_commas_only(parts: list[str], width: int) -> None:
    workload = ",".join(parts)
    lines = broken(workload, width).split("\n")
    assert "".join(lines) == workload
    assert all(line.endswith(",") for line in lines[:-1])
    assert all(len(line) <= width or line.count(",", 0, -1) == 0 for line in lines)
    assert all(len(a) + len(b.partition(",")[0]) + ("," in b) > width for a, b in pairwise(lines))


def test_the_last_lines_name_the_study_and_the_files_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def lines(paths: tuple[Path, ...], unstored: str, page: Path | None = None) -> list[str]:
        study = SimpleNamespace(study_name="forward-x")
        result: Any = SimpleNamespace(study=study, storage="studies.sqlite3", paths=paths, unstored=unstored)
        return places_of(result, page)

    study = f"study: forward-x in sqlite:///{tmp_path}/studies.sqlite3"
    assert lines((), "no finals were held") == [study, "not stored: no finals were held"]
    assert lines((Path("a.json"),), "", Path("b.html")) == [study, "stored: a.json", "report: b.html"]
    for url in ("postgresql+psycopg://me:***@here/there", "journal:///shared/studies.log", "sqlite:////x.sqlite3"):
        assert storage_url(url) == url

"""The result of `embforge tune`: default and best compared, the decision, its evidence, failures, use of time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embforge.cli.common import plain_table
from embforge.cli.durations import show_duration
from embforge.tuner.judge.ledger import work_share
from embforge.tuner.judge.outcome import KINDS
from embforge.tuner.report.page import differing, headline, show, show_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from embforge.tuner.report.data import Finals, Report, Trial
    from embforge.tuner.study.decision import Decision
    from embforge.tuner.tune import TuneResult

FAILURES_NAMED = 8
WORKLOAD_WIDTH = 22
"""The width that 80 columns leave for a workload next to its numbers."""
LEAST_SECONDS = 0.05
"""Shorter phases are left out: they would be shown as 0.0 s."""


def print_result(screen: Console, report: Report) -> None:
    """Prints the whole result, the most interesting part first."""
    if report.finals is not None:
        screen.print(comparison_table(report.finals, report.title))
        if report.leader != report.default:
            screen.print(params_table(report))
    good = report.finals is not None and report.finals.decision.ships
    # On a terminal lines are broken between words; elsewhere they are not, so that they can be searched.
    whole = not screen.is_terminal
    screen.print(verdict(report), style="bold green" if good else "bold", soft_wrap=whole, markup=False)
    for line in notes_of(report):
        screen.print(line, soft_wrap=whole, markup=False)


def verdict(report: Report) -> str:
    """The decision in one sentence; if the default stays, the reason."""
    if report.finals is None or report.finals.decision.ships:
        return headline(report)
    why = report.finals.decision.why
    return why[:1].upper() + why[1:]


def comparison_table(finals: Finals, title: str) -> Table:
    """One line per workload; gains are left out if the measurement was disturbed."""
    table = plain_table(title=title)
    table.add_column("workload", overflow="fold")
    for heading in ("default", "candidate", "x default", "95 % interval", "noise"):
        table.add_column(heading, justify="right", no_wrap=True)
    floors, disturbed = finals.decision.noise_floors, finals.decision.disturbed
    for compared in finals.comparisons:
        gain = compared.gain
        shown = ("-", "-") if disturbed else (f"{gain.median:.3f}", f"{gain.low:.3f} .. {gain.high:.3f}")
        table.add_row(
            _escape(broken(compared.workload)),
            show_seconds(compared.default_seconds),
            show_seconds(compared.best_seconds),
            *shown,
            f"{floors[compared.workload]:.1%}",
        )
    return table


def params_table(report: Report) -> Table:
    """One line per field; fields that the candidate changes are bold."""
    table = plain_table()
    table.add_column("field", no_wrap=True)
    for heading in ("default", "candidate"):
        table.add_column(heading, justify="right")
    leader = report.leader or report.default
    for field, default in report.default.items():
        shown = _escape(show(leader[field]))
        table.add_row(field, _escape(show(default)), shown if leader[field] == default else f"[bold]{shown}[/]")
    return table


def broken(workload: str, width: int = WORKLOAD_WIDTH) -> str:
    """The workload's text, broken after commas into lines of at most `width` where that is possible."""
    lines = [""]
    for part in workload.replace(",", ",\n").splitlines():
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def notes_of(report: Report) -> list[str]:
    """Notes below the tables: the evidence, what failed, where the time went."""
    notes = []
    if report.finals is not None:
        decision = report.finals.decision
        chance = "" if decision.disturbed else f", p = {decision.p:.2g}"
        notes.append(f"finals: {decision.rounds} rounds, noise floor {decision.noise_floor:.2%}{chance}")
    counts = outcomes_of(report)
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"
    notes.append(f"trials: {shown}; of {report.points:,} points")
    failed = [trial for trial in report.trials if trial.score is None]
    notes += [f"  {failure_line(trial, report)}" for trial in failed[:FAILURES_NAMED]]
    if len(failed) > FAILURES_NAMED:
        notes.append(f"  and {len(failed) - FAILURES_NAMED} more; --report names them")
    if report.ledger:
        spent = [f"{phase} {spent:.1f} s" for phase, spent in report.ledger.items() if spent >= LEAST_SECONDS]
        total, share = show_duration(sum(report.ledger.values())), work_share(report.ledger)
        notes.append(f"time: {total}, {share:.0%} of it measuring or compiling ({', '.join(spent)})")
    notes += report.notes
    return notes


def places_of(result: TuneResult, page: Path | None) -> list[str]:
    """One line for each file or storage of the run: the study, the stored results or why there are none, the page."""
    lines = [f"study: {result.study.study_name} in {storage_url(result.storage)}"]
    lines += [f"stored: {path}" for path in result.paths]
    lines += [f"not stored: {result.unstored}"] if result.unstored else []
    return [*lines, f"report: {page}"] if page else lines


def storage_url(storage: str) -> str:
    """The storage as --storage and optuna-dashboard accept it in any directory: a SQLite file becomes a URL."""
    return storage if "://" in storage else f"sqlite:///{Path(storage).expanduser().absolute()}"


def failure_line(trial: Trial, report: Report) -> str:
    """One line about a failed trial: its number, outcome, changed fields and reason."""
    why = trial.why.strip().partition("\n")[0]
    return f"trial {trial.number}, {trial.kind} ({differing(trial.params, report.default)}): {why}"


def outcomes_of(report: Report) -> dict[str, int]:
    """The number of trials per kind of outcome."""
    counts = Counter(trial.kind for trial in report.trials)
    return {kind: counts[kind] for kind in KINDS}


def result_json(report: Report) -> dict[str, Any]:
    """The result as plain data, for --json."""
    finals = report.finals
    return {
        "title": report.title,
        "study": report.study,
        "points": report.points,
        "workloads": list(report.workloads),
        "default": dict(report.default),
        "best": dict(report.best) if report.best else None,
        "leader": dict(report.leader) if report.leader else None,
        "decision": _without_gains(asdict(finals.decision), finals.decision) if finals else None,
        "comparisons": [_without_gains(asdict(c), finals.decision) for c in finals.comparisons] if finals else [],
        "outcomes": outcomes_of(report),
        "failures": [
            {"trial": t.number, "outcome": t.kind, "why": t.why, "params": dict(t.params)}
            for t in report.trials
            if t.score is None
        ],
        "seconds": dict(report.ledger),
        "work_share": work_share(report.ledger) if report.ledger else None,
        "notes": list(report.notes),
    }


def _without_gains(data: dict[str, Any], decision: Decision) -> dict[str, Any]:
    """The data with null for gains and their significance if the measurement was disturbed."""
    withheld = ("gain", "gains", "p") if decision.disturbed else ()
    return data | {name: None for name in withheld if name in data}


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)

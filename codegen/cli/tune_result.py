"""What `embforge tune` says at its end: default against best, the decision, its evidence, failures, use of time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from embforge.codegen.cli.durations import show_duration
from embforge.tuner.ledger import work_share
from embforge.tuner.outcome import KINDS
from embforge.tuner.report import differing, headline, show, show_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from embforge.tuner.report_data import Finals, Report, Trial

FAILURES_NAMED = 8


def print_result(screen: Console, report: Report) -> None:
    """All of it, in the order in which people ask."""
    if report.finals is not None:
        screen.print(comparison_table(report.finals, report.title))
        screen.print(params_table(report))
    good = report.finals is not None and report.finals.decision.ships
    screen.print(headline(report), style="bold green" if good else "bold", markup=False)
    for line in notes_of(report):
        screen.print(line, soft_wrap=True, markup=False)


def comparison_table(finals: Finals, title: str) -> Table:
    """A line a workload."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("workload", overflow="fold")
    for heading in ("default", "candidate", "times faster", "95 % interval", "noise floor"):
        table.add_column(heading, justify="right")
    floors = finals.decision.noise_floors
    for compared in finals.comparisons:
        gain = compared.gain
        table.add_row(
            compared.workload,
            show_seconds(compared.default_seconds),
            show_seconds(compared.best_seconds),
            f"{gain.median:.3f}",
            f"{gain.low:.3f} .. {gain.high:.3f}",
            f"{floors[compared.workload]:.2%}",
        )
    return table


def params_table(report: Report) -> Table:
    """A line a field, what the best changes in bold."""
    from rich.table import Table

    table = Table("field")
    for heading in ("default", "best"):
        table.add_column(heading, justify="right")
    best = report.best or report.default
    for field, default in report.default.items():
        changed = best[field] != default
        table.add_row(field, show(default), f"[bold]{show(best[field])}[/]" if changed else show(best[field]))
    return table


def notes_of(report: Report) -> list[str]:
    """What the tables do not say: why, what failed, where the time went."""
    notes = []
    if report.finals is not None:
        decision = report.finals.decision
        notes.append(decision.why)
        notes.append(f"finals: {decision.rounds} rounds, noise floor {decision.noise_floor:.2%}, p = {decision.p:.2g}")
    counts = outcomes_of(report)
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"
    notes.append(f"trials: {shown}; of {report.points:,} points")
    failed = [trial for trial in report.trials if trial.score is None]
    notes += [f"  {failure_line(trial, report)}" for trial in failed[:FAILURES_NAMED]]
    if len(failed) > FAILURES_NAMED:
        notes.append(f"  and {len(failed) - FAILURES_NAMED} more; --report names them")
    if report.ledger:
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.ledger.items())
        notes.append(
            f"time: {show_duration(sum(report.ledger.values()))} ({spent}): {work_share(report.ledger):.0%} of it "
            "measuring or compiling"
        )
    notes += report.notes
    return notes


def failure_line(trial: Trial, report: Report) -> str:
    """One failed trial by its name and fault."""
    why = trial.why.strip().partition("\n")[0]
    return f"trial {trial.number}, {trial.kind} ({differing(trial.params, report.default)}): {why}"


def outcomes_of(report: Report) -> dict[str, int]:
    """How many trials came to what."""
    counts = Counter(trial.kind for trial in report.trials)
    return {kind: counts[kind] for kind in KINDS}


def result_json(report: Report) -> dict[str, Any]:
    """The same as plain data."""
    finals = report.finals
    return {
        "title": report.title,
        "study": report.study,
        "points": report.points,
        "workloads": list(report.workloads),
        "default": dict(report.default),
        "best": dict(report.best) if report.best else None,
        "leader": dict(report.leader) if report.leader else None,
        "decision": asdict(finals.decision) if finals else None,
        "comparisons": [asdict(compared) for compared in finals.comparisons] if finals else [],
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

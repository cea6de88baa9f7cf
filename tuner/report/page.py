"""Writes the page about a study: one HTML file with drawings that loads no other file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from embforge.codegen.cache import write_atomically
from embforge.codegen.reading.numbers import size
from embforge.codegen.target import target_named
from embforge.tuner.judge.ledger import work_share
from embforge.tuner.judge.outcome import FAILURES, Timed
from embforge.tuner.report import charts
from embforge.tuner.report.data import IMPORTANCE_TRIALS, Report, Trial

FAILURES_SHOWN = 100
FASTEST_SHOWN = 25
TIPS_SHOWN = 600
"""At most this many dots show their trial's parameters as a tip: with more, the page would be too large to mail."""

Cell = tuple[Any, str]
"""A cell of a table: the value that the table is sorted by, and the text that it shows."""


def write_report(path: Path, report: Report) -> None:
    """Writes the page to a file; after an error or a crash, the file is as it was."""
    write_atomically(path, page(report).encode())


def page(report: Report) -> str:
    """The page's HTML."""
    environment = Environment(
        loader=PackageLoader("embforge.templates", "report"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": show_seconds, "differing": differing, "show": show, "sentence": sentence}
    return environment.get_template("page.html.j2").render(_template_variables(report))


def differing(params: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    """The fields whose values differ from the default's, as `field=value`."""
    changed = [f"{field}={show(value)}" for field, value in params.items() if value != default.get(field)]
    return " ".join(changed) or "the default"


def show(value: Any) -> str:
    """A parameter's value as the page shows it everywhere."""
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def sentence(text: str) -> str:
    """The text with a capital letter at its start and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def show_seconds(seconds: float) -> str:
    """A duration with three significant digits, in s, ms, µs or ns."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.{max(0, 3 - len(str(int(seconds * factor))))}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _template_variables(report: Report) -> dict[str, Any]:
    """The variables of the page's template."""
    timed = [trial for trial in report.trials if trial.score is not None]
    failed = [trial for trial in report.trials if trial.score is None]
    fastest = sorted(timed, key=lambda trial: (trial.score, trial.number))[:FASTEST_SHOWN]
    headings, cells = _resource_columns(report.target)
    return {
        "report": report,
        "headline": headline(report),
        "tiles": _tiles(report),
        "forest": _forest(report),
        "history": charts.history([(trial.number, trial.kind, trial.score) for trial in report.trials]),
        "tips": _tips(report),
        "slices": _slices(report, timed),
        "no_importances": f"{len(timed)} trials were timed; from {IMPORTANCE_TRIALS} on, this shows which parameters "
        "the fastest tenth of them have in common.",
        "outcomes": _outcomes(report.trials),
        "failures": failed[:FAILURES_SHOWN],
        "failures_left_out": max(0, len(failed) - FAILURES_SHOWN),
        "fastest": [(trial, cells(trial)) for trial in fastest],
        "resource_headings": headings,
        "facts": _facts(report),
        "ledger": _shares(report.ledger),
    }


def headline(report: Report) -> str:
    """The decision in one line."""
    if report.finals is None:
        return "Not decided yet"
    if report.finals.decision.disturbed:
        return "Nothing decided: the machine was busy"
    if not report.finals.decision.ships:
        return "The default stays"
    gain = report.finals.decision.gain
    return f"{gain.median:.2f}× the default's speed (95 %: {gain.low:.2f} to {gain.high:.2f})"


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    tiles = [("Trials", f"{len(report.trials):,}", f"of {report.points:,} points")]
    if report.finals is not None:
        decision = report.finals.decision
        tiles.append(("Noise floor", f"{decision.noise_floor:.2%}", "gains below it do not count"))
        if not decision.disturbed:
            chance = f"that the default is as fast; {decision.rounds} rounds"
            tiles.append(("p (Wilcoxon)", f"{decision.p:.1g}", chance))
    if report.ledger:
        used = sum(report.ledger.values())
        tiles.append(("Wall time", f"{used:,.0f} s", f"{work_share(report.ledger):.0%} of it measuring or compiling"))
    return tiles


def _forest(report: Report) -> charts.Forest | None:
    if report.finals is None or not report.finals.comparisons or report.finals.decision.disturbed:
        return None
    gains = {c.workload: (c.gain.median, c.gain.low, c.gain.high) for c in report.finals.comparisons}
    return charts.forest(gains, report.finals.decision.noise_floor)


def _tips(report: Report) -> dict[int, str]:
    """By a trial's number: the text that its dot shows under the mouse."""
    tips = {}
    for index, trial in enumerate(report.trials):
        outcome = f"{trial.score:.3f}" if trial.score is not None else f"{trial.kind}: {trial.why[:200]}"
        params = f"\n{differing(trial.params, report.default)}" if index < TIPS_SHOWN else ""
        tips[trial.number] = f"trial {trial.number}: {outcome}{params}"
    return tips


def _slices(report: Report, timed: Sequence[Trial]) -> list[charts.Slice]:
    """A drawing of each field that has more than one choice, the most important field first."""
    all_scores = [trial.score for trial in timed if trial.score is not None]
    if not all_scores:
        return []
    order = [*report.importances, *(field for field in report.fields if field not in report.importances)]
    slices = []
    for field in order:
        scores: dict[str, list[float]] = {show(choice): [] for choice in report.fields[field]}
        for trial in timed:
            if trial.score is not None:
                scores.setdefault(show(trial.params[field]), []).append(trial.score)
        if len(scores) > 1:
            chosen = show((report.best or {}).get(field, ""))
            slices.append(charts.slice_of(field, scores, all_scores, chosen, show(report.default[field])))
    return slices


def _outcomes(trials: Sequence[Trial]) -> list[tuple[str, int, str]]:
    """Each kind of outcome with its count and its meaning, in the order of `KINDS`."""
    kinds = [trial.kind for trial in trials]
    types = {Timed.kind: Timed, **FAILURES}
    return [(kind, kinds.count(kind), (cls.__doc__ or "").split("\n")[0]) for kind, cls in types.items()]


def _resource_columns(target: str) -> tuple[list[str], Callable[[Trial], list[Cell]]]:
    """The headings of the columns about a kernel, and a function that returns a trial's cells."""
    common = ["kernel", "verified in", "timed in"]
    if not target_named(target).needs_gpu:
        return common, _common_cells
    return ["registers", "spilled", "shared", "occupancy", "in flight/SM", *common], lambda trial: [
        _cell(_worst(trial, "registers", max), str),
        _cell(_worst(trial, "spill_bytes", max), lambda count: f"{count} B"),
        _cell(_worst(trial, "shared_bytes", max), lambda count: f"{count:,} B"),
        _cell(_worst(trial, "occupancy", min), lambda share: f"{share:.0%}"),
        _cell(_worst(trial, "bytes_in_flight", min), partial(size, binary=True)),
        *_common_cells(trial),
    ]


def _common_cells(trial: Trial) -> list[Cell]:
    return [
        _cell(trial.build.get("binary_bytes"), size),
        _cell(trial.seconds.get("verifying"), lambda seconds: f"{seconds:.2f} s"),
        _cell(trial.seconds.get("timing"), lambda seconds: f"{seconds:.2f} s"),
    ]


def _cell(value: Any, text: Callable[[Any], str]) -> Cell:
    return ("", "-") if value is None else (value, text(value))


def _worst(trial: Trial, figure: str, worst: Callable[[list[Any]], Any]) -> Any:
    """A figure of the kernel symbol for which it is worst; None if it is not known."""
    symbols = trial.build.get("resources") or ()
    values = [symbol[figure] for symbol in symbols if symbol.get(figure) is not None]
    return worst(values) if values else None


def _facts(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    hardware = report.hardware
    sizes = [(name.removesuffix("_bytes"), _size(name, value)) for name, value in hardware.sizes.items()]
    clocks = [(f"{name} clock", f"{rate} MHz") for name, rate in report.clocks.items() if rate is not None]
    return [
        ("Hardware", [("name", hardware.name), *hardware.identity.items(), *sizes, *clocks]),
        ("Workloads", [(str(number), workload) for number, workload in enumerate(report.workloads, 1)]),
        ("Versions", list(report.versions.items())),
    ]


def _size(name: str, value: int) -> str:
    if not name.endswith("_bytes"):
        return str(value)
    return size(value, binary=True)


def _shares(ledger: Mapping[str, float]) -> list[tuple[str, float, float]]:
    used = sum(ledger.values())
    return [(name, seconds, seconds / used if used else 0.0) for name, seconds in ledger.items()]

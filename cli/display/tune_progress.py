"""Progress of a running tuner on stderr: a live panel on a terminal, otherwise a line per notable event."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from embforge.cli.common import console
from embforge.cli.durations import show_duration
from embforge.tuner.judge.outcome import Timed
from embforge.tuner.measure.quiet import QUIET
from embforge.tuner.report.page import differing
from embforge.tuner.study.race import Racing
from embforge.tuner.study.study import Best, Building, Screened, Screening, SearchEvent, Started

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from embforge.codegen.params import Params

REFRESHES_A_SECOND = 1
"""Low, because drawing takes a CPU for some milliseconds, which a kernel that is being timed needs."""
LINE_SECONDS = 15.0
"""How often a line is printed without a terminal if there is no news."""


@dataclass
class Status:
    """The state of a run, put together from its events."""

    budget: float | None
    """Seconds; None: no limit."""
    anchor: str = "the default"
    began: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    points: int = 0
    known: int = 0
    """How many trials had finished before this run."""
    counts: Counter[str] = field(default_factory=Counter)
    best: Best | None = None
    compiling: dict[int, Params] = field(default_factory=dict)
    """Trials whose kernels are being compiled, by number."""
    racing: Racing | None = None
    last: str = ""

    def hear(self, event: SearchEvent | Racing) -> str | None:
        """Updates the state with an event; returns a line of text if the event is worth one."""
        match event:
            case Started():
                self.phase, self.points, self.known, self.best = "search", event.points, event.known, event.best
                before = f", {event.known} trials finished already" if event.known else ""
                return f"study {event.study}: {event.points:,} points{before}"
            case Building():
                self.compiling[event.number] = event.params
            case Screening():
                self.compiling.pop(event.number, None)
            case Screened():
                return self._screened(event)
            case Racing():
                return self._raced(event)
        return None

    def _screened(self, event: Screened) -> str | None:
        better = event.best is not None and event.best.number == event.number
        self.compiling.pop(event.number, None)
        self.counts, self.best = event.counts, event.best
        params = _fields(event.params)
        if isinstance(event.outcome, Timed):
            self.last = f"trial {event.number}: {1 / event.outcome.score:.3f}× ({params})"
            return f"{self.last}, best so far" if better else None
        self.last = f"trial {event.number}: {event.outcome.kind} ({params}): {first_line(event.outcome.why)}"
        return self.last

    def _raced(self, event: Racing) -> str | None:
        first = event.retaken == 1 and (self.racing is None or not self.racing.retaken)
        self.phase, self.racing = "finals", event
        self.compiling.clear()
        if not first:
            return None
        again = "rounds are taken again while the budget lasts"
        return f"finals: other processes use {event.others:.2f} CPUs (allowed: {QUIET:g}); {again}"

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def time(self) -> str:
        limit = "" if self.budget is None else f" of {show_duration(self.budget)}"
        return f"{show_duration(self.elapsed)}{limit}"

    @property
    def stage(self) -> str:
        """The phase; in the finals also how far they are and the leader's gain."""
        if self.racing is None:
            return self.phase
        if self.racing.others > QUIET:
            now = f"other processes use {self.racing.others:.2f} CPUs"
        else:
            now = f"{max(self.racing.gains.values(), default=1.0):.3f}× the default"
        retaken = f", {self.racing.retaken} disturbed blocks" if self.racing.retaken else ""
        return f"finals: {self.racing.stage}, {self.racing.rounds} rounds{retaken}, {now}"

    @property
    def trials(self) -> str:
        tried = sum(self.counts.values()) or self.known
        before = f", {self.known} of them before" if self.known else ""
        return f"{tried:,} of {self.points:,} points{before}" if self.points else "none yet"

    @property
    def outcomes(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "none yet"

    @property
    def speed(self) -> str:
        """The speed of the best candidate so far relative to the anchor's, as the search measured it."""
        if self.best is None:
            return "nothing timed yet"
        return f"{1 / self.best.score:.3f}× the speed of {self.anchor} ({_fields(self.best.params)})"

    def line(self) -> str:
        """The whole state in one line."""
        return f"{self.time} | {self.stage} | {self.trials} | {self.outcomes} | best {self.speed}"

    def __rich__(self) -> RenderableType:
        from rich.markup import escape
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar = Table.grid(padding=(0, 1))
        if self.budget is None:
            bar.add_row(self.time)
        else:
            bar.add_row(ProgressBar(self.budget, min(self.elapsed, self.budget), width=36), self.time)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        rows.add_row("time", bar)
        rows.add_row("phase", self.stage)
        rows.add_row("trials", self.trials)
        rows.add_row("outcomes", self.outcomes)
        rows.add_row("best", f"[bold]{escape(self.speed)}[/]")
        ahead = [f"{number} ({_fields(params)})" for number, params in self.compiling.items()]
        rows.add_row("compiling", escape("; ".join(ahead)) or "nothing")
        rows.add_row("last", escape(self.last) or "-")
        return Panel(rows, title="embforge tune", title_align="left", border_style="dim")


@contextmanager
def display(status: Status, screen: Console | None = None) -> Iterator[Callable[[SearchEvent | Racing], object]]:
    """Shows the status, live on a terminal, otherwise line by line. Pass events to the yielded function."""
    screen = screen or console(stderr=True)
    if not screen.is_terminal:
        yield _liner(status, screen)
        return
    from rich.live import Live

    with Live(status, console=screen, refresh_per_second=REFRESHES_A_SECOND, transient=True):
        yield status.hear


def _liner(status: Status, screen: Console) -> Callable[[SearchEvent | Racing], None]:
    last_line = status.began

    def tell(event: SearchEvent | Racing) -> None:
        nonlocal last_line
        news = status.hear(event)
        if news is None and time.monotonic() - last_line < LINE_SECONDS:
            return
        last_line = time.monotonic()
        screen.print(
            f"{show_duration(status.elapsed)}  {news}" if news else status.line(), soft_wrap=True, markup=False
        )

    return tell


def _fields(params: Params) -> str:
    """The fields that differ from the default, as text."""
    return differing(asdict(params), asdict(type(params)()))


def first_line(text: str) -> str:
    """The first line of a text such as a compiler's log."""
    return text.strip().partition("\n")[0]

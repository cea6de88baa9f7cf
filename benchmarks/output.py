"""The output that all benchmarks share: tables for the screen and for pages, verdicts, result files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.criteria import Verdict

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Sheet:
    """A table that has the same cells on the screen and on a page."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    """This many columns from the left hold words; the others hold numbers."""

    def screen(self, title: str | None = None) -> Table:
        """The table for the terminal. Words that are bold on a page are red."""
        table = Table(title=title, title_justify="left")
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if index < self.words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(re.sub(r"\*\*(.+?)\*\*", r"[red]\1[/]", cell) for cell in row))
        return table

    def markdown(self) -> str:
        """The table as Markdown, for a page."""
        rule = ["---" if index < self.words else "--:" for index in range(len(self.headings))]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in (self.headings, rule, *self.rows))


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces what is between two lines of a page by `text`. `ValueError` if the page lacks one of the lines."""
    old = page.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise ValueError(f"{page} lacks the marker {begin} or {end}; put them before and after the results")
    head, rest = old.split(begin, 1)
    tail = rest.split(end, 1)[1]
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def print_verdicts(console: Console, named: Iterable[tuple[str, Verdict]]) -> None:
    """Prints one line per verdict: pass or FAIL, the name of what was judged, the target and what was measured."""
    for name, verdict in named:
        word = "[green]pass[/]" if verdict.passed else "[red]FAIL[/]"
        console.print(f"{word} {name}{verdict.criterion}: {verdict.measured}")


def write_record(
    suite: str, latest: str, record: dict[str, Any], entries: dict[str, Sequence[Any]], console: Console, *, page: bool
) -> None:
    """Writes a dated file and, with `page`, also the file `latest`, whose results the page shows.

    Each of the `entries` takes one line, so that diffs are readable and samples do not take a line each.
    """
    now = datetime.now(UTC)
    ((key, values),) = entries.items()
    lines = ",\n".join(json.dumps(value) for value in values)
    head = json.dumps({"date": now.isoformat(timespec="seconds"), **record}, indent=1)[:-2]
    text = f'{head},\n "{key}": [\n{lines}\n ]\n}}\n'
    RESULTS.mkdir(exist_ok=True)
    dated = RESULTS / f"{now:%Y-%m-%d-%H%M}-{suite}.json"
    dated.write_text(text, encoding="utf-8")
    console.print(f"wrote {dated.relative_to(ROOT)}")
    if page:
        (RESULTS / latest).write_text(text, encoding="utf-8")
        console.print(f"wrote {latest} next to it")
    else:
        console.print(
            f"[yellow]other processes used the machine: {latest} and the page are not changed[/] (--write changes them)"
        )

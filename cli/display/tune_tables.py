"""Tables of `embforge tune`: the search space, and CUDA plans ranked without a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from embforge.cli.common import plain_table
from embforge.codegen.reading.numbers import size
from embforge.tuner.report.page import differing, show

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from embforge.tuner.estimate.static import StaticReport
    from embforge.tuner.search.space import Space

SHOWN = 12


def space_table(space: Space) -> RenderableType:
    """The fields with their choices, the size of the space, and how many points each constraint removed."""
    from rich.console import Group

    what = f"{space.op} on {space.target} {space.arch}"
    title = f"Space of the {what}: {space.size:,} combinations, {len(space.points):,} worth a trial"
    fields = plain_table()
    fields.add_column("field", no_wrap=True)
    fields.add_column("default", no_wrap=True)
    fields.add_column("choices")
    fields.add_column("in use", justify="right", no_wrap=True)
    for name, choices in space.fields.items():
        used = {getattr(point, name) for point in space.points}
        fields.add_row(name, show(getattr(space.default, name)), ", ".join(map(show, choices)), str(len(used)))
    removed = plain_table()
    removed.add_column("constraint", no_wrap=True)
    removed.add_column("points", justify="right", no_wrap=True)
    removed.add_column("because")
    for entry in space.removed:
        removed.add_row(entry.constraint, f"{entry.points:,}", entry.why)
    if not space.removed:
        return Group(_title(title), fields)
    return Group(
        _title(title), fields, _title("Removed points, each counted for the first constraint that applies"), removed
    )


def space_json(space: Space) -> dict[str, Any]:
    """The space as plain data, for --json."""
    return {
        "op": space.op,
        "target": space.target,
        "arch": space.arch,
        "fields": {name: list(choices) for name, choices in space.fields.items()},
        "default": asdict(space.default),
        "size": space.size,
        "points": len(space.points),
        "removed": [asdict(removed) for removed in space.removed],
    }


def static_table(report: StaticReport, shown: int = SHOWN) -> RenderableType:
    """The best plans and the default plan, each with the fields that differ from the default. The title says that it
    is an estimate."""
    from rich.console import Group

    table = plain_table()
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("plan: fields that differ from the default", overflow="fold")
    for heading in ("regs", "occup.", "flight\nper SM", "blocks\nfilled", "sectors", "estimate"):
        table.add_column(heading, justify="right", no_wrap=True)
    default = asdict(report.space.default)
    rows = [row for row in report.rows if row.rank <= shown or row.params == report.space.default]
    for row in rows:
        table.add_row(
            str(row.rank),
            differing(asdict(row.params), default),
            str(row.registers),
            f"{row.occupancy:.0%}",
            size(row.bytes_in_flight, binary=True),
            f"{row.filled:.0%}",
            "-" if row.sectors_per_output is None else f"{row.sectors_per_output:.2f}",
            f"{row.score:.3f}",
        )
    return Group(_title(f"Estimate, no measurement: {report.op} for {report.arch}, {report.workload}"), table)


def _title(text: str) -> Text:
    """A line above a table, not the table's title, because a title would be broken at the table's width."""
    from rich.text import Text

    return Text(text, style="italic")

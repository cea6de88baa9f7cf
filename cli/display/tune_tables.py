"""Tables of `embforge tune`: the space that is searched, and CUDA plans ranked without a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from embforge.codegen.params import Params
    from embforge.tuner.search.space import Space
    from embforge.tuner.estimate.static import StaticReport

SHOWN = 12


def space_table(space: Space) -> RenderableType:
    """The fields with their choices, the size, and what each constraint removed."""
    from rich.console import Group

    what = f"{space.op} on {space.target} {space.arch}"
    title = f"Space of the {what}: {space.size:,} combinations, {len(space.points):,} worth a trial"
    fields = _table()
    fields.add_column("field", no_wrap=True)
    fields.add_column("default", no_wrap=True)
    fields.add_column("choices")
    fields.add_column("in use", justify="right", no_wrap=True)
    for name, choices in space.fields.items():
        used = {getattr(point, name) for point in space.points}
        fields.add_row(name, _text(getattr(space.default, name)), ", ".join(map(_text, choices)), str(len(used)))
    removed = _table()
    removed.add_column("constraint", no_wrap=True)
    removed.add_column("points", justify="right", no_wrap=True)
    removed.add_column("because")
    for entry in space.removed:
        removed.add_row(entry.constraint, f"{entry.points:,}", entry.why)
    if not space.removed:
        return Group(_title(title), fields)
    return Group(_title(title), fields, _title("Removed, each counted by the first that applies"), removed)


def space_json(space: Space) -> dict[str, Any]:
    """The same as plain data."""
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
    """The best plans and the default, by what differs from the default. An estimate, and it says so."""
    from rich.console import Group

    table = _table()
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("plan, where it is not the default", overflow="fold")
    for heading in ("regs", "occup.", "flight\na SM", "blocks\nfilled", "sectors", "estimate"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [row for row in report.rows if row.rank <= shown or row.params == report.space.default]
    for row in rows:
        table.add_row(
            str(row.rank),
            _differences(row.params, report.space.default),
            str(row.registers),
            f"{row.occupancy:.0%}",
            f"{row.bytes_in_flight / 1024:.0f} KB",
            f"{row.filled:.0%}",
            "-" if row.sectors_per_output is None else f"{row.sectors_per_output:.2f}",
            f"{row.score:.3f}",
        )
    return Group(_title(f"Estimate, no measurement: {report.op} for {report.arch}, {report.workload}"), table)


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _title(text: str) -> Text:
    """Above a table, not of it: a table's own title is no wider than the table."""
    from rich.text import Text

    return Text(text, style="italic")


def _differences(params: Params, default: Params) -> str:
    from dataclasses import fields

    changed = [f.name for f in fields(params) if getattr(params, f.name) != getattr(default, f.name)]
    return ", ".join(f"{name}={_text(getattr(params, name))}" for name in changed) or "the default"


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

"""The table of resources that each kernel uses on a GPU multiprocessor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from embforge.cli.common import plain_table
from embforge.codegen.reading.numbers import size

if TYPE_CHECKING:
    from rich.table import Table


def resource_table(records: Iterable[dict[str, Any]]) -> Table:
    """One line per symbol of each kernel: registers, spills, shared memory, occupancy, bytes in flight."""
    table = plain_table(title="What NVRTC made of it, per GPU generation")
    for heading in ("arch", "ids", "kernel"):
        table.add_column(heading, no_wrap=True)
    for heading in ("registers", "spilled", "shared", "occupancy", "in flight/SM"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        for number, symbol in enumerate(record["symbols"]):
            table.add_row(
                record["arch"] if number == 0 else "",
                record["id_dtype"] if number == 0 else "",
                str(symbol.get("symbol", "")).removeprefix(record["uri"]).strip("_") or "forward",
                _show(symbol.get("registers")),
                _show(symbol.get("spill_bytes"), " B"),
                _show(symbol.get("shared_bytes"), " B"),
                "-" if symbol.get("occupancy") is None else f"{symbol['occupancy']:.0%}",
                "-" if symbol.get("bytes_in_flight") is None else size(symbol["bytes_in_flight"], binary=True),
            )
    return table


def _show(value: int | None, unit: str = "") -> str:
    return "-" if value is None else f"{value}{unit}"

"""Counts what the lanes of a GPU's warps do, by the SIMT executor and without a GPU: `python -m benchmarks.lanes`.

It compares embforge's kernels with the mapping "one warp per bag, sized by the widest table", on the same batches. Two
figures have a limit (`LIMITS`); the command fails if one is missed. `--write` writes the tables into
docs/emulated_gpu.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from torch import Tensor

from benchmarks.output import DOCS, Sheet, replace_between
from benchmarks.warp_per_bag import count_warp_per_bag
from embforge.cli.common import load_spec
from embforge.cli.display.counters import COUNTED_ROWS
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH, WARP
from embforge.inputs import Batch
from embforge.launch.simt.counters import SECTOR, KernelCounters, Traffic, total
from embforge.tuner.workload.tensors import input_of
from embforge.tuner.workload.workload import make_batch, parse
from embforge.verify.cases import draw_tables
from embforge.verify.counting import count_lookup
from embforge.verify.probes import shrunk

BEGIN, END = "<!-- lanes: written by make lanes -->", "<!-- end of lanes -->"

SPECS = ("dlrm", "mixed")
WORKLOADS = ("uniform,len=geo:20,batch=256", "uniform,len=geo:20,batch=2048")
LIMITS = {"active lanes": 0.75, "load efficiency": 0.95}
"""The least share of a warp's lanes that row loads must use, and the least share of the loaded sectors' bytes that must
be requested, for tables whose rows are whole sectors."""


@dataclass(frozen=True)
class Figures:
    """The figures of one mapping for one batch."""

    mapping: str
    rows: Traffic
    """Row loads of all tables."""
    whole: Traffic
    """Row loads of tables whose rows are a multiple of a sector."""
    by_table: dict[str, Traffic]
    ids_per_bag: float
    """Sectors of ids loaded per bag, over bags of every pooling."""
    offsets_per_bag: float

    @property
    def active(self) -> float:
        """The share of a warp's lanes that row loads use."""
        return (self.rows.active_lanes or 0.0) / WARP

    @property
    def efficiency(self) -> float:
        """The share of the loaded sectors' bytes that is requested, for tables whose rows are whole sectors."""
        return self.whole.efficiency or 0.0


@dataclass(frozen=True)
class DrawnBatch:
    """A plan, its tables and one batch."""

    plan: Plan
    workload: str
    tables: tuple[Tensor, ...]
    batch: Batch


@dataclass(frozen=True)
class Comparison:
    """Both mappings on one batch."""

    drawn: DrawnBatch
    ours: Figures
    warp_per_bag: Figures


def draw(name: str, workload: str, arch: str = DEFAULT_ARCH, seed: int = 0) -> DrawnBatch:
    """Draws a batch for an example spec, and tables small enough to fill."""
    spec = load_spec(name)
    small = shrunk(spec, COUNTED_ROWS)
    batch = input_of(make_batch(small, parse(workload), seed))
    plan = Plan("forward", "simt", arch, "int64", spec, CudaParams())
    return DrawnBatch(plan, workload, draw_tables(small, seed), batch)


def count_ours(drawn: DrawnBatch) -> Figures:
    """The figures of embforge's kernels."""
    whole_lookup = count_lookup(drawn.plan, drawn.tables, drawn.batch)[-1]
    return _figures("embforge", drawn, whole_lookup.counters)


def count_other(drawn: DrawnBatch) -> Figures:
    """The figures of the mapping with one warp per bag."""
    return _figures("one warp per bag", drawn, count_warp_per_bag(drawn.plan, drawn.tables, drawn.batch))


def _figures(mapping: str, drawn: DrawnBatch, counters: KernelCounters) -> Figures:
    plan, bags = drawn.plan, len(drawn.plan.layout.features) * drawn.batch.batch
    return Figures(
        mapping,
        counters.loaded("rows"),
        counters.rows_of(t.table.name for t in plan.layout.tables if t.row_bytes % SECTOR == 0),
        {t.name: counters.rows_of([t.name]) for t in plan.spec.tables},
        counters.loaded("ids").sectors / bags,
        counters.loaded("offsets").sectors / bags,
    )


def misses(drawn: DrawnBatch, figures: Figures) -> list[str]:
    """One line for each limit that is missed."""
    shares = {"active lanes": figures.active, "load efficiency": figures.efficiency}
    name = f"{drawn.plan.spec.name}, {drawn.workload}"
    return [
        f"{name}: {what} {shares[what]:.1%}, at least {least:.0%} is asked"
        for what, least in LIMITS.items()
        if shares[what] < least
    ]


HEADINGS = (
    "active lanes",
    "load efficiency",
    "of whole-sector rows",
    "loads without a lane",
    "id sectors /bag",
    "offset sectors /bag",
)


def summary(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """The cells of one line per mapping."""
    for f in (comparison.ours, comparison.warp_per_bag):
        idle = f.rows.idle / (f.rows.idle + f.rows.instructions)
        yield (
            comparison.drawn.plan.spec.name or "",
            comparison.drawn.workload,
            f.mapping,
            f"{f.active:.1%}",
            f"{f.rows.efficiency or 0:.1%}",
            f"{f.efficiency:.1%}",
            f"{idle:.1%}",
            f"{f.ids_per_bag:.2f}",
            f"{f.offsets_per_bag:.2f}",
        )


def by_row_size(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """The cells of one line per row size, which show for which sizes lanes have no work."""
    sizes = sorted({(t.row_bytes, t.table.embedding_dim, t.table.dtype) for t in comparison.drawn.plan.layout.tables})
    for size, dim, dtype in sizes:
        names = [t.name for t in comparison.drawn.plan.spec.tables if (t.embedding_dim, t.dtype) == (dim, dtype)]
        ours, other = (total(f.by_table[n] for n in names) for f in (comparison.ours, comparison.warp_per_bag))
        if ours.instructions:
            yield (
                comparison.drawn.plan.spec.name or "",
                f"{dim} {dtype}",
                f"{size}",
                f"{ours.lanes:,}",
                f"{(ours.active_lanes or 0) / WARP:.1%}",
                f"{ours.efficiency or 0:.1%}",
                f"{(other.active_lanes or 0) / WARP:.1%}",
                f"{other.efficiency or 0:.1%}",
            )


ROW_HEADINGS = ("lane loads", "active lanes", "efficiency", "one warp per bag: lanes", "efficiency")


def main() -> None:
    """Prints the tables; exits with 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lanes", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/emulated_gpu.md")
    arguments = parser.parse_args()
    batches = [draw(name, workload) for name in SPECS for workload in WORKLOADS]
    comparisons = [Comparison(drawn, count_ours(drawn), count_other(drawn)) for drawn in batches]
    sheets = [
        Sheet(("spec", "workload", "mapping", *HEADINGS), [line for c in comparisons for line in summary(c)], words=3),
        Sheet(
            ("spec", "rows", "bytes", *ROW_HEADINGS),
            [line for c in comparisons if c.drawn.workload == WORKLOADS[-1] for line in by_row_size(c)],
            words=2,
        ),
    ]
    console = Console(width=None if sys.stdout.isatty() else 150)
    for sheet in sheets:
        console.print(sheet.screen())
    if arguments.write:
        replace_between(DOCS / "emulated_gpu.md", BEGIN, END, "\n".join(sheet.markdown() for sheet in sheets))
    missed = [miss for c in comparisons for miss in misses(c.drawn, c.ours)]
    for miss in missed:
        print("missed:", miss)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
